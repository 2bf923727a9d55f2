"""Type aliases that signatures share, the record of an episode, and the interface of samplers."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Integer, PRNGKeyArray, PyTree, Shaped

Array = jax.Array | np.ndarray
Params = PyTree[Float[Array, "..."]]
Scalar = Float[Array, ""] | float | int
StepSize = Scalar | Params
"""A step size of the adaptation: one number, or one for every parameter."""
Whole = Integer[Array, ""] | int
Noise = Float[Array, " noise"]
Progress = Callable[[str], None]
"""A callback that receives a description of the current work."""


class Trajectory(NamedTuple):
    """One episode, or a batch of them (leading axis m): T = H + 1 decisions, xi of eq. (1).

    `mask` is 1 until the episode ends and 0 afterwards, where rewards are 0. A trajectory never leaves its agent.
    """

    obs: PyTree[Shaped[Array, "..."]]
    action: PyTree[Shaped[Array, "..."]]
    reward: Float[Array, "*m T"]
    mask: Float[Array, "*m T"]


@runtime_checkable
class Sampler(Protocol):
    """The access of an algorithm to an agent: fresh trajectories under given parameters."""

    @property
    def traceable(self) -> bool:
        """Whether JAX can trace `sample`; False for a sampler in plain Python (a robot, say)."""
        ...

    def sample(self, params: Params, key: PRNGKeyArray, m: int) -> Trajectory:
        """Draw m independent trajectories."""
        ...
