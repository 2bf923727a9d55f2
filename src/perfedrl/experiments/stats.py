"""Statistics over seeds: means, medians and shares with confidence intervals, and ranks of methods."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import bdtr, betaincinv, stdtrit

SHARES = frozenset({"success", "accuracy"})
"""The names of outcomes that are shares: of episodes that succeed, of examples that are labelled correctly."""

COSTS = frozenset(
    {"distance", "bill", "peak_import", "clipped", "risk", "risk_index"}
    | {"below_54", "below_70", "above_180", "above_250"}
)
"""The names of outcomes of which less is better."""


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


def mean_share_interval(values: Float[np.ndarray, " seed"], confidence: float = 0.95) -> Interval:
    """The mean over seeds of shares, such as success rates, and its score interval, which lies within [0, 1].

    Student's interval takes the variance of the mean from the sample, s^2 / n, whatever the true mean p is, and so
    extends beyond 1. A share has less variance the closer p is to 0 or 1: here the variance at p is assumed to be
    s^2 / n times p (1 - p) / (x (1 - x)), where x is the sample mean, and the interval holds all p whose distance from
    x is at most Student's quantile times that standard deviation. For seeds that each are 0 or 1 this is Wilson's
    interval, up to Student's quantile and the n - 1 of the sample variance. Where all seeds agree it is a point, as
    Student's is. For a single seed it is [0, 1].
    """
    values = np.asarray(values, dtype=float)
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, 0.0, 1.0)
    quantile = float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    return score_interval(mean, float(values.var(ddof=1)) / len(values), quantile)


def score_interval(share: float, variance: float, quantile: float) -> Interval:
    """All p with |share - p| <= quantile * sqrt(variance * p (1 - p) / (share (1 - share))): Wilson's interval.

    `variance` is that of the estimated share; share (1 - share) / n gives the interval of a count out of n.
    """
    if not variance > 0 or share in (0.0, 1.0):
        return Interval(share, share, share)
    # The equation in p is quadratic: (share - p)^2 = q p (1 - p).
    q = quantile**2 * variance / (share * (1 - share))
    centre, half = (share + q / 2) / (1 + q), np.sqrt(q * share * (1 - share) + q**2 / 4) / (1 + q)
    return Interval(share, float(max(0.0, centre - half)), float(min(1.0, centre + half)))


def outcome_interval(outcome: str, values: Float[np.ndarray, " seed"]) -> Interval:
    """The mean of an outcome over seeds with its interval: within [0, 1] for shares, the outcomes in `SHARES`."""
    share = outcome in SHARES and bool(((values >= 0) & (values <= 1)).all())
    return mean_share_interval(values) if share else mean_interval(values)


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


def over_agents(values: Float[np.ndarray, "*axes agent"]) -> Float[np.ndarray, "*axes"]:
    """The mean over the agents that have a value; those that failed, or are absent from a network, have nan.

    Where no agent has a value it is nan.
    """
    known = ~np.isnan(values)
    if known.all():
        return np.asarray(values.mean(axis=-1))
    counts = np.where(known.any(axis=-1), known.sum(axis=-1), np.nan)
    return np.asarray(np.where(known, values, 0).sum(axis=-1) / counts)


def how_many(values: Float[np.ndarray, "*axes agent"], agents: str) -> str:
    """Name the agents that a mean is over: "training agents", or "2 of 4 training agents" where some have no value.

    Numbers that differ between seeds are given as a range.
    """
    known = np.sum(~np.isnan(values), axis=-1)
    fewest, most, everyone = int(known.min()), int(known.max()), values.shape[-1]
    if fewest == everyone:
        return agents
    return f"{fewest if fewest == most else f'{fewest} to {most}'} of {everyone} {agents}"
