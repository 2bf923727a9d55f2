"""The policy-gradient estimator, eq. (2): returns, advantages and score functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.errors import UserError
from perfedrl.types import Array, Params, Scalar, Trajectory

LogProb = Callable[..., Float[Array, ""]]

UNBIASED = "none"
"""The bias of an estimator whose mean is what it estimates."""


class Credit(NamedTuple):
    """Reward-to-go of every decision in a batch, and the baseline to subtract from it, if any.

    The baseline of a decision must not depend on the actions of its own trajectory from that decision on. Then it
    leaves every expectation unchanged.
    """

    returns: Float[Array, "m T"]
    baseline: Float[Array, "m T"] | None = None

    @property
    def advantage(self) -> Float[Array, "m T"]:
        """Reward-to-go minus baseline."""
        return self.returns if self.baseline is None else self.returns - self.baseline


def reward_to_go(batch: Trajectory, discount: Scalar) -> Float[Array, "m T"]:
    """Compute R^h = sum over t >= h of gamma^t r_t, discounted from the start of the episode as in eq. (1)-(2)."""
    discounted = batch.reward * discount ** jnp.arange(batch.reward.shape[-1], dtype=batch.reward.dtype)
    return jnp.flip(jnp.cumsum(jnp.flip(discounted, axis=-1), axis=-1), axis=-1)


def largest_to_go(batch: Trajectory, discount: Scalar) -> Float[Array, " T"]:
    """Compute the reward-to-go of a constant reward of 1, the natural scale of returns at each decision."""
    T = batch.reward.shape[-1]
    return jnp.flip(jnp.cumsum(jnp.flip(discount ** jnp.arange(T, dtype=batch.reward.dtype))))


def log_probs(log_prob: LogProb, params: Params, batch: Trajectory) -> Float[Array, "m T"]:
    """Log pi(a_h | s_h; theta) of every decision in a batch, 0 after the end of an episode."""
    return jax.vmap(jax.vmap(lambda obs, action: log_prob(params, obs, action)))(batch.obs, batch.action) * batch.mask


def policy_gradient(log_prob: LogProb, params: Params, batch: Trajectory, weights: Float[Array, "m T"]) -> Params:
    """Estimate grad J, eq. (2): the mean over the batch of sum_h grad log pi(a_h|s_h) R^h."""

    def nu(theta: Params) -> Float[Array, ""]:
        return jnp.sum(weights * log_probs(log_prob, theta, batch)) / len(weights)

    return jax.grad(nu)(params)


def regularizer(
    policy: Any, batch: Trajectory, returns: Float[Array, "m T"], discount: Scalar, entropy: float
) -> Callable[[Params], Float[Array, ""]] | None:
    """Build the terms that are maximized along with the return, on the states of a batch; None if there are none.

    The terms are `entropy` times the discounted entropy of the policy, the fit of its value network to the returns, and
    the fit of its normalization moments to the batch, as far as the policy has these parts.
    """
    terms = []
    if entropy:
        if policy.entropy is None:
            raise UserError(f"{type(policy).__name__} has no entropy to reward: set entropy = 0")
        decay = discount ** jnp.arange(returns.shape[-1], dtype=returns.dtype) * batch.mask

        def bonus(theta: Params) -> Float[Array, ""]:
            entropies = jax.vmap(jax.vmap(lambda obs: policy.entropy(theta, obs)))(batch.obs)
            return entropy * jnp.sum(decay * entropies) / len(returns)

        terms.append(bonus)
    if policy.value_fit is not None:
        target = returns / jnp.maximum(largest_to_go(batch, discount), jnp.finfo(returns.dtype).tiny)
        terms.append(lambda theta: policy.value_fit(theta, batch, target))
    if policy.moment_fit is not None:
        terms.append(lambda theta: policy.moment_fit(theta, batch, reward_to_go(batch, discount)))
    return (lambda theta: sum((term(theta) for term in terms), jnp.zeros(()))) if terms else None
