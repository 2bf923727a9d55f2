"""Seeds -> intervals."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit


class Interval(NamedTuple):
    """A mean over seeds with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Float[np.ndarray, " seed"], confidence: float = 0.95) -> Interval:
    """The mean over seeds and its Student-t interval; a single seed has no spread and gets an unbounded one."""
    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, -np.inf, np.inf)
    half = float(stdtrit(len(values) - 1, (1 + confidence) / 2) * values.std(ddof=1) / np.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)


def at_cost(
    values: Float[np.ndarray, "seed evaluation"], cost: np.ndarray, budget: float
) -> Float[np.ndarray, " seed"]:
    """Each seed's value at a budget, by linear interpolation between its evaluations."""
    return np.asarray([np.interp(budget, cost, row) for row in values])
