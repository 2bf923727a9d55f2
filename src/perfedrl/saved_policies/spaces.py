"""An environment's spaces as plain tables: its observations become a policy's vectors, a policy's actions its own."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from perfedrl.saved_policies.action_maps import clipped_to_box, reshaped, scaled_to_box, shifted

ActionMap = Callable[[np.ndarray], np.ndarray]
"""A batch of a policy's actions -> the environment's actions."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Shape = tuple[PositiveInt, ...]


class FileTable(BaseModel):
    """A frozen table without unknown keys, as it stands in a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __repr_name__(self) -> str:
        return type(self).__name__.removesuffix("Description")


class Array(FileTable):
    """Arrays of numbers that are taken as they are, flattened: also vectors, and arrays of zeros and ones."""

    kind: Literal["array"] = "array"
    shape: Shape

    def flatten(self, obs: Any) -> Float[np.ndarray, " d"]:
        """Return an observation as a vector, laid out as by Gymnasium: numbers as they are, choices one-hot."""
        array = np.asarray(obs, np.float32)
        if array.shape != self.shape:
            raise ValueError(f"expected an array of shape {list(self.shape)}, got {list(array.shape)}")
        return array.ravel()

    @property
    def flat_size(self) -> int:
        """The length of a flattened observation."""
        return math.prod(self.shape)

    def to_environment(self) -> ActionMap:
        """Return the map from a batch of a policy's actions to those of the environment."""
        return partial(reshaped, self.shape)


class Box(FileTable):
    """Actions that are arrays of real numbers between limits; None is no limit.

    A policy's action a stands for center + half * a, clipped to the limits.
    """

    kind: Literal["box"] = "box"
    shape: Shape
    low: tuple[Finite | None, ...]
    high: tuple[Finite | None, ...]
    center: tuple[Finite, ...]
    half: tuple[Finite, ...]
    dtype: Literal["float16", "float32", "float64"]

    @model_validator(mode="after")
    def _check_limits(self) -> "Box":
        if any(len(x) != math.prod(self.shape) for x in (self.low, self.high, self.center, self.half)):
            raise ValueError(f"expected limits, center and half width of each component of the shape {self.shape}")
        return self

    def to_environment(self) -> ActionMap:
        """Return the map from a batch of a policy's actions to those of the environment: scaled, clipped vectors."""
        low = np.asarray([-np.inf if x is None else x for x in self.low], self.dtype)
        high = np.asarray([np.inf if x is None else x for x in self.high], self.dtype)
        center, half = np.asarray(self.center, self.dtype), np.asarray(self.half, self.dtype)
        if not center.any() and (half == 1).all():  # so that actions of a box [-1, 1] keep their bits
            return partial(clipped_to_box, self.shape, low, high)
        return partial(scaled_to_box, self.shape, low, high, center, half)


class Choices(FileTable):
    """One of several choices, or an array of such choices; the first choice of each has the number in `start`."""

    kind: Literal["choices"] = "choices"
    shape: Shape
    counts: tuple[PositiveInt, ...]
    start: tuple[int, ...]

    @model_validator(mode="after")
    def _check_counts(self) -> "Choices":
        if not len(self.counts) == len(self.start) == math.prod(self.shape):
            raise ValueError(f"choices of shape {self.shape} have {len(self.counts)} counts")
        return self

    def flatten(self, obs: Any) -> Float[np.ndarray, " d"]:
        counts, chosen = np.asarray(self.counts), np.ravel(obs).astype(int) - self.start
        if chosen.shape != counts.shape or (chosen < 0).any() or (chosen >= counts).any():
            raise ValueError(f"{obs!r} is not one of the choices")
        flat = np.zeros(counts.sum(), np.float32)
        flat[np.cumsum(counts) - counts + chosen] = 1
        return flat

    @property
    def flat_size(self) -> int:
        return sum(self.counts)

    def to_environment(self) -> ActionMap:
        """Return the map from a batch of a policy's actions to those of the environment: shifted numbers."""
        start = np.asarray(self.start).reshape(self.shape)
        return partial(shifted, self.shape, start) if start.any() else partial(reshaped, self.shape)


class Named(FileTable):
    """Several spaces by name; observations are dictionaries."""

    kind: Literal["named"] = "named"
    parts: tuple[tuple[str, "Observations"], ...] = Field(min_length=1)

    def flatten(self, obs: Any) -> Float[np.ndarray, " d"]:
        names = [name for name, _ in self.parts]
        if not isinstance(obs, Mapping) or not set(names) <= set(obs):
            got = f"the keys {sorted(map(str, obs))}" if isinstance(obs, Mapping) else type(obs).__name__
            raise ValueError(f"expected a dictionary with the keys {names}, got {got}")
        return np.concatenate([part.flatten(obs[name]) for name, part in self.parts])

    @property
    def flat_size(self) -> int:
        return sum(part.flat_size for _, part in self.parts)


class Several(FileTable):
    """Several spaces in order; observations are tuples."""

    kind: Literal["several"] = "several"
    parts: tuple["Observations", ...] = Field(min_length=1)

    def flatten(self, obs: Any) -> Float[np.ndarray, " d"]:
        return np.concatenate([part.flatten(x) for part, x in zip(self.parts, obs, strict=True)])

    @property
    def flat_size(self) -> int:
        return sum(part.flat_size for part in self.parts)


Observations = Annotated[Array | Choices | Named | Several, Field(discriminator="kind")]
Actions = Annotated[Array | Box | Choices, Field(discriminator="kind")]
Named.model_rebuild()
Several.model_rebuild()


class Spaces(FileTable):
    """The observations that an environment returns, and the actions that it takes."""

    observations: Observations
    actions: Actions
