"""Outcomes of locomotion episodes, read off observations; the same for every engine."""

from typing import Any

import jax.numpy as jnp

from perfedrl.gym_environment import mujoco_worlds as worlds
from perfedrl.types import Array, Trajectory

ANT_SPEED = 13
"""Index of the first velocity in an ant's observation, after the positions."""


def running(velocity_scale: float, episode: Trajectory) -> dict[str, Array]:
    """The mean forward velocity over the decisions."""
    return {"velocity": over_time(episode, episode.obs[:, worlds.CHEETAH_POSITIONS]) / velocity_scale}


def walking(along: tuple[Any, Any], episode: Trajectory) -> dict[str, Array]:
    """The mean velocity along the agent's direction, a unit vector, and whether it never fell."""
    x, y = episode.obs[:, ANT_SPEED], episode.obs[:, ANT_SPEED + 1]
    return {"velocity": over_time(episode, x * along[0] + y * along[1]), "upright": never_fell(episode)}


def arriving(goal: Any, episode: Trajectory) -> dict[str, Array]:
    """The distance from the goal at the last decision."""
    return {"distance": jnp.linalg.norm(episode.obs[-1, :2] - jnp.asarray(goal))}


def upright(episode: Trajectory) -> dict[str, Array]:
    """The share of the episode before a fall, and whether it never fell."""
    return {"stood": jnp.mean(episode.mask), "upright": never_fell(episode)}


def over_time(episode: Trajectory, x: Array) -> Array:
    """Return the mean over the decisions of an episode."""
    return jnp.sum(x * episode.mask) / jnp.sum(episode.mask)


def never_fell(episode: Trajectory) -> Array:
    """Whether the last decision was reached; a fall at the last decision is not visible."""
    return episode.mask[-1]
