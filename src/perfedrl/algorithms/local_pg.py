"""LocalPG: every agent trains alone, from scratch; the baseline without federation."""

import optax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import Algorithm, ServerState, local_steps, static
from perfedrl.algorithms.checks import check_counts, check_step_sizes
from perfedrl.estimators import Objective, StepKeys
from perfedrl.types import Array, Params


class LocalPG(Algorithm):
    """Policy-gradient steps of each agent on its own return; nothing is sent, and only the start is shared.

    The paper's from-scratch baseline (Appendix C.2); at its largest budget, the paper's specialist. A round is
    `local_steps` steps from m trajectories each. An agent deploys its parameters without a further step.
    """

    beta: float
    local_steps: int = static(1)
    m: int = static(20)

    federated = False
    serves_unseen = False

    def __check_init__(self) -> None:
        check_step_sizes(0.0, self.beta)
        check_counts(local_steps=self.local_steps, m=self.m)

    @property
    def trajectories_per_round(self) -> int:
        return self.local_steps * self.m

    def init(self, params: Params) -> tuple[ServerState, Params]:
        return ServerState(params), params

    def client(self, message: Params, state: Params, agent: Objective, key: PRNGKeyArray) -> tuple[tuple[()], Params]:
        """Take local steps along the estimated policy gradient; the agent's parameters are its personal state."""

        def step(theta: Params, keys: StepKeys) -> Params:
            return optax.tree.add_scale(theta, self.beta, agent.gradient(theta, keys.outer, self.m))

        return (), local_steps(step, state, agent, key, self.local_steps)

    def server(self, state: ServerState, uploads: tuple[()], weights: Float[Array, " n"]) -> ServerState:
        return state

    def shared(self, message: Params) -> Params:
        """Return the start, the only parameters that agents have in common."""
        return message

    def personalize(self, message: Params, state: Params, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return state
