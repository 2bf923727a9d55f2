"""An adaptation step with learned factors of its size, and the pair of batches before and after it.

What algorithms share that improve an initialization on sampled batches: ProMP by clipped steps, TRPO in a trust region.
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


def step_sizes(learned: Learned, alpha: Scalar) -> Any:
    """Return alpha, or alpha times its learned factors."""
    learns = jax.tree.leaves(learned.factors)
    return jax.tree.map(lambda factor: alpha * factor, learned.factors) if learns else alpha


def pair_of_batches(
    agent: PolicyObjective, learned: Learned, alpha: Scalar, keys: StepKeys, m_in: int, m_out: int, first_order: bool
) -> tuple[SampledBatch, SampledBatch]:
    """Sample a batch with theta, adapt on it, and sample another with the adapted parameters."""
    inner = agent.batch(learned.theta, keys.inner, m_in)
    return inner, agent.batch(_adapted(learned, alpha, inner, first_order), keys.outer, m_out)


# Jitted so that batches of a Python sampler are processed by compiled code too; a caller's jit inlines it.
_adapted = jit(adapted, static_argnums=3)
