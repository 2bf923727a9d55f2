"""From rewards to the weights of score functions."""

import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.types import Array, Scalar, Trajectory


def reward_to_go(batch: Trajectory, discount: Scalar) -> Float[Array, "m T"]:
    """R^h = sum over t >= h of gamma^t r_t, discounted from the episode's start as in eq. (1)-(2)."""
    discounted = batch.reward * discount ** jnp.arange(batch.reward.shape[-1], dtype=batch.reward.dtype)
    return jnp.flip(jnp.cumsum(jnp.flip(discounted, axis=-1), axis=-1), axis=-1)
