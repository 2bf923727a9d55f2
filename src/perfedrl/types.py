"""What one episode is, and the aliases that signatures share."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Integer, PyTree, Shaped

Array = jax.Array | np.ndarray
Params = PyTree[Float[Array, "..."]]
Scalar = Float[Array, ""] | float | int
StepSize = Scalar | Params
"""Of an adaptation: a number, or one for every parameter."""
Whole = Integer[Array, ""] | int
Noise = Float[Array, " noise"]
Progress = Callable[[str], None]
"""Told what is worked on now."""


class Trajectory(NamedTuple):
    """One episode, or a batch of them (leading axis m): T = H + 1 decisions, xi of eq. (1).

    `mask` is 1 while the episode lasts and 0 after it ended early; rewards are 0 there. It never leaves its agent.
    """

    obs: PyTree[Shaped[Array, "..."]]
    action: PyTree[Shaped[Array, "..."]]
    reward: Float[Array, "*m T"]
    mask: Float[Array, "*m T"]
