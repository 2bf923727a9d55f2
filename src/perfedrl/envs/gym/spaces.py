"""Conversion between Gymnasium's spaces and the vectors and numbers of policies."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Shaped

from perfedrl.errors import UserError
from perfedrl.gym_environment.recipe import gymnasium

UNBOUNDED = 1e30
"""Bounds of at least this size count as none: some environments state the largest number of a type."""


@dataclass(frozen=True)
class SpaceSizes:
    """Sizes that all agents of a fleet share; either `actions` (one number, or one per component) or `action_size`."""

    observation_size: int
    actions: int | tuple[int, ...] | None
    action_size: int | None
    action_space: Any = field(default=None, compare=False, repr=False)
    """Gymnasium's own space; the bounds of a box may differ between agents."""

    def __str__(self) -> str:
        acts = f"{self.actions} actions" if self.action_size is None else f"actions of length {self.action_size}"
        return f"observations of length {self.observation_size} and {acts}"


def sizes(env: Any, name: str) -> SpaceSizes:
    """Return the sizes of an environment's spaces; observations may be anything that Gymnasium can flatten."""
    spaces = gymnasium().spaces
    try:
        space, observations = env.action_space, env.observation_space
    except AttributeError as error:
        raise UserError(f"{name}: an environment must set action_space and observation_space: {error}") from error
    if not observations.is_np_flattenable:
        raise UserError(f"{name}: observations in {observations} have no fixed length")
    seen = int(spaces.flatdim(observations))
    if isinstance(space, spaces.Discrete):
        return SpaceSizes(seen, int(space.n), None, space)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        counts = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.full(space.shape, 2)
        return SpaceSizes(seen, tuple(int(n) for n in np.ravel(counts)), None, space)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return SpaceSizes(seen, None, int(np.prod(space.shape)), space)
    raise UserError(
        f"{name}: actions in {space} are not supported; expected discrete, multi-discrete or multi-binary "
        "actions, or a box of floats"
    )


def scaling(box: Any) -> tuple[Shaped[np.ndarray, " k"], Shaped[np.ndarray, " k"]]:
    """Center and half width of a box's components; 0 and 1 for unbounded ones, which are not scaled."""
    finite = bounded(box)
    low = np.where(finite, box.low.ravel(), -1).astype(box.dtype)
    high = np.where(finite, box.high.ravel(), 1).astype(box.dtype)
    return (low + high) / 2, (high - low) / 2


def bounded(box: Any) -> Shaped[np.ndarray, " k"]:
    """Which components of a box have two bounds that mean something; the largest numbers of a type do not."""
    return (np.abs(box.low.ravel()) < UNBOUNDED) & (np.abs(box.high.ravel()) < UNBOUNDED)
