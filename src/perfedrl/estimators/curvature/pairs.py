"""Curvature forms that weight products of the scores of two decisions.

With y_h = grad log pi_h . v (one JVP) each product is one reverse pass over that JVP: the gradient of
sum_h A_h (log pi_h sg(p_h) + y_h), where p_h is the sum of y over the decisions that h is paired with and sg stops the
gradient. No array of size d x d or m x d is formed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from perfedrl.estimators.gradient import Credit, log_probs
from perfedrl.types import Array, Params, Trajectory

Pairing = Callable[[Float[Array, "m T"]], Float[Array, "m T"]]


def score(policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params) -> Params:
    """Compute the mean of u v, eq. (3), with u = grad nu (grad log q)^T + grad^2 nu, the paper's form.

    Decision h is paired with every decision of its trajectory, including those it cannot influence.
    """
    return pairwise(policy, params, batch, credit, v, lambda y: jnp.sum(y, axis=-1, keepdims=True))


def causal(policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params) -> Params:
    """Compute the product in which every pair of decisions is weighted by the advantage of the later one."""

    def up_to_now(y: Float[Array, "m T"]) -> Float[Array, "m T"]:
        return jnp.cumsum(y, axis=-1)

    def later(y: Float[Array, "m T"]) -> Float[Array, "m T"]:
        Ay = credit.advantage * y
        return jnp.flip(jnp.cumsum(jnp.flip(Ay, axis=-1), axis=-1), axis=-1) - Ay

    return pairwise(policy, params, batch, credit, v, up_to_now, later)


def lvc(policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params) -> Params:
    """Compute ProMP's low-variance form: every decision is paired with itself only."""
    return pairwise(policy, params, batch, credit, v, lambda y: y)


def pairwise(
    policy: Any,
    params: Params,
    batch: Trajectory,
    credit: Credit,
    v: Params,
    pairing: Pairing,
    weighted: Pairing | None = None,
) -> Params:
    """Compute the product in which decisions are paired with `pairing(y)`, weighted by their own advantage.

    `weighted(y)`, if given, is added to the pairing and already contains its weights.
    """
    A = credit.advantage

    def surrogate(theta: Params) -> Float[Array, ""]:
        logp, y = jax.jvp(lambda t: log_probs(policy.log_prob, t, batch), (theta,), (v,))
        fixed = jax.lax.stop_gradient(y)
        summands = A * (logp * pairing(fixed) + y)
        if weighted is not None:
            summands = summands + logp * weighted(fixed)
        return jnp.sum(summands) / len(A)

    return jax.grad(surrogate)(params)


def score_matrix(policy: Any, params: Params, batch: Trajectory, credit: Credit) -> Float[Array, "d d"]:
    """Compute H-hat, the mean of the matrices u of eq. (3), in full, for tests and small problems."""
    flat, unravel = ravel_pytree(params)

    def logp(theta: Any) -> Float[Array, "m T"]:
        return log_probs(policy.log_prob, unravel(theta), batch)

    scores, hessians = jax.jacobian(logp)(flat), jax.hessian(logp)(flat)
    A = credit.advantage
    g, z = jnp.einsum("mh,mhd->md", A, scores), jnp.sum(scores, axis=1)
    u = jnp.einsum("md,me->mde", g, z) + jnp.einsum("mh,mhde->mde", A, hessians)
    return jnp.mean(u, axis=0)
