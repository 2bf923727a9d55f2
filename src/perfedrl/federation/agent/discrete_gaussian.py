"""Exact samples of the discrete Gaussian distribution, from random bytes by integer arithmetic.

The algorithms are those of Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020),
Section 5, on arrays: coins that show heads with probability exp(-a / b) give discrete Laplace samples, of which some
are kept. No floating-point number occurs, so that probabilities are exact and every integer is possible.
"""

import os
from collections.abc import Callable

import numpy as np

WIDTHS = {8: "<u1", 16: "<u2", 32: "<u4", 63: "<u8"}
"""The types of random words, by the largest number of bits that is taken from one."""


class ExactRandom:
    """Random integers and coins from a source of uniform random bytes, by default the operating system's."""

    def __init__(self, source: Callable[[int], bytes] = os.urandom):
        self._source = source

    def below(self, bound: int, size: int) -> np.ndarray:
        """Uniform integers from 0 to `bound` - 1, which has at most 63 bits."""
        bits = (bound - 1).bit_length()
        kind = np.dtype(next(kind for most, kind in WIDTHS.items() if bits <= most))
        result, todo = np.zeros(size, np.int64), np.arange(size if bits else 0)
        while todo.size:
            words = np.frombuffer(self._source(todo.size * kind.itemsize), kind)
            drawn = (words >> kind.type(8 * kind.itemsize - bits)).astype(np.int64)
            fits = drawn < bound
            result[todo[fits]] = drawn[fits]
            todo = todo[~fits]
        return result

    def coins(self, numerators: np.ndarray, denominator: int) -> np.ndarray:
        """Heads (True) with probability numerator / denominator each; the numerators are from 0 to the denominator."""
        return self.below(denominator, numerators.size) < numerators

    def exponential_coins(self, numerators: np.ndarray, denominator: int) -> np.ndarray:
        """Heads with probability exp(-numerator / denominator) each; the numerators are not negative."""
        whole, rest = np.divmod(numerators, denominator)
        heads, todo, units = np.ones(numerators.size, bool), np.flatnonzero(whole), 1
        while todo.size:  # one coin of exp(-1) for each unit, up to the first tails
            heads[todo] = self._coins_of_one_unit(todo.size)
            todo = todo[heads[todo] & (whole[todo] > units)]
            units += 1
        todo = np.flatnonzero(heads)
        heads[todo] = self._coins_within_a_unit(rest[todo], denominator)
        return heads

    def discrete_laplace(self, scale: int, size: int) -> np.ndarray:
        """Samples with probabilities proportional to exp(-|y| / scale)."""
        result, todo = np.zeros(size, np.int64), np.arange(size)
        while todo.size:
            rest = self.below(scale, todo.size)
            kept = self.exponential_coins(rest, scale)
            rest, tried, todo = rest[kept], todo[kept], todo[~kept]
            far = rest + scale * self._units_before_tails(rest.size)
            negative = self.below(2, rest.size) == 1
            twice = negative & (far == 0)  # zero has one sign
            result[tried] = np.where(negative, -far, far)
            todo = np.concatenate([todo, tried[twice]])
        return result

    def discrete_gaussian(self, sigma: int, size: int) -> np.ndarray:
        """Samples with probabilities proportional to exp(-y^2 / (2 sigma^2)), for an integer sigma < 2^21.

        A discrete Laplace sample of scale sigma is kept with probability exp(-(|y| - sigma)^2 / (2 sigma^2)). The
        product of this and of exp(-|y| / sigma) is exp(-y^2 / (2 sigma^2)) up to a constant. A square needs more than
        63 bits only if a coin of exp(-1) showed heads a thousand times in a row.
        """
        result, todo = np.zeros(size, np.int64), np.arange(size)
        while todo.size:
            drawn = self.discrete_laplace(sigma, todo.size)
            kept = self.exponential_coins((np.abs(drawn) - sigma) ** 2, 2 * sigma**2)
            result[todo[kept]] = drawn[kept]
            todo = todo[~kept]
        return result

    def _coins_within_a_unit(self, numerators: np.ndarray, denominator: int) -> np.ndarray:
        """Heads with probability exp(-numerator / denominator), for fractions of at most 1.

        The number of heads before the first tails of coins with probability fraction / k, k = 1, 2, ..., is even with
        that probability.
        """
        heads, todo, k = np.zeros(numerators.size, bool), np.arange(numerators.size), 1
        while todo.size:
            more = self.coins(numerators[todo], k * denominator)
            heads[todo[~more]] = k % 2 == 1
            todo, k = todo[more], k + 1
        return heads

    def _coins_of_one_unit(self, size: int) -> np.ndarray:
        return self._coins_within_a_unit(np.ones(size, np.int64), 1)

    def _units_before_tails(self, size: int) -> np.ndarray:
        """The number of heads before the first tails of coins with probability exp(-1)."""
        count, todo = np.zeros(size, np.int64), np.arange(size)
        while todo.size:
            todo = todo[self._coins_of_one_unit(todo.size)]
            count[todo] += 1
        return count
