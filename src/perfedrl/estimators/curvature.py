"""Hessian-vector products of J from a batch of trajectories, matrix-free. One function per form."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from perfedrl.estimators.gradient import LogProb, log_probs
from perfedrl.registry import registry
from perfedrl.types import Array, Params, Trajectory


def score(log_prob: LogProb, params: Params, batch: Trajectory, weights: Float[Array, "m T"], v: Params) -> Params:
    """Estimate grad^2 J v by the mean of u v, eq. (3): u = grad nu (grad log q)^T + grad^2 nu. Unbiased.

    With y_h = grad log pi_h . v (one JVP), u v is the gradient of sum_h R^h (log pi_h sg(sum_k y_k) + y_h), where sg
    stops the gradient: one reverse pass over that JVP, and nothing of size d x d or m x d is ever formed.
    """

    def surrogate(theta: Params) -> Float[Array, ""]:
        logp, y = jax.jvp(lambda t: log_probs(log_prob, t, batch), (theta,), (v,))
        trajectory_score = jax.lax.stop_gradient(jnp.sum(y, axis=-1, keepdims=True))
        return jnp.sum(weights * (logp * trajectory_score + y)) / len(weights)

    return jax.grad(surrogate)(params)


def score_matrix(
    log_prob: LogProb, params: Params, batch: Trajectory, weights: Float[Array, "m T"]
) -> Float[Array, "d d"]:
    """H-hat, the mean of the matrices u of eq. (3), formed in full: an oracle for tests and small problems."""
    flat, unravel = ravel_pytree(params)

    logp = lambda theta: log_probs(log_prob, unravel(theta), batch)  # noqa: E731
    scores, hessians = jax.jacobian(logp)(flat), jax.hessian(logp)(flat)
    g, z = jnp.einsum("mh,mhd->md", weights, scores), jnp.sum(scores, axis=1)
    u = jnp.einsum("md,me->mde", g, z) + jnp.einsum("mh,mhde->mde", weights, hessians)
    return jnp.mean(u, axis=0)


CURVATURES = registry("curvature estimator", score=score)
