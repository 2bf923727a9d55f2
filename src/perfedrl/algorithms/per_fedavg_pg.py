"""Per-FedAvg-PG, Algorithm 1 of the paper: local meta-policy-gradient steps, then averaging."""

from functools import partial
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms.base import Algorithm, ServerState, average, local_steps
from perfedrl.algorithms.checks import check_choice, check_counts, check_positive, check_step_sizes
from perfedrl.algorithms.fine_tuned import fine_tune
from perfedrl.errors import UserError
from perfedrl.estimators import CONTROLS, CurvatureControl, Objective, StepKeys
from perfedrl.estimators.batch_split import SMALLEST_BATCH, initial_moments, split_gradient
from perfedrl.estimators.curvature_control import Uncontrolled
from perfedrl.estimators.meta import adaptation, backpropagate_adaptation
from perfedrl.estimators.tree_math import clipped_to_length, dot, ratio
from perfedrl.types import Array, Params, StepSize

VARIANTS = ("exact", "first-order")
LEARNED = ("no", "scalar", "per-parameter")
AUTO = "auto"


class LearnedMessage(NamedTuple):
    """The message with a learned step size: the initialization, and the logarithm of the factor of alpha."""

    theta: Params
    log_step: Params


class PerFedAvgPG(Algorithm):
    """Learn an initialization for a policy-gradient step at deployment, in both variants of the paper, with extensions.

    `variant = "exact"` estimates the curvature from m_h trajectories (eq. 7); `"first-order"` drops it (Section 5) and
    spends none. Extensions of the paper are off by default:

    - `adaptation_steps`: nu steps from m_in trajectories each in training; at deployment they share the agent's
      trajectories.
    - `control` of the curvature term: "limit" its length to `limit` sqrt(m_h) times the outer gradient's; "shrink" it
      by its signal-to-noise ratio, then limit it; "auto" does both, and splits m_h + m_out between the batches
      adaptively.
    - `clip`: the longest local step is beta times this.
    - `learn_alpha`: learn a "scalar" or "per-parameter" factor of alpha (and of `deployment_alpha`), starting from 1,
      at the rate `alpha_rate`.
    - `deployment_alpha`: the step size at deployment, default alpha. Adaptation in training has few trajectories and so
      much noise; an agent with more of them can afford a longer step.
    - `deployment_steps`: the number of steps at deployment, default `adaptation_steps`.
    """

    alpha: Any
    beta: Any
    clip: Any
    alpha_rate: Any
    deployment_alpha: Any
    local_steps: int = eqx.field(static=True)
    m_in: int = eqx.field(static=True)
    m_h: int = eqx.field(static=True)
    m_out: int = eqx.field(static=True)
    variant: str = eqx.field(static=True)
    adaptation_steps: int = eqx.field(static=True)
    control: str = eqx.field(static=True)
    limit: float = eqx.field(static=True)
    learn_alpha: str = eqx.field(static=True)
    deployment_steps: int | None = eqx.field(static=True)

    def __init__(
        self,
        alpha: float,
        beta: float,
        local_steps: int = 5,
        m_in: int = 10,
        m_h: int = 10,
        m_out: int = 10,
        variant: Literal["exact", "first-order"] = "exact",
        adaptation_steps: int = 1,
        control: Literal["none", "limit", "shrink", "auto"] = "none",
        limit: float = 0.3,
        clip: float | None = None,
        learn_alpha: Literal["no", "scalar", "per-parameter"] = "no",
        alpha_rate: float = 0.02,
        deployment_alpha: float | None = None,
        deployment_steps: int | None = None,
    ):
        check_choice("variant", variant, VARIANTS)
        check_choice("control", control, (*CONTROLS, AUTO))
        check_choice("learn_alpha", learn_alpha, LEARNED)
        check_step_sizes(alpha, beta)
        check_positive(clip=clip, alpha_rate=alpha_rate, limit=limit, deployment_alpha=deployment_alpha)
        curvature = {"m_h": m_h} if variant == "exact" else {}
        check_counts(local_steps=local_steps, m_in=m_in, m_out=m_out, adaptation_steps=adaptation_steps, **curvature)
        check_counts(**({} if deployment_steps is None else {"deployment_steps": deployment_steps}))
        check_control(control, variant, adaptation_steps, m_h, m_out)
        if learn_alpha != "no" and isinstance(alpha, int | float) and alpha == 0:
            raise UserError("learn_alpha multiplies alpha, which is 0 and would stay so")
        self.alpha, self.beta, self.clip, self.alpha_rate = alpha, beta, clip, alpha_rate
        self.deployment_alpha = deployment_alpha
        self.local_steps, self.m_in, self.m_h, self.m_out = local_steps, m_in, m_h, m_out
        self.variant, self.adaptation_steps, self.control, self.limit = variant, adaptation_steps, control, limit
        self.learn_alpha, self.deployment_steps = learn_alpha, deployment_steps

    @property
    def trajectories_per_round(self) -> int:
        curvature = self.m_h if self.variant == "exact" else 0
        return self.local_steps * (self.adaptation_steps * (self.m_in + curvature) + self.m_out)

    @property
    def curvature_trajectories(self) -> int:
        return self.m_h

    @property
    def smallest_curvature_batch(self) -> int:
        if self.variant == "first-order" or self.control == AUTO:
            return SMALLEST_BATCH // 2
        return self.m_h // 2 if self.control == "shrink" else self.m_h

    def init(self, params: Params) -> tuple[ServerState, PyTree]:
        """The message is the initialization, with a learned step size if any; client states are noise estimates."""
        state = (
            () if self.variant == "first-order" else initial_moments() if self.control == AUTO else self._control.init()
        )
        if not self.learns_step_size:
            return ServerState(params), state
        log_step = jnp.zeros(()) if self.learn_alpha == "scalar" else jax.tree.map(jnp.zeros_like, params)
        return ServerState(LearnedMessage(params, log_step)), state

    def client(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        """Take tau local ascent steps along the estimated meta-gradient, lines 4-8."""
        return local_steps(partial(self.step, agent), (message, state), agent, key, self.local_steps)

    def step(self, agent: Objective, carry: tuple[PyTree, PyTree], keys: StepKeys) -> tuple[PyTree, PyTree]:
        """Take one local ascent step, line 6, and one step of the step size if it is learned."""
        message, state = carry
        theta, alpha = self.shared(message), self.adaptation_step_size(message)
        if self.variant == "exact" and self.control == AUTO:
            split = split_gradient(agent, theta, alpha, keys, self.m_in, self.m_h + self.m_out, state, self.limit)
            direction, path, g_out, state = split
            by_step = backpropagate_adaptation(agent, path, alpha, g_out, keys.curvature, 0, Uncontrolled(), ()).step
        else:
            path = adaptation(agent, theta, alpha, keys.inner, self.m_in, self.adaptation_steps)
            g_out = agent.gradient(path.end, keys.outer, self.m_out)
            m_h, control = (self.m_h, self._control) if self.variant == "exact" else (0, Uncontrolled())
            direction, by_step, state = backpropagate_adaptation(
                agent, path, alpha, g_out, keys.curvature, m_h, control, state
            )
        if self.clip is not None:
            direction = clipped_to_length(direction, self.clip)
        theta = optax.tree.add_scale(theta, self.beta, direction)
        if not self.learns_step_size:
            return theta, state
        moved = optax.tree.sub(path.end, self.shared(message))
        return LearnedMessage(theta, self._next_log_step(message.log_step, alpha, by_step, moved, g_out)), state

    def _next_log_step(
        self, log_step: Params, alpha: StepSize, by_step: Params, moved: Params, g_out: Params
    ) -> Params:
        """Ascend on the logarithm of the step size along the cosine between adaptation and outer gradient.

        Its derivative, alpha times `by_step`, is divided by the lengths of both, so that the rate has no unit. With one
        step size per parameter each derivative is multiplied by their number, so that their mean moves as a scalar
        would, and clipped, so that none moves by more than the rate.
        """
        unit = ratio(1.0, optax.tree.norm(moved) * optax.tree.norm(g_out))
        if self.learn_alpha == "scalar":
            return log_step + self.alpha_rate * unit * alpha * dot(by_step, jax.tree.map(jnp.ones_like, by_step))
        count = sum(x.size for x in jax.tree.leaves(by_step))
        change = jax.tree.map(lambda a, d: jnp.clip(count * unit * a * d, -1, 1), alpha, by_step)
        return optax.tree.add_scale(log_step, self.alpha_rate, change)

    @property
    def _control(self) -> CurvatureControl:
        return Uncontrolled() if self.control == "none" else CONTROLS[self.control](self.limit)

    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        """Average the agents' parameters into theta^{k+1}, line 10."""
        return ServerState(average(uploads, weights))

    def shared(self, message: PyTree) -> Params:
        return message if not self.learns_step_size else message.theta

    @property
    def learns_step_size(self) -> bool:
        return self.learn_alpha != "no"

    @property
    def personalization_steps(self) -> int:
        return self.adaptation_steps

    def adaptation_step_size(self, message: PyTree) -> StepSize:
        return self._multiplied(message, self.alpha)

    def deployment_step_size(self, message: PyTree) -> StepSize:
        return self._multiplied(message, self.alpha if self.deployment_alpha is None else self.deployment_alpha)

    def _multiplied(self, message: PyTree, alpha: Any) -> StepSize:
        if not self.learns_step_size:
            return alpha
        return jax.tree.map(lambda w: alpha * jnp.exp(w), message.log_step)

    def personalize(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        """Compute theta^K + alpha g_in, line 12; several steps share the m trajectories."""
        steps = self.deployment_steps or self.adaptation_steps
        return fine_tune(agent, self.shared(message), self.deployment_step_size(message), key, m, steps)


def check_control(control: str, variant: str, steps: int, m_h: int, m_out: int) -> None:
    """Check that there is a curvature term to control, with enough trajectories to estimate its noise."""
    if control != "none" and variant == "first-order":
        raise UserError(f"control = {control!r} is for the exact variant: the first-order one has no curvature term")
    if control == AUTO and (steps > 1 or m_h + m_out < 2 * SMALLEST_BATCH):
        raise UserError(
            f"control = 'auto' splits m_h + m_out >= {2 * SMALLEST_BATCH} trajectories, after one adaptation step"
        )
    if control == "shrink" and m_h < 2:
        raise UserError("control = 'shrink' compares two halves of the curvature batch: m_h must be at least 2")
