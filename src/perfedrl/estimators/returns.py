"""From rewards to the weights of score functions."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.types import Array, Scalar, Trajectory


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
