"""Gymnasium's spaces as the tables of a policy's file, with which it acts in the environment's own units."""

from typing import Any

import numpy as np

from perfedrl.envs.gym.spaces import scaling
from perfedrl.gym_environment.recipe import gymnasium
from perfedrl.saved_policies import spaces as tables


def observation_table(space: Any) -> tables.Observations:
    """Return the table of a space of observations; of one that is rarely used, that of its flat vectors."""
    spaces = gymnasium().spaces
    if isinstance(space, spaces.Dict):
        return tables.Named(parts=tuple((name, observation_table(part)) for name, part in space.spaces.items()))
    if isinstance(space, spaces.Tuple):
        return tables.Several(parts=tuple(observation_table(part) for part in space.spaces))
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return choices_table(space)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return tables.Array(shape=tuple(map(int, space.shape)))
    return tables.Array(shape=(int(spaces.flatdim(space)),))


def action_table(space: Any, scale: bool) -> tables.Actions:
    """Return the table of a space of actions; with `scale` [-1, 1] is mapped to the bounded components of a box."""
    spaces = gymnasium().spaces
    if isinstance(space, spaces.Box):
        return box_table(space, *(scaling(space) if scale else (np.zeros(space.low.size), np.ones(space.low.size))))
    if isinstance(space, spaces.MultiBinary):
        return tables.Array(shape=tuple(map(int, space.shape)))
    return choices_table(space)


def box_table(space: Any, center: np.ndarray, half: np.ndarray) -> tables.Box:
    """Return the table of a box; a policy's vector a stands for center + half * a in it."""
    low, high = ([float(x) if np.isfinite(x) else None for x in limit.ravel()] for limit in (space.low, space.high))
    return tables.Box(
        shape=tuple(map(int, space.shape)),
        low=tuple(low),
        high=tuple(high),
        center=tuple(map(float, center)),
        half=tuple(map(float, half)),
        dtype=space.dtype.name,
    )


def choices_table(space: Any) -> tables.Choices:
    """Return the table of one discrete choice or several."""
    counts = space.nvec if isinstance(space, gymnasium().spaces.MultiDiscrete) else space.n
    start = np.broadcast_to(space.start, space.shape)
    return tables.Choices(
        shape=tuple(map(int, space.shape)),
        counts=tuple(map(int, np.ravel(counts))),
        start=tuple(map(int, np.ravel(start))),
    )
