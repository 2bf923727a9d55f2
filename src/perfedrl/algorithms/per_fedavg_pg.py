"""Per-FedAvg-PG, Algorithm 1 of the paper: local meta-policy-gradient steps, then averaging."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms.annealing import Annealing
from perfedrl.algorithms.base import Algorithm, ServerState, average, local_steps, static
from perfedrl.algorithms.checks import (
    check_choice,
    check_counts,
    check_learned_factor,
    check_positive,
    check_step_sizes,
)
from perfedrl.algorithms.fine_tuned import fine_tune
from perfedrl.algorithms.local_optimizer import PLAIN, LearnerMessage, LocalOptimizer, frozen_settings
from perfedrl.compilation import jit
from perfedrl.errors import UserError
from perfedrl.estimators import CONTROLS, CurvatureControl, Objective, StepKeys
from perfedrl.estimators.batch_split import SMALLEST_BATCH, initial_moments, split_gradient
from perfedrl.estimators.curvature_control import Uncontrolled
from perfedrl.estimators.meta import adaptation, backpropagate_adaptation
from perfedrl.estimators.tree_math import clipped_to_length, dot, ratio
from perfedrl.types import Array, Params, Scalar, StepSize

VARIANTS = ("exact", "first-order")
LEARNED = ("no", "scalar", "per-parameter")
AUTO = "auto"


class LearnedMessage(NamedTuple):
    """The message with a learned step size: the initialization, and the logarithm of the factor of alpha."""

    theta: Params
    log_step: Params


class OptimizedState(NamedTuple):
    """A client's state with an optimizer: its estimates of noise, and its own moments, where these are personal."""

    noise: PyTree
    moments: PyTree


class MetaGradient(NamedTuple):
    """The direction of a local step, the next logarithm of the step size (() if not learned), estimates of noise."""

    direction: Params
    log_step: Params
    noise: PyTree


