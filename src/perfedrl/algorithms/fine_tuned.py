"""Fine-tuning: FedAvg-PG in training, and several local steps instead of one at deployment."""

from jaxtyping import PRNGKeyArray

from perfedrl.algorithms.base import static
from perfedrl.algorithms.checks import check_counts
from perfedrl.algorithms.local_ascent import LocalAscent
from perfedrl.estimators import Objective, adapt
from perfedrl.types import Params, StepSize


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
