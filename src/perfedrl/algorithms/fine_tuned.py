"""Fine-tuning: FedAvg-PG in training, and several local steps instead of one at deployment."""

import optax
from jaxtyping import PRNGKeyArray

from perfedrl.algorithms.base import AveragedParameters, local_steps, static
from perfedrl.algorithms.checks import check_counts, check_step_sizes
from perfedrl.estimators import Objective, StepKeys, adapt
from perfedrl.types import Params, Scalar, StepSize


class LocalAscent(AveragedParameters):
    """The base of algorithms whose agents take policy-gradient steps from m trajectories each, as in FedAvg-PG."""

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
        return ascend(agent, message, self.beta, key, self.m, self.local_steps), state


class FineTuned(LocalAscent):
    """Train one shared policy by FedAvg-PG, then fine-tune it on every agent alone.

    At deployment the agent's trajectories are split over `fine_tuning_steps` policy-gradient steps of size alpha. With
    one step it is FedAvg-PG.
    """

    fine_tuning_steps: int = static(10)

    def __check_init__(self) -> None:
        check_counts(fine_tuning_steps=self.fine_tuning_steps)

    @property
    def personalization_steps(self) -> int:
        return self.fine_tuning_steps

    def personalize(self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return fine_tune(agent, message, self.alpha, key, m, self.fine_tuning_steps)


def fine_tune(agent: Objective, theta: Params, alpha: StepSize, key: PRNGKeyArray, m: int, steps: int) -> Params:
    """Take `steps` policy-gradient steps from m // steps trajectories each; at most m steps."""
    steps = max(1, min(steps, m))
    return adapt(agent, theta, alpha, key, m // steps, steps)


def ascend(agent: Objective, theta: Params, beta: Scalar, key: PRNGKeyArray, m: int, count: int) -> Params:
    """Take `count` policy-gradient steps from m fresh trajectories each, as a client of FedAvg-PG does in a round."""

    def step(theta: Params, keys: StepKeys) -> Params:
        return optax.tree.add_scale(theta, beta, agent.gradient(theta, keys.outer, m))

    return local_steps(step, theta, agent, key, count)
