"""Variance and bias of an estimator from independent estimates, with the noise in the estimated bias removed."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import chdtri

CHANCE = 1e-3
"""A bias counts as seen where noise alone would be as large with at most this probability."""

ROUNDING = 1e-8
"""A squared bias below this share of the squared truth is due to single precision."""


class ErrorMoments(NamedTuple):
    """Moments of one estimator at one point, with D = mean - truth and S the covariance of the noise in D.

    `gap` is |D|^2, `noise` tr S, `noise_squared` tr S^2, `along` D'S D, `length` |truth|^2. The mean of `squares` is
    the variance, summed over coordinates.
    """

    squares: Float[np.ndarray, " replicate"]
    gap: float
    noise: float
    noise_squared: float
    along: float
    length: float


def moments(estimates: Float[np.ndarray, "replicate d"], truth: Float[np.ndarray, "part d"]) -> ErrorMoments:
    """The moments of independent estimates. The truth has one exact row, or independent estimates of it as rows."""
    x, y = np.asarray(estimates, np.float64), np.asarray(truth, np.float64)
    spread, doubt = x - x.mean(axis=0), y - y.mean(axis=0)
    D = x.mean(axis=0) - y.mean(axis=0)
    squares = np.sum(spread**2, axis=1) * (len(x) / (len(x) - 1))
    of_mean = [rows / np.sqrt(len(rows) * (len(rows) - 1)) for rows in (spread, doubt) if len(rows) > 1]
    Y = np.concatenate(of_mean)
    gram = Y @ Y.T if len(Y) < Y.shape[1] else Y.T @ Y
    length = float(np.sum(y.mean(axis=0) ** 2)) - (float(np.sum(of_mean[1] ** 2)) if len(y) > 1 else 0.0)
    return ErrorMoments(
        squares, float(D @ D), float(np.sum(Y**2)), float(np.sum(gram**2)), float(np.sum((Y @ D) ** 2)), length
    )


class ValueWithError(NamedTuple):
    """A number and its standard error."""

    value: float
    error: float


class EstimateError(NamedTuple):
    """Variance and squared bias of estimates, means over agents.

    The squared bias is estimated without bias, so it may be negative; `seen` says whether it exceeds noise.
    """

    variance: ValueWithError
    bias_squared: ValueWithError
    seen: bool
    length: float
    """The length of the truth, root mean square over agents; nan where it is not distinguishable from 0."""

    @property
    def square(self) -> float:
        """The mean squared error."""
        return max(self.variance.value + self.bias_squared.value, 0.0)

    @property
    def relative(self) -> float:
        """Root mean squared error divided by the length of the truth."""
        return float(np.sqrt(self.square)) / self.length

    @property
    def bias_at_most(self) -> float:
        """An upper limit of the squared bias, exceeded in about 1 of 20 cases."""
        return max(self.bias_squared.value, 0.0) + 2 * self.bias_squared.error


def error(agents: Sequence[ErrorMoments]) -> EstimateError:
    """The error of one estimator, mean over agents."""
    n = len(agents)

    def total(name: str) -> float:
        return sum(getattr(agent, name) for agent in agents)

    gap, noise, noise_squared, length = (total(name) for name in ("gap", "noise", "noise_squared", "length"))
    # D'S D counts the noise within D too: tr S^2 of it, on average.
    spread = max(4 * total("along") - 2 * noise_squared, 2 * noise_squared)
    variance = mean([agent.squares for agent in agents])
    seen = gap - noise > max(reach(noise, noise_squared) - noise, ROUNDING * length)
    return EstimateError(
        variance,
        ValueWithError((gap - noise) / n, float(np.sqrt(spread)) / n),
        bool(seen),
        float(np.sqrt(length / n)) if length > 0 else float("nan"),
    )


def reach(noise: float, noise_squared: float) -> float:
    """The value that |D|^2 exceeds by noise alone with probability CHANCE: a scaled chi-square with equal moments."""
    if noise_squared == 0:
        return 0.0
    freedom = noise**2 / noise_squared
    return noise / freedom * float(chdtri(freedom, CHANCE))


def ratio(these: Sequence[ErrorMoments], those: Sequence[ErrorMoments]) -> ValueWithError:
    """The ratio of two estimators' variances from the same replicates, so that shared noise cancels in its error."""
    one, two = (mean([agent.squares for agent in agents]).value for agents in (these, those))
    if two == 0:
        return ValueWithError(float("nan"), float("nan"))
    share = one / two
    apart = mean([a.squares - share * b.squares for a, b in zip(these, those, strict=True)])
    return ValueWithError(share, apart.error / two)


def mean(agents: Sequence[np.ndarray]) -> ValueWithError:
    """The mean over agents of the means over replicates, with its standard error."""
    errors = [x.var(ddof=1) / len(x) for x in agents]
    return ValueWithError(float(np.mean([x.mean() for x in agents])), float(np.sqrt(sum(errors)) / len(agents)))
