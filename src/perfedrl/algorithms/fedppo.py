"""FedPPO: proximal policy optimization (Schulman et al., 2017) of one shared policy, by federated averaging."""

from collections.abc import Mapping
from typing import Any, Literal

import equinox as eqx
from jaxtyping import PRNGKeyArray, PyTree

from perfedrl.algorithms.annealing import Annealing
from perfedrl.algorithms.checks import check_counts, check_step_sizes
from perfedrl.algorithms.clipped_steps import ClippedLearner, ClippedSteps, check_rounds_per_batch
from perfedrl.algorithms.fine_tuned import fine_tune
from perfedrl.algorithms.learned_adaptation import Learned
from perfedrl.algorithms.local_optimizer import LearnerMessage, LocalOptimizer
from perfedrl.estimators import Objective, PolicyObjective, SampledBatch, StepKeys
from perfedrl.types import Params


class FedPPO(ClippedLearner):
    """Train one shared policy: agents take clipped steps on batches of their own, the server averages.

    In a local step an agent samples m trajectories and takes up to `epochs` steps of its optimizer, at the rate beta,
    on their clipped surrogate. At deployment the agent's trajectories are split over `fine_tuning_steps` plain
    policy-gradient steps of size alpha. The other settings are those of `ProMP`.

    Use it with `advantage = "gae"`: steps are then in units that do not depend on those of rewards.
    """

    m: int = eqx.field(static=True)
    fine_tuning_steps: int = eqx.field(static=True)

    def __init__(
        self,
        alpha: float,
        beta: float,
        local_steps: int = 1,
        m: int = 40,
        epochs: int = 5,
        clip_ratio: float = 0.3,
        stop_divergence: float = 0.05,
        fine_tuning_steps: int = 1,
        optimizer: str = "adam",
        optimizer_settings: Mapping[str, Any] | None = None,
        optimizer_state: Literal["averaged", "personal", "reset"] = "averaged",
        anneal: int | None = None,
        schedule: Literal["linear", "cosine"] = "linear",
        rounds_per_batch: int = 1,
    ):
        check_step_sizes(alpha, beta)
        check_counts(m=m, fine_tuning_steps=fine_tuning_steps)
        check_rounds_per_batch(rounds_per_batch, local_steps)
        self.alpha, self.beta, self.local_steps, self.m = alpha, beta, local_steps, m
        self.how = ClippedSteps(
            LocalOptimizer.of(optimizer, optimizer_state, optimizer_settings), epochs, clip_ratio, stop_divergence
        )
        self.annealing, self.fine_tuning_steps = Annealing(anneal, schedule), fine_tuning_steps
        self.rounds_per_batch, self.batch_shapes = rounds_per_batch, None

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
