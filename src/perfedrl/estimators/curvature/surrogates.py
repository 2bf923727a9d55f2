"""Published surrogate objectives whose second derivative at the current parameters is the curvature estimate.

box(x) = exp(x - sg(x)) has the value 1 and the derivatives of a likelihood ratio. L_h is the log-likelihood of the
decisions up to h. If advantages are reward-to-go minus a baseline, Loaded DiCE, Taming MAML and second-order TayPO all
equal the causal form on every trajectory; DiCE equals it without a baseline.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.estimators.gradient import Credit, log_probs
from perfedrl.types import Array, Params, Trajectory


def dice(policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params) -> Params:
    """DiCE: every reward times box(L_t) of the decisions up to it; the baseline applies to single decisions only."""
    rewards = credit.returns - jnp.pad(credit.returns[:, 1:], ((0, 0), (0, 1)))
    b = baseline(credit)

    def objective(logp: Float[Array, "m T"]) -> Array:
        return rewards * box(jnp.cumsum(logp, axis=-1)) + b * (1 - box(logp))

    return of_log_probs(objective, policy, params, batch, v)


def loaded_dice(policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params) -> Params:
    """Loaded DiCE: every advantage A_h times box(L_h) - box(L_{h-1}), for advantages of any kind."""

    def objective(logp: Float[Array, "m T"]) -> Array:
        so_far = jnp.cumsum(logp, axis=-1)
        return credit.advantage * (box(so_far) - box(so_far - logp))

    return of_log_probs(objective, policy, params, batch, v)


def taming(policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params) -> Params:
    """Taming MAML: DiCE with a control variate that applies the baseline to pairs of decisions too."""
    rewards = credit.returns - jnp.pad(credit.returns[:, 1:], ((0, 0), (0, 1)))
    b = baseline(credit)

    def objective(logp: Float[Array, "m T"]) -> Array:
        so_far = jnp.cumsum(logp, axis=-1)
        single, pair = 1 - box(logp), (1 - box(so_far - logp)) * (1 - box(logp))
        return rewards * box(so_far) + b * (single - pair)

    return of_log_probs(objective, policy, params, batch, v)


def taypo(policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params, decay: float = 1.0) -> Params:
    """Second-order TayPO: (rho_h - 1) A_h, and (rho_k - 1)(rho_h - 1) A_h for every earlier decision k.

    `decay` < 1 weights a pair by decay^(h - k), which trades variance for bias; 0 gives the low-variance form.
    """
    T = batch.reward.shape[-1]
    apart = jnp.arange(T)[:, None] - jnp.arange(T)
    kernel = jnp.where(apart > 0, decay ** jnp.maximum(apart, 0), 0.0).astype(batch.reward.dtype)

    def objective(logp: Float[Array, "m T"]) -> Array:
        ratio = box(logp) - 1
        earlier = jnp.sum(kernel * ratio[:, None, :], axis=-1)
        return credit.advantage * ratio * (1 + earlier)

    return of_log_probs(objective, policy, params, batch, v)


def box(x: Float[Array, "m T"]) -> Float[Array, "m T"]:
    """DiCE's magic box operator exp(x - sg(x))."""
    return jnp.exp(x - jax.lax.stop_gradient(x))


def baseline(credit: Credit) -> Float[Array, "m T"]:
    """Baseline of every decision, zero if there is none."""
    return jnp.zeros_like(credit.returns) if credit.baseline is None else credit.baseline


def of_log_probs(
    objective: Callable[[Array], Array], policy: Any, params: Params, batch: Trajectory, v: Params
) -> Params:
    """Compute the product for an objective that depends on the log-probabilities only."""

    def of_params(theta: Params) -> Array:
        return objective(log_probs(policy.log_prob, theta, batch))

    return second_derivative(of_params, params, v, len(batch.reward))


def second_derivative(objective: Callable[[Params], Array], params: Params, v: Params, m: int) -> Params:
    """Multiply v by the Hessian of the mean over m trajectories of an objective [m, T], forward over reverse."""

    def mean(theta: Params) -> Float[Array, ""]:
        return jnp.sum(objective(theta)) / m

    return jax.jvp(jax.grad(mean), (params,), (v,))[1]
