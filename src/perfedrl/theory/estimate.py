"""Actual bias and mean squared error of the meta-gradient estimate, to compare with their bounds.

On a small MDP they are finite sums over all inner batches. The curvature and outer batches enter linearly and
quadratically, so their expectations have a closed form (factorization in the proof of Lemma 3). On larger MDPs they are
estimated from sampled batches.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from perfedrl import exact
from perfedrl.compilation import jit
from perfedrl.envs import TabularMDP
from perfedrl.errors import UserError
from perfedrl.estimators import PAPER, Sampled, StepKeys, first_order_gradient, meta_gradient
from perfedrl.policies import TablePolicy
from perfedrl.theory.bounds import Variant
from perfedrl.theory.trajectory_enumeration import (
    PerTrajectory,
    PossibleTrajectories,
    batches,
    per_trajectory,
    possible_trajectories,
)
from perfedrl.types import Array, Params, Scalar

REPLICATES = 1024
"""Number of estimates drawn by `sampled`."""

MOST_NUMBERS = 20_000_000
"""Largest number of array elements allowed in `enumerated`."""


class EstimateMoments(NamedTuple):
    """Bias |E estimate - grad F_i| and second moment E |estimate - grad F_i|^2 at one point: Lemma 3, Prop. 1.

    `variance` is the variance of one trajectory's policy gradient. `enumerated` tells whether the values are finite
    sums over all batches or means over sampled ones.
    """

    bias: float
    second_moment: float
    variance: float
    enumerated: bool


class Batches(NamedTuple):
    """Sizes of the three batches of one local step."""

    m_in: int
    m_h: int
    m_out: int


def moments(
    mdp: TabularMDP, policy: TablePolicy, theta: Params, alpha: Scalar, sizes: Batches, variant: Variant = "exact"
) -> EstimateMoments:
    """Compute the moments of the estimate at theta by enumeration if possible, otherwise by sampling."""
    try:
        return enumerated(mdp, policy, theta, alpha, sizes, variant)
    except UserError:
        return sampled(mdp, policy, theta, alpha, sizes, variant)


def enumerated(
    mdp: TabularMDP, policy: TablePolicy, theta: Params, alpha: Scalar, sizes: Batches, variant: Variant = "exact"
) -> EstimateMoments:
    """Compute the moments as finite sums; raises `UserError` if there are too many trajectories or batches."""
    at = possible_trajectories_in_memory(mdp, theta)
    counts, coefficients = batches(len(at.states), sizes.m_in)
    target = np.ravel(exact.meta_gradient([mdp], theta, alpha, policy))
    mean, square, variance = _enumerated(
        policy, at, theta, alpha, counts, coefficients, target, *sizes, variant == "exact"
    )
    return EstimateMoments(float(np.linalg.norm(mean - target)), float(square), float(variance), enumerated=True)


@exact.float64
@partial(jit, static_argnums=(10,))
def _enumerated(policy, at, theta, alpha, counts, coefficients, target, m_in, m_h, m_out, curvature):
    here = per_trajectory(policy, at, theta)
    points, weights = inner_points(here, theta, alpha, counts, coefficients, m_in)
    d = len(target)
    mean_u = jnp.einsum("n,nde->de", here.q, here.u)
    jacobian = jnp.eye(d) + alpha * mean_u * curvature
    noise = jnp.einsum("n,nde,ndf->ef", here.q, here.u, here.u) - mean_u.T @ mean_u
    quadratic = jacobian.T @ jacobian + (alpha**2 / m_h * noise if curvature else 0.0)
    first, second = outer_moments(policy, at, theta, points, m_out, quadratic)
    mean = jacobian @ (weights @ first)
    square = weights @ second - 2 * target @ mean + target @ target
    gradient = here.q @ here.g
    return mean, square, here.q @ jnp.sum((here.g - gradient) ** 2, axis=1)


def inner_points(here: PerTrajectory, theta, alpha, counts, coefficients, m_in):
    """Adapted parameters theta~ of every inner batch, flattened, and the probabilities of the batches."""
    logq = jnp.where(counts > 0, counts * jnp.log(jnp.where(here.q > 0, here.q, 1)), 0.0)
    possible = jnp.all((counts == 0) | (here.q > 0), axis=1)
    weights = jnp.where(possible, jnp.exp(coefficients + jnp.sum(logq, axis=1)), 0.0)
    flat, _ = ravel_pytree(theta)
    return flat + alpha * (counts @ here.g) / m_in, weights


def possible_trajectories_in_memory(mdp: TabularMDP, theta: Params) -> PossibleTrajectories:
    """Enumerate the trajectories of an MDP; raises `UserError` if the arrays per trajectory would not fit in memory."""
    at, d = possible_trajectories(mdp), sum(np.size(x) for x in jax.tree.leaves(theta))
    if max(at.states.size, mdp.states * mdp.actions) * d**2 > MOST_NUMBERS:
        raise UserError(f"{len(at.states)} trajectories of a policy with {d} parameters are too many to list")
    return at


def together(at: PossibleTrajectories, d: int) -> int:
    """Number of inner batches that are processed at a time."""
    return max(1, min(4096, MOST_NUMBERS // (at.states.size * d)))


def outer_moments(policy, at: PossibleTrajectories, theta, points, m_out, quadratic):
    """Compute E g_out and E g_out^T Q g_out given the adapted parameters, at every adapted point."""
    _, unravel = ravel_pytree(theta)

    def one(point):
        there = per_trajectory(policy, at, unravel(point), curvature=False)
        mean = there.q @ there.g
        square = there.q @ jnp.sum((there.g @ quadratic) * there.g, axis=1)
        return mean, square / m_out + (1 - 1 / m_out) * mean @ quadratic @ mean

    return jax.lax.map(one, points, batch_size=together(at, points.shape[1]))


def sampled(
    mdp: TabularMDP,
    policy: TablePolicy,
    theta: Params,
    alpha: Scalar,
    sizes: Batches,
    variant: Variant = "exact",
    replicates: int = REPLICATES,
    seed: int = 0,
) -> EstimateMoments:
    """Estimate the moments from sampled batches.

    All are unbiased except the norm of the bias. The bias needs inner batches only, since the other factors are known.
    The part that is linear in the error of the inner gradient has mean zero and is subtracted (Prop. 1), so that the
    averaged remainder is of the same order as the bias itself.
    """
    bias, square, variance = _sampled(policy, mdp, theta, alpha, seed, sizes, variant, replicates)
    return EstimateMoments(float(bias), float(square), float(variance), enumerated=False)


@exact.float64
@partial(jit, static_argnums=(5, 6, 7))
def _sampled(policy, mdp, theta, alpha, seed, sizes, variant, replicates):
    agent = Sampled(policy, **PAPER)(mdp)
    flat, unravel = ravel_pytree(theta)

    def gradient(x):
        return ravel_pytree(jax.grad(partial(exact.J, policy, mdp))(unravel(x)))[0]

    def product(x, v):
        return jax.jvp(gradient, (x,), (v,))[1]

    plus = flat + alpha * gradient(flat)
    outer = gradient(plus)
    curvature = alpha * product(flat, outer)

    def inner(key):
        g = ravel_pytree(agent.gradient(theta, key, sizes.m_in))[0]
        off = alpha * (g - gradient(flat))
        remainder = gradient(plus + off) - outer - product(plus, off)
        return remainder, jnp.sum((g - gradient(flat)) ** 2) * sizes.m_in

    def estimate(keys):
        step = StepKeys(*keys)
        if variant == "exact":
            return ravel_pytree(meta_gradient(agent, theta, alpha, step, *sizes))[0]
        return ravel_pytree(first_order_gradient(agent, theta, alpha, step, sizes.m_in, sizes.m_out))[0]

    first, second = jax.random.split(jax.random.key(seed))
    remainder, variance = jax.lax.map(inner, jax.random.split(first, replicates), batch_size=64)
    error = jnp.mean(remainder, axis=0)
    bias = error + alpha * product(flat, error) if variant == "exact" else error - curvature
    estimates = jax.lax.map(estimate, jax.random.split(second, (replicates, 3)), batch_size=64)
    second_moment = jnp.mean(jnp.sum((estimates - outer - curvature) ** 2, axis=1))
    return jnp.linalg.norm(bias), second_moment, jnp.mean(variance)


def shared_mean(
    mdp: TabularMDP,
    policy: TablePolicy,
    theta: Params,
    alpha: Scalar,
    m: int,
    shared: Literal["nothing", "inner", "outer"],
) -> Float[np.ndarray, " d"]:
    """Compute the mean of the estimate if the curvature batch of size m is the inner or the outer batch.

    Sharing with the inner batch adds alpha Cov(H-hat, g_out) to the mean. Sharing with the outer batch adds it too, and
    in addition the trajectories then come from the adapted policy.
    """
    at = possible_trajectories_in_memory(mdp, theta)
    counts, coefficients = batches(len(at.states), m)
    return _shared(policy, at, theta, alpha, counts, coefficients, m, shared)


@exact.float64
@partial(jit, static_argnums=(7,))
def _shared(policy, at, theta, alpha, counts, coefficients, m, shared) -> Float[Array, " d"]:
    here = per_trajectory(policy, at, theta)
    points, weights = inner_points(here, theta, alpha, counts, coefficients, m)
    _, unravel = ravel_pytree(theta)

    def one(point_and_counts):
        point, count = point_and_counts
        there = per_trajectory(policy, at, unravel(point), curvature=False)
        g = there.q @ there.g
        if shared == "outer":
            mean_u = jnp.einsum("n,nde->de", there.q, here.u)
            product = jnp.einsum("n,nde,ne->d", there.q, here.u, there.g) / m + (1 - 1 / m) * mean_u @ g
        else:
            product = jnp.einsum("n,nde,e->d", count / m if shared == "inner" else here.q, here.u, g)
        return g + alpha * product

    return weights @ jax.lax.map(one, (points, counts), batch_size=together(at, points.shape[1]))
