"""Rendered pictures of an episode of a Gymnasium environment."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from perfedrl.errors import UserError
from perfedrl.gym_environment.open_environment import flattened
from perfedrl.gym_environment.recipe import Recipe

DRAWS = "rgb_array"


class PictureError(UserError):
    """The environment could not be rendered."""


def rendered(
    recipe: Recipe,
    name: str,
    decide: Callable[[Any, Any], np.ndarray],
    convert: Callable[[np.ndarray], np.ndarray],
    longest: int,
    noise: int,
    seed: int = 0,
) -> list[np.ndarray]:
    """Play one episode and return the rendered frame of every step."""
    with recipe.opened() as probe:
        modes = probe.metadata.get("render_modes", [])
    if DRAWS not in modes:
        raise PictureError(f"{name}: the environment cannot be rendered ({DRAWS!r} is not among its modes {modes})")
    # pygame, which draws the classic environments: without a screen, and without its greeting.
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    env = None
    try:
        env = flattened(recipe(render_mode=DRAWS))
        rng, frames = np.random.default_rng(seed), []
        obs, _ = env.reset(seed=seed)
        for _ in range(longest):
            frames.append(np.asarray(env.render()))
            action = decide(np.asarray(obs, np.float32)[None], rng.random((1, noise), np.float32))
            obs, _, terminated, truncated, _ = env.step(convert(np.asarray(action))[0])
            if terminated or truncated:
                break
        return frames
    except Exception as error:  # graphics libraries fail in many ways on machines without a screen
        raise PictureError(f"{name}: the environment could not be rendered here: {error}") from error
    finally:
        if env is not None:
            recipe.close(env)
