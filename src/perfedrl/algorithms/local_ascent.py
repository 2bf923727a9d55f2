"""Plain policy-gradient steps on an agent's own return: the local work of FedAvg-PG, fine-tuning and Reptile."""

from functools import partial

import optax
from jaxtyping import PRNGKeyArray

from perfedrl.algorithms.base import AveragedParameters, local_steps, static
from perfedrl.algorithms.checks import check_counts, check_step_sizes
from perfedrl.estimators import Objective, StepKeys
from perfedrl.types import Params


class LocalAscent(AveragedParameters):
    """The base of algorithms whose agents take policy-gradient steps from m trajectories each."""

    alpha: float
    beta: float
    local_steps: int = static(5)
    m: int = static(30)

    def __check_init__(self) -> None:
        check_step_sizes(self.alpha, self.beta)
        check_counts(local_steps=self.local_steps, m=self.m)

    @property
    def trajectories_per_round(self) -> int:
        return self.local_steps * self.m

    def client(
        self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray
    ) -> tuple[Params, tuple[()]]:
        """Take tau local steps along the estimated policy gradient."""
        return local_steps(partial(self.step, agent), (message, state), agent, key, self.local_steps)

    def step(self, agent: Objective, carry: tuple[Params, tuple[()]], keys: StepKeys) -> tuple[Params, tuple[()]]:
        """Take one local ascent step."""
        theta, state = carry
        return optax.tree.add_scale(theta, self.beta, agent.gradient(theta, keys.outer, self.m)), state
