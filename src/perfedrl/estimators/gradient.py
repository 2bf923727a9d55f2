"""Policy-gradient estimators."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.types import Array, Params, Trajectory

LogProb = Callable[..., Float[Array, ""]]


def log_probs(log_prob: LogProb, params: Params, batch: Trajectory) -> Float[Array, "m T"]:
    """Log pi(a_h | s_h; theta) of every decision in a batch, 0 after an episode's end."""
    one = lambda obs, action: log_prob(params, obs, action)  # noqa: E731
    return jax.vmap(jax.vmap(one))(batch.obs, batch.action) * batch.mask


def policy_gradient(log_prob: LogProb, params: Params, batch: Trajectory, weights: Float[Array, "m T"]) -> Params:
    """Estimate grad J, eq. (2): the mean over the batch of sum_h grad log pi(a_h|s_h) R^h."""
    nu = lambda theta: jnp.sum(weights * log_probs(log_prob, theta, batch)) / len(weights)  # noqa: E731
    return jax.grad(nu)(params)
