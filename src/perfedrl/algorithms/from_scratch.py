"""From scratch: no training; every agent learns from the common start by its own trajectories alone."""

from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import Algorithm, ServerState, static
from perfedrl.algorithms.checks import check_counts, check_step_sizes
from perfedrl.algorithms.fine_tuned import fine_tune
from perfedrl.estimators import Objective
from perfedrl.types import Array, Params


class FromScratch(Algorithm):
    """Take `steps` policy-gradient steps of size alpha from the policy's start at deployment, without a federation.

    The reference for few-shot personalization: the gain of another algorithm over it is the worth of that algorithm's
    training. Rounds cost neither trajectories nor bytes; the steps share the trajectories of the deployment.
    """

    alpha: float
    steps: int = static(10)

    federated = False

    def __check_init__(self) -> None:
        check_step_sizes(self.alpha, 1.0)
        check_counts(steps=self.steps)

    @property
    def personalization_steps(self) -> int:
        return self.steps

    @property
    def trajectories_per_round(self) -> int:
        return 0

    def init(self, params: Params) -> tuple[ServerState, tuple[()]]:
        return ServerState(params), ()

    def client(
        self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray
    ) -> tuple[tuple[()], tuple[()]]:
        return (), ()

    def server(self, state: ServerState, uploads: tuple[()], weights: Float[Array, " n"]) -> ServerState:
        return state

    def shared(self, message: Params) -> Params:
        return message

    def personalize(self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return fine_tune(agent, message, self.alpha, key, m, self.steps)
