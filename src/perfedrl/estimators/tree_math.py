"""Arithmetic on parameter trees that optax does not have: inner products, safe ratios, clipping by length."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float

from perfedrl.types import Array, Params, StepSize


def scale_by(alpha: StepSize, tree: Params) -> Params:
    """Alpha times a tree, where alpha is a number or a tree like it."""
    if is_scalar(alpha):
        return optax.tree.scale(alpha, tree)
    return jax.tree.map(lambda a, x: a * x, alpha, tree)


def is_scalar(alpha: StepSize) -> bool:
    return jax.tree_util.all_leaves([alpha]) and jnp.ndim(alpha) == 0


def clipped_to_length(tree: Params, longest: Array | float) -> Params:
    """A tree scaled down to a length where it is longer."""
    return optax.tree.scale(jnp.minimum(1, ratio(longest, optax.tree.norm(tree))), tree)


def ratio(x: Array | float, y: Array) -> Array:
    """X / y, and 0 where y is 0: a batch may have earned nothing at all."""
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)


def dot(x: Params, y: Params) -> Float[Array, ""]:
    """The inner product of two trees, by sums: the order of a dot product could depend on what runs beside it."""
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda a, b: jnp.sum(a * b), x, y))
