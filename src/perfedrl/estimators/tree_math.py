"""Arithmetic on parameter trees that optax does not have: inner products, safe ratios, clipping by length."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float

from perfedrl.types import Array, Params, StepSize


def scale_by(alpha: StepSize, tree: Params) -> Params:
    """Scale a tree by a step size: one number, or a tree with one step size per parameter."""
    if is_scalar(alpha):
        return optax.tree.scale(alpha, tree)
    return jax.tree.map(lambda a, x: a * x, alpha, tree)


def is_scalar(alpha: StepSize) -> bool:
    """Whether a step size is one number rather than one per parameter."""
    return jax.tree_util.all_leaves([alpha]) and jnp.ndim(alpha) == 0


def clipped_to_length(tree: Params, longest: Array | float) -> Params:
    """Scale a tree down to the length `longest` if it is longer."""
    return optax.tree.scale(jnp.minimum(1, ratio(longest, optax.tree.norm(tree))), tree)


def ratio(x: Array | float, y: Array) -> Array:
    """Divide x by y, with result 0 where y is 0, as for a batch whose rewards are all zero."""
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)


def dot(x: Params, y: Params) -> Float[Array, ""]:
    """Inner product of two trees.

    Written as sums because the summation order of a matrix product can depend on the other work in the program.
    """
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda a, b: jnp.sum(a * b), x, y))
