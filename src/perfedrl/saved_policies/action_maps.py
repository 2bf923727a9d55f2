"""Maps from a batch of a policy's actions to those of an environment; they can be sent to another process."""

import numpy as np
from jaxtyping import Shaped

Shape = tuple[int, ...]


def reshaped(shape: Shape, actions: Shaped[np.ndarray, "n ..."]) -> Shaped[np.ndarray, "n ..."]:
    """Return actions in the environment's shape."""
    return actions.reshape(len(actions), *shape)


def shifted(
    shape: Shape, start: Shaped[np.ndarray, "..."], actions: Shaped[np.ndarray, "n ..."]
) -> Shaped[np.ndarray, "n ..."]:
    """Return choices in the environment's shape, the first of which has the number `start`."""
    return actions.reshape(len(actions), *shape) + start


def clipped_to_box(
    shape: Shape,
    low: Shaped[np.ndarray, " k"],
    high: Shaped[np.ndarray, " k"],
    actions: Shaped[np.ndarray, "n k"],
) -> Shaped[np.ndarray, "n ..."]:
    """Return vectors clipped to the limits of a box."""
    return np.clip(actions, low, high).astype(low.dtype).reshape(len(actions), *shape)


def scaled_to_box(
    shape: Shape,
    low: Shaped[np.ndarray, " k"],
    high: Shaped[np.ndarray, " k"],
    center: Shaped[np.ndarray, " k"],
    half: Shaped[np.ndarray, " k"],
    actions: Shaped[np.ndarray, "n k"],
) -> Shaped[np.ndarray, "n ..."]:
    """Return center + half * a for every action a, clipped to the limits of a box."""
    return clipped_to_box(shape, low, high, center + half * actions)
