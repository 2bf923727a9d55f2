"""An adaptation step with learned factors of its size, and the pair of batches before and after it.

What algorithms share that improve an initialization on sampled batches: ProMP by clipped steps, TRPO in a trust region.
Settings of such steps are an `Adaptation`; `context` has one of its own, which adapts a few parameters alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from perfedrl.compilation import jit
from perfedrl.estimators import PolicyObjective, SampledBatch, StepKeys
from perfedrl.types import Params, Scalar

VARIANTS = ("first-order", "differentiated")
LEARNED = ("no", "per-parameter")


class Learned(NamedTuple):
    """What is learned: the parameters, and a factor of alpha for each of them; () where none is learned."""

    theta: Params
    factors: Params


def first_factors(params: Params, learn_alpha: str) -> Params:
    """Return the initial factors of alpha, all 1; () where they are not learned."""
    return () if learn_alpha == "no" else jax.tree.map(jnp.ones_like, params)


def adapted(learned: Learned, alpha: Scalar, inner: SampledBatch | None, first_order: bool) -> Params:
    """Take the adaptation step on a batch, theta + alpha factors g; without a batch there is none."""
    if inner is None:
        return learned.theta
    g = inner.gradient(learned.theta)
    if first_order:
        g = jax.lax.stop_gradient(g)
    step = optax.tree.scale(alpha, g)
    if jax.tree.leaves(learned.factors):
        step = jax.tree.map(jnp.multiply, learned.factors, step)
    return optax.tree.add(learned.theta, step)


class Adaptation:
    """The base of settings that say how parameters adapt to a batch: by one policy-gradient step on all of them.

    A subclass has the field `first_order`, and may adapt in another way. Hashable, since programs depend on it.
    """

    first_order: bool

    def adapted(self, learned: Learned, alpha: Scalar, inner: SampledBatch | None) -> Params:
        """Return the parameters after the adaptation on a batch; without a batch there is none."""
        return adapted(learned, alpha, inner, self.first_order)


def adapt_with(how: Adaptation, learned: Learned, alpha: Scalar, inner: SampledBatch) -> Params:
    """Return the parameters after an adaptation on a batch."""
    return how.adapted(learned, alpha, inner)


# Jitted so that batches of a Python sampler are processed by compiled code too; a caller's jit inlines it.
adapt_compiled = jit(adapt_with, static_argnums=0)


def step_sizes(learned: Learned, alpha: Scalar) -> Any:
    """Return alpha, or alpha times its learned factors."""
    learns = jax.tree.leaves(learned.factors)
    return jax.tree.map(lambda factor: alpha * factor, learned.factors) if learns else alpha


def pair_of_batches(
    agent: PolicyObjective, how: Adaptation, learned: Learned, alpha: Scalar, keys: StepKeys, m_in: int, m_out: int
) -> tuple[SampledBatch, SampledBatch]:
    """Sample a batch with theta, adapt on it, and sample another with the adapted parameters."""
    inner = agent.batch(learned.theta, keys.inner, m_in)
    return inner, agent.batch(adapt_compiled(how, learned, alpha, inner), keys.outer, m_out)
