"""ProMP (Rothfuss et al., 2019), federated: clipped steps on an initialization for one policy-gradient step."""

from typing import Literal

from jaxtyping import PRNGKeyArray, PyTree

from perfedrl.algorithms.base import static
from perfedrl.algorithms.checks import check_choice, check_learned_factor
from perfedrl.algorithms.clipped_steps import AdaptedLearner
from perfedrl.algorithms.fine_tuned import fine_tune
from perfedrl.algorithms.learned_adaptation import LEARNED, first_factors
from perfedrl.algorithms.local_optimizer import LearnerMessage
from perfedrl.estimators import Objective
from perfedrl.types import Params


class ProMP(AdaptedLearner):
    """Learn an initialization for one policy-gradient step, with several clipped steps on every pair of batches.

    In a local step an agent samples m_in trajectories, adapts, samples m_out trajectories with the adapted policy, and
    takes up to `epochs` steps of its optimizer, at the rate beta, on the clipped surrogate of the second batch minus
    `divergence_weight` times the divergence of the initialization on the first. It stops early once the adapted policy
    diverges by more than `stop_divergence`.

    - `variant`: "first-order" takes the gradient of the adaptation as constant, "differentiated" does not; its
      curvature is ProMP's low-variance one.
    - `learn_alpha`: "per-parameter" learns a factor of alpha for each parameter, from 1, with the same optimizer.

    `ClippedLearner` has the settings of the optimizer, of its rate and of batches that are kept.

    Use it with `advantage = "gae"`: steps are then in units that do not depend on those of rewards.
    """

    learn_alpha: Literal["no", "per-parameter"] = static("no", kw_only=True)

    def __check_init__(self) -> None:
        check_choice("learn_alpha", self.learn_alpha, LEARNED)
        check_learned_factor(self.alpha, self.learn_alpha)

    @property
    def learns_step_size(self) -> bool:
        return self.learn_alpha != "no"

    def first_factors(self, params: Params) -> Params:
        return first_factors(params, self.learn_alpha)

    def personalize(
        self, message: LearnerMessage, state: PyTree, agent: Objective, key: PRNGKeyArray, m: int
    ) -> Params:
        return fine_tune(agent, self.shared(message), self.deployment_step_size(message), key, m, 1)
