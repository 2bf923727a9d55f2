"""The automatic split of a trajectory budget between the outer gradient and its curvature term."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, Int, PRNGKeyArray

from perfedrl.estimators.curvature_control import LIMIT, RUNNING_MEAN_DECAY, curvature_term, limited_term
from perfedrl.estimators.meta import AdaptationPath, StepKeys, adaptation
from perfedrl.estimators.objective import Objective
from perfedrl.estimators.tree_math import dot, ratio
from perfedrl.types import Array, Params, StepSize

SHARES = (0.0, 0.25, 0.5, 0.75)
"""Candidate shares of the budget for the curvature batch; each batch gets at least SMALLEST_BATCH trajectories."""

SMALLEST_BATCH = 4
"""Smallest batch: each half has two trajectories, so noise estimates and leave-one-out baselines stay defined."""


class BatchSplitMoments(NamedTuple):
    """Running means of an agent's noise estimates, each unbiased up to the weight `seen`."""

    outer: Float[Array, ""]
    """Variance of one trajectory's outer gradient."""
    curvature: Float[Array, ""]
    """Variance of one trajectory's curvature term."""
    signal: Float[Array, ""]
    """Squared length of the mean curvature term."""
    seen: Float[Array, ""]
    """Total weight of the observations in the running means; 0 before the first."""


def initial_moments() -> BatchSplitMoments:
    """Moments before the first observation."""
    return BatchSplitMoments(*[jnp.zeros(())] * 4)


def candidate_sizes(budget: int) -> list[int]:
    """Candidate sizes of the curvature batch; the outer batch gets the remaining trajectories."""
    return sorted({min(max(SMALLEST_BATCH, round(share * budget)), budget - SMALLEST_BATCH) for share in SHARES})


def predicted_error(known: BatchSplitMoments, m_h: Array, m_out: Array) -> Array:
    """Predict the mean squared error of outer gradient plus optimally shrunk curvature term from the batch sizes."""
    noise = known.curvature / m_h
    signal = jnp.maximum(known.signal, 0)
    return known.outer / m_out + ratio(signal * noise, signal + noise)


def choose_candidate(known: BatchSplitMoments, budget: int) -> Int[Array, ""]:
    """Index of the candidate size with the smallest predicted error; the middle one before any observation."""
    sizes = jnp.asarray(candidate_sizes(budget))
    best = jnp.argmin(predicted_error(known, sizes, budget - sizes))
    return jnp.where(known.seen > 0, best, len(sizes) // 2)


class SplitGradient(NamedTuple):
    """A meta-gradient estimate with its adaptation path, its outer gradient, and the updated moments."""

    gradient: Params
    path: AdaptationPath
    outer: Params
    known: BatchSplitMoments


def split_gradient(
    agent: Objective,
    theta: Params,
    alpha: StepSize,
    keys: StepKeys,
    m_in: int,
    budget: int,
    known: BatchSplitMoments,
    limit: float = LIMIT,
) -> SplitGradient:
    """Estimate (I + alpha s H-hat) g_out with the split of the budget that minimizes the predicted error.

    s is the optimal shrinkage of the curvature term, whose length is limited in addition. Both batches are drawn in
    halves, and the difference between the halves estimates their noise.
    """
    path = adaptation(agent, theta, alpha, keys.inner, m_in)

    def with_batch(m_h: int) -> tuple[Params, Params, BatchSplitMoments]:
        m_out = budget - m_h
        g, noise_g, _ = estimate_from_halves(lambda key, m: agent.gradient(path.end, key, m), keys.outer, m_out)
        c, noise_c, signal = estimate_from_halves(
            lambda key, m: curvature_term(agent, theta, alpha, g, key, m), keys.curvature, m_h
        )
        now = BatchSplitMoments(noise_g, noise_c, signal, jnp.ones(()))
        now = jax.tree.map(lambda old, new: RUNNING_MEAN_DECAY * old + (1 - RUNNING_MEAN_DECAY) * new, known, now)
        left = jnp.maximum(now.signal, 0)
        share = ratio(left, left + now.curvature / m_h)
        return optax.tree.add(g, limited_term(optax.tree.scale(share, c), g, m_h, limit)), g, now

    sizes = candidate_sizes(budget)
    chosen = choose_candidate(known, budget)
    if agent.traceable:
        gradient, g, known = jax.lax.switch(chosen, [lambda m=m: with_batch(m) for m in sizes])
    else:
        gradient, g, known = with_batch(sizes[int(chosen)])
    return SplitGradient(gradient, path, g, known)


def estimate_from_halves(estimate, key: PRNGKeyArray, m: int) -> tuple[Params, Array, Array]:
    """Average two independent half-batch estimates.

    Returns the mean, and unbiased estimates of the variance of one trajectory and of the squared length of the mean.
    """
    sizes = m // 2, m - m // 2
    one, two = (estimate(k, n) for k, n in zip(jax.random.split(key), sizes, strict=True))
    mean = jax.tree.map(lambda x, y: (sizes[0] * x + sizes[1] * y) / m, one, two)
    apart = optax.tree.sub(one, two)
    return mean, dot(apart, apart) / (1 / sizes[0] + 1 / sizes[1]), dot(one, two)