class PerFedAvgPG(Algorithm):
    """Learn an initialization for a policy-gradient step at deployment, in both variants of the paper, with extensions.

    `variant = "exact"` estimates the curvature from m_h trajectories (eq. 7); `"first-order"` drops it (Section 5) and
    spends none. Extensions of the paper are off by default:

    - `adaptation_steps`: nu steps from m_in trajectories each in training; at deployment they share the agent's
      trajectories.
    - `control` of the curvature term: "limit" its length to `limit` sqrt(m_h) times the outer gradient's; "shrink" it
      by its signal-to-noise ratio, then limit it; "auto" does both, and splits m_h + m_out between the batches
      adaptively.
    - `clip`: the longest meta-gradient; without an optimizer the longest local step is beta times this.
    - `learn_alpha`: learn a "scalar" or "per-parameter" factor of alpha (and of `deployment_alpha`), starting from 1,
      at the rate `alpha_rate`.
    - `deployment_alpha`: the step size at deployment, default alpha. Adaptation in training has few trajectories and so
      much noise; an agent with more of them can afford a longer step.
    - `deployment_steps`: the number of steps at deployment, default `adaptation_steps`.
    - `optimizer`, `optimizer_settings`, `optimizer_state`: an optimizer of optax takes the local steps, at the rate
      beta; its state is "averaged" by the server, "personal" or "reset" in each round.
    - `anneal`: the number of rounds over which beta falls to a twentieth, on a "linear" or "cosine" `schedule`.
    """

    alpha: float
    beta: float
    local_steps: int = static(5)
    m_in: int = static(10)
    m_h: int = static(10)
    m_out: int = static(10)
    variant: Literal["exact", "first-order"] = static("exact")
    adaptation_steps: int = static(1)
    control: Literal["none", "limit", "shrink", "auto"] = static("none")
    limit: float = static(0.3)
    clip: float | None = None
    learn_alpha: Literal["no", "scalar", "per-parameter"] = static("no")
    alpha_rate: float = 0.02
    deployment_alpha: float | None = None
    deployment_steps: int | None = static(None)
    optimizer: str | None = static(None)
    optimizer_settings: tuple[tuple[str, Any], ...] = static(None, converter=frozen_settings)
    optimizer_state: Literal["averaged", "personal", "reset"] = static("averaged")
    anneal: int | None = static(None)
    schedule: Literal["linear", "cosine"] = static("linear")

    def __check_init__(self) -> None:
        check_choice("variant", self.variant, VARIANTS)
        check_choice("control", self.control, (*CONTROLS, AUTO))
        check_choice("learn_alpha", self.learn_alpha, LEARNED)
        check_step_sizes(self.alpha, self.beta)
        check_positive(
            clip=self.clip, alpha_rate=self.alpha_rate, limit=self.limit, deployment_alpha=self.deployment_alpha
        )
        check_counts(
            local_steps=self.local_steps, m_in=self.m_in, m_out=self.m_out, adaptation_steps=self.adaptation_steps
        )
        check_counts(**({"m_h": self.m_h} if self.variant == "exact" else {}))
        check_counts(**({} if self.deployment_steps is None else {"deployment_steps": self.deployment_steps}))
        check_control(self.control, self.variant, self.adaptation_steps, self.m_h, self.m_out)
        check_learned_factor(self.alpha, self.learn_alpha)
        self.annealing, self.local_optimizer  # noqa: B018 - making them checks their settings

    @property
    def annealing(self) -> Annealing:
        """The rate over rounds."""
        return Annealing(self.anneal, self.schedule)

    @property
    def local_optimizer(self) -> LocalOptimizer | None:
        """The optimizer of local steps; None for plain ascent at a constant rate, which needs none."""
        if self.optimizer is not None:
            return LocalOptimizer(self.optimizer, self.optimizer_state, self.optimizer_settings)
        if self.optimizer_settings or self.optimizer_state != "averaged":
            raise UserError("optimizer_settings and optimizer_state need an optimizer, such as optimizer = 'adam'")
        return None if self.anneal is None else LocalOptimizer(PLAIN)

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
        """The message is the initialization, with a learned step size if any; client states are noise estimates.

        An optimizer adds its state to the one or the other, and annealing the number of the round to the message.
        """
        noise = (
            () if self.variant == "first-order" else initial_moments() if self.control == AUTO else self._control.init()
        )
        learned = params
        if self.learns_step_size:
            log_step = jnp.zeros(()) if self.learn_alpha == "scalar" else jax.tree.map(jnp.zeros_like, params)
            learned = LearnedMessage(params, log_step)
        optimizer = self.local_optimizer
        if optimizer is None:
            return ServerState(learned), noise
        averaged, personal = optimizer.placed(optimizer.init(params))
        return ServerState(self._message(learned, averaged, self.annealing.first_round)), OptimizedState(
            noise, personal
        )

    @property
    def scales_coordinates(self) -> bool:
        return self.optimizer not in (None, PLAIN)

    @property
    def uploads_auxiliaries(self) -> bool:
        optimizer = self.local_optimizer
        return optimizer is not None and (optimizer.is_averaged or self.anneal is not None)

    def client(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        """Take tau local ascent steps along the estimated meta-gradient, lines 4-8."""
        optimizer = self.local_optimizer
        if optimizer is None:
            return local_steps(partial(self.step, agent), (message, state), agent, key, self.local_steps)
        learned, averaged, number = self._parts(message)
        moments = optimizer.start(self.shared(message), averaged, state.moments)
        step = partial(self.optimized_step, agent, optimizer, self.annealing.rate(self.beta, number))
        learned, noise, moments = local_steps(step, (learned, state.noise, moments), agent, key, self.local_steps)
        averaged, personal = optimizer.placed(moments)
        return self._message(learned, averaged, self.annealing.next_round(number)), OptimizedState(noise, personal)

    def step(self, agent: Objective, carry: tuple[PyTree, PyTree], keys: StepKeys) -> tuple[PyTree, PyTree]:
        """Take one local ascent step, line 6, and one step of the step size if it is learned."""
        learned, noise = carry
        found = self.meta_gradient(agent, learned, noise, keys)
        theta = optax.tree.add_scale(self._theta(learned), self.beta, found.direction)
        return self._learned(theta, found.log_step), found.noise

    def optimized_step(
        self, agent: Objective, optimizer: LocalOptimizer, rate: Scalar, carry: tuple, keys: StepKeys
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Take one local step of the optimizer, and one step of the step size if it is learned."""
        learned, noise, moments = carry
        found = self.meta_gradient(agent, learned, noise, keys)
        theta, moments = _optimized(optimizer, self._theta(learned), found.direction, moments, rate)
        return self._learned(theta, found.log_step), found.noise, moments

    def meta_gradient(self, agent: Objective, learned: PyTree, state: PyTree, keys: StepKeys) -> MetaGradient:
        """Estimate the meta-gradient, eq. (7), and take one step of the step size if it is learned."""
        theta, alpha = self._theta(learned), self._multiplied(learned, self.alpha)
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
        if not self.learns_step_size:
            return MetaGradient(direction, (), state)
        moved = optax.tree.sub(path.end, theta)
        return MetaGradient(direction, self._next_log_step(learned.log_step, alpha, by_step, moved, g_out), state)

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

    def without_training_state(self, message: PyTree) -> PyTree:
        """Return the message without the optimizer's state."""
        return message._replace(moments=None) if self.uploads_auxiliaries else message

    def shared(self, message: PyTree) -> Params:
        return self._theta(self._parts(message).learned)

    def _message(self, learned: PyTree, averaged: PyTree, number: PyTree) -> PyTree:
        """Return the message: what is learned, alone if there is nothing else to send."""
        return LearnerMessage(learned, averaged, number) if self.uploads_auxiliaries else learned

    def _parts(self, message: PyTree) -> LearnerMessage:
        """Return the parts of a message."""
        return message if self.uploads_auxiliaries else LearnerMessage(message, (), ())

    def _theta(self, learned: PyTree) -> Params:
        return learned.theta if self.learns_step_size else learned

    def _learned(self, theta: Params, log_step: Params) -> PyTree:
        return LearnedMessage(theta, log_step) if self.learns_step_size else theta

    @property
    def learns_step_size(self) -> bool:
        return self.learn_alpha != "no"

    @property
    def personalization_steps(self) -> int:
        return self.adaptation_steps

    def adaptation_step_size(self, message: PyTree) -> StepSize:
        return self._multiplied(self._parts(message).learned, self.alpha)

    def deployment_step_size(self, message: PyTree) -> StepSize:
        alpha = self.alpha if self.deployment_alpha is None else self.deployment_alpha
        return self._multiplied(self._parts(message).learned, alpha)

    def _multiplied(self, learned: PyTree, alpha: Any) -> StepSize:
        if not self.learns_step_size:
            return alpha
        return jax.tree.map(lambda w: alpha * jnp.exp(w), learned.log_step)

    def personalize(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        """Compute theta^K + alpha g_in, line 12; several steps share the m trajectories."""
        steps = self.deployment_steps or self.adaptation_steps
        return fine_tune(agent, self.shared(message), self.deployment_step_size(message), key, m, steps)


def optimized(
    optimizer: LocalOptimizer, theta: Params, direction: Params, moments: PyTree, rate: Scalar
) -> tuple[Params, PyTree]:
    """Take one step of ascent of an optimizer."""
    change, moments = optimizer.step(theta, direction, moments, rate)
    return optax.tree.add(theta, change), moments


# Jitted so that steps of a Python loop are compiled too; a caller's jit inlines it.
_optimized = jit(optimized, static_argnums=0)


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
