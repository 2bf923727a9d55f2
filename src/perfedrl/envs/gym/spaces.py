"""Conversion between Gymnasium's spaces and the vectors and numbers of policies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Shaped

from perfedrl.envs.gym.recipe import gymnasium
from perfedrl.errors import UserError


@dataclass(frozen=True)
class Spaces:
    """Sizes that all agents of a fleet share; either `actions` (one number, or one per component) or `action_size`."""

    observation_size: int
    actions: int | tuple[int, ...] | None
    action_size: int | None

    def __str__(self) -> str:
        acts = f"{self.actions} actions" if self.action_size is None else f"actions of length {self.action_size}"
        return f"observations of length {self.observation_size} and {acts}"


def sizes(env: Any, name: str) -> Spaces:
    """Return the sizes of an environment's spaces; observations may be anything that Gymnasium can flatten."""
    spaces, space = gymnasium().spaces, env.action_space
    if not env.observation_space.is_np_flattenable:
        raise UserError(f"{name}: observations in {env.observation_space} have no fixed length")
    seen = int(spaces.flatdim(env.observation_space))
    if isinstance(space, spaces.Discrete):
        return Spaces(seen, int(space.n), None)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        counts = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.full(space.shape, 2)
        return Spaces(seen, tuple(int(n) for n in np.ravel(counts)), None)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return Spaces(seen, None, int(np.prod(space.shape)))
    raise UserError(
        f"{name}: actions in {space} are not supported; expected discrete, multi-discrete, multi-binary or box actions"
    )


def flattened(env: Any) -> Any:
    """Wrap an environment so that its observations are vectors, by Gymnasium's own flattening."""
    gym = gymnasium()
    plain = isinstance(env.observation_space, gym.spaces.Box) and len(env.observation_space.shape) == 1
    return env if plain else gym.wrappers.FlattenObservation(env)


def to_actions(space: Any) -> Callable[[Shaped[np.ndarray, "n *a"]], np.ndarray]:
    """Return the map from a batch of a policy's actions to those of a space: shifted numbers or clipped vectors."""
    spaces = gymnasium().spaces
    if isinstance(space, spaces.Box):
        low, high = space.low.ravel(), space.high.ravel()
        return lambda a: np.clip(a, low, high).astype(space.dtype).reshape(len(a), *space.shape)
    start = 0 if isinstance(space, spaces.MultiBinary) else space.start
    if np.any(start):
        return lambda a: a.reshape(len(a), *space.shape) + start
    return lambda a: a.reshape(len(a), *space.shape)
