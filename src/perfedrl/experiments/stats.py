"""Statistics over seeds: means, medians and shares with confidence intervals, and ranks of methods."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import bdtr, betaincinv, stdtrit


class Interval(NamedTuple):
    """A mean (or median, or share) with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Float[np.ndarray, " seed"], confidence: float = 0.95) -> Interval:
    """The mean over seeds and its Student-t interval, which is unbounded for a single seed."""
    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, -np.inf, np.inf)
    half = float(stdtrit(len(values) - 1, (1 + confidence) / 2) * values.std(ddof=1) / np.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)


def median_interval(values: Float[np.ndarray, " seed"], confidence: float = 0.95) -> Interval:
    """The median over seeds and its interval between two order statistics, which is unbounded for few seeds.

    The interval is valid for every distribution, since the number of values below the median is binomial.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    n = len(ordered)
    tail = bdtr(np.arange(n), n, 0.5)
    outside = int(np.sum(tail <= (1 - confidence) / 2))
    low, high = (ordered[outside - 1], ordered[n - outside]) if outside else (-np.inf, np.inf)
    return Interval(float(np.median(ordered)), float(low), float(high))


def bootstrap_interval(values: Float[np.ndarray, " seed"], confidence: float = 0.95) -> Interval:
    """The mean over seeds and its percentile bootstrap interval; deterministic, and unbounded for a single seed."""
    from scipy.stats import bootstrap  # slow to import

    values = np.asarray(values, dtype=float)
    if len(values) < 2 or not np.isfinite(values).all():
        return Interval(float(values.mean()), -np.inf, np.inf)
    found = bootstrap((values,), np.mean, confidence_level=confidence, method="percentile", rng=0).confidence_interval
    return Interval(float(values.mean()), float(found.low), float(found.high))


def share_interval(count: int, n: int, confidence: float = 0.95) -> Interval:
    """The share count / n and its exact binomial (Clopper-Pearson) interval."""
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else float(betaincinv(count, n - count + 1, tail))
    high = 1.0 if count == n else float(betaincinv(count + 1, n - count, 1 - tail))
    return Interval(count / n, low, high)


def at_cost(
    values: Float[np.ndarray, "seed evaluation"], cost: np.ndarray, budget: float
) -> Float[np.ndarray, " seed"]:
    """Each seed's value at a budget, by linear interpolation between its evaluations."""
    return np.asarray([np.interp(budget, cost, row) for row in values])


def mean_ranks(values: Float[np.ndarray, "block method"]) -> Float[np.ndarray, " method"]:
    """The mean over blocks of each method's rank, 1 for the highest value; ties share their mean rank.

    NaN ranks last.
    """
    from scipy.stats import rankdata  # slow to import

    return rankdata(np.where(np.isnan(values), np.inf, -values), axis=1).mean(axis=0)


def critical_difference(methods: int, blocks: int, confidence: float = 0.95) -> float:
    """The least significant difference between mean ranks (Nemenyi's test, all pairs at once)."""
    from scipy.stats import studentized_range

    if methods < 2:
        return 0.0
    q = float(studentized_range.ppf(confidence, methods, np.inf)) / np.sqrt(2)
    return q * float(np.sqrt(methods * (methods + 1) / (6 * blocks)))
