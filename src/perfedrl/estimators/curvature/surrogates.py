"""Published objectives whose second derivative at the current parameters is the estimate, by automatic differentiation.

box(x) = exp(x - sg(x)) has the value 1 and the derivatives of a likelihood ratio. L_h is the log-likelihood of the
decisions up to h. With advantages that are reward-to-go less a baseline, Loaded DiCE, Taming MAML and second-order
TayPO are one and the same estimate, the causal form, trajectory by trajectory; DiCE is it where there is no baseline.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.estimators.gradient import Credit, log_probs
from perfedrl.types import Array, Params, Trajectory


def dice(policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params) -> Params:
    """DiCE: every reward times box(L_t) of what led to it; the baseline reaches single decisions, not pairs."""
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
    """Taming MAML: DiCE with a control variate that takes the baseline to pairs of decisions too."""
    rewards = credit.returns - jnp.pad(credit.returns[:, 1:], ((0, 0), (0, 1)))
    b = baseline(credit)

    def objective(logp: Float[Array, "m T"]) -> Array:
        so_far = jnp.cumsum(logp, axis=-1)
        single, pair = 1 - box(logp), (1 - box(so_far - logp)) * (1 - box(logp))
        return rewards * box(so_far) + b * (single - pair)

    return of_log_probs(objective, policy, params, batch, v)


def taypo(policy: Any, params: Params, batch: Trajectory, credit: Credit, v: Params, decay: float = 1.0) -> Params:
    """Second-order TayPO: (rho_h - 1) A_h, and (rho_k - 1)(rho_h - 1) A_h for every earlier decision k.

    `decay` < 1 weighs a pair by decay^(h - k): less variance, and a bias; 0 leaves the low-variance form.
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
    """DiCE's magic box."""
    return jnp.exp(x - jax.lax.stop_gradient(x))


def baseline(credit: Credit) -> Float[Array, "m T"]:
    return jnp.zeros_like(credit.returns) if credit.baseline is None else credit.baseline


def of_log_probs(
    objective: Callable[[Array], Array], policy: Any, params: Params, batch: Trajectory, v: Params
) -> Params:
    """The product for an objective of the log-probabilities alone."""
    logp = lambda theta: log_probs(policy.log_prob, theta, batch)  # noqa: E731
    return second_derivative(lambda theta: objective(logp(theta)), params, v, len(batch.reward))


def second_derivative(objective: Callable[[Params], Array], params: Params, v: Params, m: int) -> Params:
    """The Hessian of the mean over m trajectories of an objective [m, T], times v: forward over reverse."""
    mean = lambda theta: jnp.sum(objective(theta)) / m  # noqa: E731
    return jax.jvp(jax.grad(mean), (params,), (v,))[1]
