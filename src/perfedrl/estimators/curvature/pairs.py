"""Forms by the weights of pairs of decisions: what the score of one is multiplied with the score of another for.

With y_h = grad log pi_h . v (one JVP) each product is one reverse pass over that JVP: the gradient of
sum_h A_h (log pi_h sg(p_h) + y_h), where p_h collects what decision h is paired with and sg stops the gradient.
Nothing of size d x d or m x d is ever formed.
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
    """The mean of u v, eq. (3): u = grad nu (grad log q)^T + grad^2 nu, the paper's form.

    Decision h is paired with every decision of its trajectory, also with those it cannot have influenced.
    """
    return pairwise(policy, params, batch, credit, v, lambda y: jnp.sum(y, axis=-1, keepdims=True))


def causal(policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params) -> Params:
    """Every pair of decisions weighted by what followed the later of the two: its advantage."""
    up_to_now = lambda y: jnp.cumsum(y, axis=-1)  # noqa: E731

    def later(y: Float[Array, "m T"]) -> Float[Array, "m T"]:
        Ay = credit.advantage * y
        return jnp.flip(jnp.cumsum(jnp.flip(Ay, axis=-1), axis=-1), axis=-1) - Ay

    return pairwise(policy, params, batch, credit, v, up_to_now, later)


def lvc(policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params) -> Params:
    """The low-variance form of ProMP: every decision paired with itself alone."""
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
    """The product whose decisions are paired with `pairing(y)`, weighted by their own advantage, and with
    `weighted(y)`, which has its weights already.
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
    """H-hat, the mean of the matrices u of eq. (3), formed in full: an oracle for tests and small problems."""
    flat, unravel = ravel_pytree(params)

    logp = lambda theta: log_probs(policy.log_prob, unravel(theta), batch)  # noqa: E731
    scores, hessians = jax.jacobian(logp)(flat), jax.hessian(logp)(flat)
    A = credit.advantage
    g, z = jnp.einsum("mh,mhd->md", A, scores), jnp.sum(scores, axis=1)
    u = jnp.einsum("md,me->mde", g, z) + jnp.einsum("mh,mhde->mde", A, hessians)
    return jnp.mean(u, axis=0)
