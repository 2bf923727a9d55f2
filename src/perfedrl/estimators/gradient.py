"""Policy-gradient estimators."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.errors import UserError
from perfedrl.types import Array, Params, Scalar, Trajectory

LogProb = Callable[..., Float[Array, ""]]


class Credit(NamedTuple):
    """What the decisions of a batch are credited with: the reward-to-go of each, less a baseline if there is one.

    A baseline of a decision must not depend on the actions of its own trajectory from that decision on; then no
    expectation changes.
    """

    returns: Float[Array, "m T"]
    baseline: Float[Array, "m T"] | None = None

    @property
    def advantage(self) -> Float[Array, "m T"]:
        return self.returns if self.baseline is None else self.returns - self.baseline


def reward_to_go(batch: Trajectory, discount: Scalar) -> Float[Array, "m T"]:
    """R^h = sum over t >= h of gamma^t r_t, discounted from the episode's start as in eq. (1)-(2)."""
    discounted = batch.reward * discount ** jnp.arange(batch.reward.shape[-1], dtype=batch.reward.dtype)
    return jnp.flip(jnp.cumsum(jnp.flip(discounted, axis=-1), axis=-1), axis=-1)


def largest_to_go(batch: Trajectory, discount: Scalar) -> Float[Array, " T"]:
    """The reward-to-go by decision of an agent that always gets 1: the scale that returns shrink with."""
    T = batch.reward.shape[-1]
    return jnp.flip(jnp.cumsum(jnp.flip(discount ** jnp.arange(T, dtype=batch.reward.dtype))))


def log_probs(log_prob: LogProb, params: Params, batch: Trajectory) -> Float[Array, "m T"]:
    """Log pi(a_h | s_h; theta) of every decision in a batch, 0 after an episode's end."""
    one = lambda obs, action: log_prob(params, obs, action)  # noqa: E731
    return jax.vmap(jax.vmap(one))(batch.obs, batch.action) * batch.mask


def policy_gradient(log_prob: LogProb, params: Params, batch: Trajectory, weights: Float[Array, "m T"]) -> Params:
    """Estimate grad J, eq. (2): the mean over the batch of sum_h grad log pi(a_h|s_h) R^h."""
    nu = lambda theta: jnp.sum(weights * log_probs(log_prob, theta, batch)) / len(weights)  # noqa: E731
    return jax.grad(nu)(params)


def regularizer(
    policy: Any, batch: Trajectory, returns: Float[Array, "m T"], discount: Scalar, entropy: float
) -> Callable[[Params], Float[Array, ""]] | None:
    """What is maximized along with the return, at the states that a batch visited; None where there is nothing.

    `entropy` times the policy's discounted entropy, and, where the policy has a value network, its fit to the returns;
    where it has moments that it normalizes by, their fit to the batch's.
    """
    terms = []
    if entropy:
        if policy.entropy is None:
            raise UserError(f"{type(policy).__name__} has no entropy that could be rewarded: set entropy = 0")
        decay = discount ** jnp.arange(returns.shape[-1], dtype=returns.dtype) * batch.mask
        bonus = lambda theta: jax.vmap(jax.vmap(lambda obs: policy.entropy(theta, obs)))(batch.obs)  # noqa: E731
        terms.append(lambda theta: entropy * jnp.sum(decay * bonus(theta)) / len(returns))
    if policy.value_fit is not None:
        target = returns / jnp.maximum(largest_to_go(batch, discount), jnp.finfo(returns.dtype).tiny)
        terms.append(lambda theta: policy.value_fit(theta, batch, target))
    if policy.moment_fit is not None:
        terms.append(lambda theta: policy.moment_fit(theta, batch, reward_to_go(batch, discount)))
    return (lambda theta: sum((term(theta) for term in terms), jnp.zeros(()))) if terms else None
