"""FedPPO: proximal policy optimization (Schulman et al., 2017) of one shared policy, by federated averaging."""

from jaxtyping import PRNGKeyArray, PyTree

from perfedrl.algorithms.base import static
from perfedrl.algorithms.checks import check_counts
from perfedrl.algorithms.clipped_steps import ClippedLearner
from perfedrl.algorithms.fine_tuned import fine_tune
from perfedrl.algorithms.learned_adaptation import Learned
from perfedrl.algorithms.local_optimizer import LearnerMessage
from perfedrl.estimators import Objective, PolicyObjective, SampledBatch, StepKeys
from perfedrl.types import Params


class FedPPO(ClippedLearner):
    """Train one shared policy: agents take clipped steps on batches of their own, the server averages.

    In a local step an agent samples m trajectories and takes up to `epochs` steps of its optimizer, at the rate beta,
    on their clipped surrogate. At deployment the agent's trajectories are split over `fine_tuning_steps` plain
    policy-gradient steps of size alpha. The other settings are those of `ClippedLearner`.

    Use it with `advantage = "gae"`: steps are then in units that do not depend on those of rewards.
    """

    m: int = static(40)
    fine_tuning_steps: int = static(1, kw_only=True)

    def __check_init__(self) -> None:
        check_counts(m=self.m, fine_tuning_steps=self.fine_tuning_steps)

    @property
    def trajectories_per_step(self) -> int:
        return self.m

    @property
    def personalization_steps(self) -> int:
        return self.fine_tuning_steps

    def first_factors(self, params: Params) -> Params:
        return ()

    def batches(self, agent: PolicyObjective, learned: Learned, keys: StepKeys) -> tuple[None, SampledBatch]:
        return None, agent.batch(learned.theta, keys.outer, self.m)

    def personalize(
        self, message: LearnerMessage, state: PyTree, agent: Objective, key: PRNGKeyArray, m: int
    ) -> Params:
        return fine_tune(agent, self.shared(message), self.alpha, key, m, self.fine_tuning_steps)
