"""Parsing of what `reset` and `step` of a Gymnasium environment return."""

from collections.abc import Mapping
from typing import Any

import numpy as np

STEP = "(observation, reward, terminated, truncated, info)"


class ReturnError(TypeError):
    """A return value that is not Gymnasium's."""


def parse_reset(result: Any) -> Any:
    """Return the observation in what `reset` returned."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        old = "" if isinstance(result, tuple) else ", an observation alone, as in old versions of Gym"
        raise ReturnError(f"reset must return (observation, info), got {kind(result)}{old}")
    return result[0]


def parse_step(result: Any) -> tuple[Any, Any, Any, Any]:
    """Return observation, reward, terminated and truncated in what `step` returned."""
    if not isinstance(result, tuple) or len(result) != 5:
        old = ", as in old versions of Gym" if isinstance(result, tuple) and len(result) == 4 else ""
        raise ReturnError(f"step must return the five values {STEP}, got {kind(result)}{old}")
    return result[:4]


def parse_reward(reward: Any) -> float:
    """Return a reward, which must be one number."""
    if isinstance(reward, (float, int, np.floating, np.integer, np.bool_)):
        return float(reward)
    if np.ndim(reward) or not np.issubdtype(np.asarray(reward).dtype, np.number):
        got = f"an array of shape {np.shape(reward)}" if np.ndim(reward) else kind(reward)
        raise ReturnError(f"the reward must be one number, got {got}")
    return float(reward)


def kind(value: Any) -> str:
    """Name the type of a returned value, with its length where it is a tuple."""
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a value of type {type(value).__name__}"
