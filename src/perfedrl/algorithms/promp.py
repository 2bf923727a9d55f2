"""ProMP (Rothfuss et al., 2019), federated: clipped steps on an initialization for one policy-gradient step."""

from collections.abc import Mapping
from typing import Any, Literal

import equinox as eqx
from jaxtyping import PRNGKeyArray, PyTree

from perfedrl.algorithms.annealing import Annealing
from perfedrl.algorithms.checks import check_choice, check_counts, check_learned_factor, check_step_sizes
from perfedrl.algorithms.clipped_steps import AdaptedLearner, ClippedSteps, check_rounds_per_batch
from perfedrl.algorithms.fine_tuned import fine_tune
from perfedrl.algorithms.learned_adaptation import LEARNED, VARIANTS, first_factors
from perfedrl.algorithms.local_optimizer import LearnerMessage, LocalOptimizer
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
    - `optimizer`, `optimizer_settings`, `optimizer_state`: an optimizer of optax; its state is "averaged" by the
      server, "personal" or "reset" in each round.
    - `anneal`: the number of rounds over which the rate falls to a twentieth of beta, on a "linear" or "cosine"
      `schedule`.

    Use it with `advantage = "gae"`: steps are then in units that do not depend on those of rewards.
    """

    learn_alpha: str = eqx.field(static=True)

    def __init__(
        self,
        alpha: float,
        beta: float,
        local_steps: int = 1,
        m_in: int = 20,
        m_out: int = 20,
        epochs: int = 5,
        clip_ratio: float = 0.3,
        divergence_weight: float = 5e-4,
        stop_divergence: float = 0.05,
        variant: Literal["first-order", "differentiated"] = "first-order",
        learn_alpha: Literal["no", "per-parameter"] = "no",
        optimizer: str = "adam",
        optimizer_settings: Mapping[str, Any] | None = None,
        optimizer_state: Literal["averaged", "personal", "reset"] = "averaged",
        anneal: int | None = None,
        schedule: Literal["linear", "cosine"] = "linear",
        rounds_per_batch: int = 1,
    ):
        check_choice("variant", variant, VARIANTS)
        check_choice("learn_alpha", learn_alpha, LEARNED)
        check_step_sizes(alpha, beta)
        check_counts(m_in=m_in, m_out=m_out)
        check_rounds_per_batch(rounds_per_batch, local_steps)
        check_learned_factor(alpha, learn_alpha)
        self.alpha, self.beta, self.local_steps, self.m_in, self.m_out = alpha, beta, local_steps, m_in, m_out
        self.how = ClippedSteps(
            LocalOptimizer.of(optimizer, optimizer_state, optimizer_settings),
            epochs,
            clip_ratio,
            stop_divergence,
            divergence_weight,
            variant == "first-order",
        )
        self.annealing, self.learn_alpha = Annealing(anneal, schedule), learn_alpha
        self.rounds_per_batch, self.batch_shapes = rounds_per_batch, None

    @property
    def learns_step_size(self) -> bool:
        return self.learn_alpha != "no"

    def first_factors(self, params: Params) -> Params:
        return first_factors(params, self.learn_alpha)

    def personalize(
        self, message: LearnerMessage, state: PyTree, agent: Objective, key: PRNGKeyArray, m: int
    ) -> Params:
        return fine_tune(agent, self.shared(message), self.deployment_step_size(message), key, m, 1)
