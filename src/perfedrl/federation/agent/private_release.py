"""The uploads of agents in a network with privacy: whole steps on a grid, with discrete Gaussian noise.

With floating-point noise the last bits of a sum tell which numbers were added (Mironov, "On significance of the least
significant bits for differential privacy", 2012). Here the displacement is clipped and rounded to a vector of integers,
integer noise is added, and the upload is computed from that sum and from the message, which the server knows: it
reveals what the sum reveals.

**Guarantee.** One step of the grid is noise * clip / SIGMA, and the noise has the standard deviation SIGMA in steps.
For every experience the integers z have a sum of squares of at most B = floor((SIGMA / noise)^2), which `grid_steps`
checks in integer arithmetic. Those of two experiences therefore have a distance of at most 2 sqrt(B). For the discrete
Gaussian the Renyi divergence of order a between two integer shifts is at most a times their squared distance over
2 SIGMA^2 (Canonne, Kamath and Steinke 2020, Theorem 4), and those of independent coordinates add. So an upload is
rho-zero-concentrated differentially private with rho = 4 B / (2 SIGMA^2) <= 2 / noise^2, which is
`privacy.concentrated_cost(noise)`.
"""

import math
from fractions import Fraction

import jax
import numpy as np
from jaxtyping import PyTree

from perfedrl.algorithms.wrapper import check_displacement
from perfedrl.errors import UserError
from perfedrl.federation.agent.discrete_gaussian import ExactRandom

SIGMA = 2**20
"""The standard deviation of the noise in steps of the grid."""
LEAST_NOISE = 2.0**-30
"""Displacements of more than SIGMA / LEAST_NOISE steps have no exact floating-point numbers."""


def noised_upload(message: PyTree, upload: PyTree, clip: float, noise: float, random: ExactRandom) -> PyTree:
    """Clip the displacement of an upload from the message to the length `clip`, and add noise to every coordinate.

    The standard deviation of the noise is `noise` times `clip`. An upload that is not finite counts as the message.
    """
    check_displacement(message, upload, "privacy is")
    steps = grid_steps(message, upload, clip, noise)
    return from_steps(message, steps + random.discrete_gaussian(SIGMA, steps.size), clip, noise)


def grid_steps(message: PyTree, upload: PyTree, clip: float, noise: float) -> np.ndarray:
    """The clipped displacement in steps of the grid, rounded towards zero, as one vector of integers.

    Its sum of squares is at most `largest_square(noise)`: rounding towards zero does not make it longer, and where the
    floating-point arithmetic before it did, the vector is shortened until the bound holds.
    """
    moved = flat(upload) - flat(message)
    with np.errstate(all="ignore"):
        length = float(np.linalg.norm(moved))
        scaled = moved * (min(1.0, clip / length if length else 1.0) / clip * (SIGMA / noise))
    if not np.isfinite(scaled).all():
        return np.zeros(moved.size, np.int64)
    steps = np.trunc(scaled).astype(np.int64)
    while sum(x * x for x in steps.tolist()) > largest_square(noise):
        steps = np.trunc(steps * (1 - 2.0**-30)).astype(np.int64)
    return steps


def largest_square(noise: float) -> int:
    """The largest sum of squares of a displacement in steps of the grid, floor((SIGMA / noise)^2)."""
    return math.floor((SIGMA / Fraction(noise)) ** 2)


def from_steps(message: PyTree, steps: np.ndarray, clip: float, noise: float) -> PyTree:
    """The message, moved by steps on the grid, in the message's types.

    It depends on the steps, on the message and on the plan's settings only, all of which the server may know.
    """
    leaves, structure = jax.tree.flatten(message)
    parts = np.split(steps, np.cumsum([np.size(x) for x in leaves])[:-1])
    grid = clip * noise / SIGMA

    def moved(leaf: np.ndarray, part: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return np.asarray(leaf.astype(np.float64) + grid * part.reshape(leaf.shape), leaf.dtype)

    return jax.tree.unflatten(structure, [moved(np.asarray(x), part) for x, part in zip(leaves, parts, strict=True)])


def flat(tree: PyTree) -> np.ndarray:
    """All numbers of a tree as one vector in double precision."""
    return np.concatenate([np.zeros(0), *(np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree))])


def check_noise(noise: float) -> None:
    """Check that noise is 0 or large enough for the grid."""
    if 0 < noise < LEAST_NOISE:
        raise UserError(f"[privacy] noise must be 0 or at least {LEAST_NOISE:.2g} for agents in a network, not {noise}")
