"""Context adaptation: a few parameters adapt, by a model's error or by the return; clipped steps learn the rest.

The adapted part is that of CAVIA (Zintgraf et al., 2019); the steps on a batch are those of `promp`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import optax
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms.base import static
from perfedrl.algorithms.checks import check_choice, check_counts, with_trajectories
from perfedrl.algorithms.clipped_steps import AdaptedLearner, ClippedSteps
from perfedrl.algorithms.learned_adaptation import Learned, adapt_compiled
from perfedrl.algorithms.local_optimizer import LearnerMessage
from perfedrl.envs.fleet import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, SampledBatch
from perfedrl.types import Array, Params, Scalar

TARGETS = {"reward-model": "reward", "dynamics-model": "dynamics", "return": None}
"""Losses of the adaptation, and what a model predicts for them; None where there is no model."""


@dataclass(frozen=True)
class ContextSteps(ClippedSteps):
    """Clipped steps around an adaptation of the context alone.

    The adaptation takes `adaptation_steps` steps along the gradient of `fit` on one batch. Beside the clipped surrogate
    the outer objective has the model's fit after the adaptation, on the same batch, weighted with `model_weight`.
    """

    inner_loss: str = "reward-model"
    adaptation_steps: int = 1
    model_weight: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("inner_loss", self.inner_loss, tuple(TARGETS))
        check_counts(adaptation_steps=self.adaptation_steps)
        if not 0 <= self.model_weight < float("inf"):
            raise UserError(f"model_weight must be a finite number >= 0; it is {self.model_weight}")

    def fit(self, theta: Params, batch: SampledBatch) -> Float[Array, ""]:
        """Return what the adaptation maximizes on a batch: minus the model's error, or the return's surrogate."""
        target = TARGETS[self.inner_loss]
        return batch.surrogate(theta) if target is None else batch.policy.model_fit(theta, batch.trajectories, target)

    def adapted(self, learned: Learned, alpha: Scalar, inner: SampledBatch | None) -> Params:
        """Return the parameters with an adapted context; all others are unchanged."""
        if inner is None:
            return learned.theta
        context, rest = eqx.partition(learned.theta, inner.policy.is_context(learned.theta))

        def fit(context: Params) -> Float[Array, ""]:
            return self.fit(eqx.combine(context, rest), inner)

        def step(context: Params, _: None) -> tuple[Params, None]:
            g = jax.grad(fit)(context)
            return optax.tree.add_scale(context, alpha, jax.lax.stop_gradient(g) if self.first_order else g), None

        context, _ = jax.lax.scan(step, context, length=self.adaptation_steps)
        return eqx.combine(context, rest)

    def objective(self, theta: Params, inner: SampledBatch | None, outer: SampledBatch) -> Float[Array, ""]:
        """Return the clipped surrogate of the outer batch plus the weighted fit of the model on the inner one.

        In the inner batch all agents follow the same policy, so that their rewards tell them apart. In the outer batch
        each does what is best for it, with about the same rewards: to predict these a model need not know the agent.
        """
        found = super().objective(theta, inner, outer)
        if inner is None or TARGETS[self.inner_loss] is None or not self.model_weight:
            return found
        return found + self.model_weight * self.fit(theta, inner)


class ContextAdaptation(AdaptedLearner):
    """Learn a policy and a model such that adapting a small context z personalizes the policy.

    In a local step an agent samples m_in trajectories, takes `adaptation_steps` steps of size alpha with z on them,
    samples m_out trajectories with the adapted z, and improves all parameters on both batches as in `ProMP`. The policy
    must have a context, as 'context-mlp' has.

    - `inner_loss`: z descends the mean squared error of the policy's model of rewards ("reward-model") or of changes of
      the observation ("dynamics-model"), or ascends the policy gradient ("return", CAVIA's).
    - `model_weight`: the weight of minus that error after the adaptation, on the first batch, in the objective of all
      parameters.
    - `variant`: "differentiated" differentiates through the adaptation; "first-order" takes its gradient as constant,
      so that the model is not trained to give useful gradients.

    The other settings are those of `ProMP`. Use it with `advantage = "gae"`.
    """

    inner_loss: Literal["reward-model", "dynamics-model", "return"] = static("reward-model", kw_only=True)
    model_weight: float = static(0.5, kw_only=True)
    adaptation_steps: int = static(1, kw_only=True)
    variant: Literal["first-order", "differentiated"] = static("differentiated", kw_only=True)

    @property
    def how(self) -> ContextSteps:
        return ContextSteps(
            **self.step_settings,
            inner_loss=self.inner_loss,
            adaptation_steps=self.adaptation_steps,
            model_weight=self.model_weight,
        )

    def first_factors(self, params: Params) -> Params:
        return ()

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require episodes, and a policy with a context and, where the adaptation uses it, a model."""
        if policy.is_context is None or (TARGETS[self.how.inner_loss] is not None and policy.model_fit is None):
            raise UserError(
                f"the algorithm 'context' adapts a policy's context, which {type(policy).__name__} does not have: "
                "set the policy to 'context-mlp', or take 'promp', which adapts all parameters"
            )
        super().check_supports(fleet, policy)

    def adaptation_step(self, agent: Objective, theta: Params, alpha: Any, key: PRNGKeyArray, m: int) -> Params:
        """Adapt the context on m trajectories, in `adaptation_steps` steps of size alpha."""
        if m == 0:
            return theta
        inner = with_trajectories(agent, type(self).__name__).batch(theta, key, m)
        return adapt_compiled(self.how, Learned(theta, ()), alpha, inner)

    def personalize(
        self, message: LearnerMessage, state: PyTree, agent: Objective, key: PRNGKeyArray, m: int
    ) -> Params:
        return self.adaptation_step(agent, self.shared(message), self.alpha, key, m)
