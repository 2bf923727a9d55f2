"""Kullback-Leibler divergences between two action distributions of one family."""

import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.types import Array

GaussianParameters = tuple[Float[Array, " a"], Float[Array, " a"]]
"""Mean and standard deviation of each component."""


def categorical(one: Float[Array, " a"], other: Float[Array, " a"]) -> Float[Array, ""]:
    """KL(one || other) of two distributions over finitely many actions, given by their log-probabilities."""
    return jnp.sum(jnp.exp(one) * (one - other))


def gaussian(one: GaussianParameters, other: GaussianParameters) -> Float[Array, ""]:
    """KL(one || other) of two Gaussians with independent components."""
    (mean, std), (new_mean, new_std) = one, other
    shift, ratio = (mean - new_mean) / new_std, std / new_std
    return jnp.sum(0.5 * (shift**2 + ratio**2 - 1) - jnp.log(ratio))
