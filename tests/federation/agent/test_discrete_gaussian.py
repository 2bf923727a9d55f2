"""The exact sampler: its probabilities by enumeration of its choices, and its samples by a test of fixed bytes."""

import math
import os
from collections import defaultdict

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import chisquare, kstest

from perfedrl.federation.agent.discrete_gaussian import ExactRandom


class UndecidedError(Exception):
    """A choice beyond the script, with the probabilities of its outcomes."""


class RepeatedError(Exception):
    """An attempt was rejected, and the next one begins."""


class Scripted(ExactRandom):
    """Makes the choices of a script, and knows their probability; `attempt` is called where an attempt begins."""

    def __init__(self, script):
        super().__init__(lambda _: pytest.fail("bytes were read"))
        self._script, self.mass, self._attempts = list(script), 1.0, 0

    def choose(self, probabilities):
        if not self._script:
            raise UndecidedError(probabilities)
        choice = self._script.pop(0)
        self.mass *= probabilities[choice]
        return choice

    def attempt(self):
        self._attempts += 1
        if self._attempts > 1:
            raise RepeatedError


def enumerated(run, make, least=1e-12):
    """The probability of every result of `run(make(script))`, given that its first attempt is not rejected."""
    found, scripts = defaultdict(float), [()]
    while scripts:
        script = scripts.pop()
        random = make(script)
        try:
            found[run(random)] += random.mass
        except RepeatedError:
            pass
        except UndecidedError as choice:
            (probabilities,) = choice.args
            scripts += [(*script, i) for i, p in enumerate(probabilities) if random.mass * p > least]
    total = sum(found.values())
    return {result: mass / total for result, mass in found.items()}


class WithScriptedCoins(Scripted):
    """Coins with rational probabilities are scripted."""

    def coins(self, numerators, denominator):
        (a,) = numerators.tolist()
        assert 0 <= a <= denominator
        return np.asarray([self.choose([1 - a / denominator, a / denominator]) == 1])


class WithScriptedExponentials(Scripted):
    """Uniform integers and coins with exponential probabilities are scripted; an attempt begins with an integer."""

    def below(self, bound, size):
        assert size <= 1
        if bound != 2:
            self.attempt()
        return np.asarray([self.choose([1 / bound] * bound) for _ in range(size)], np.int64)

    def exponential_coins(self, numerators, denominator):
        heads = [math.exp(-a / denominator) for a in numerators.tolist()]
        return np.asarray([self.choose([1 - p, p]) == 1 for p in heads], bool)

    def _coins_of_one_unit(self, size):
        return self.exponential_coins(np.ones(size, np.int64), 1)


class WithScriptedLaplace(WithScriptedExponentials):
    """Laplace samples from -12 to 12 are scripted; an attempt begins with one."""

    def discrete_laplace(self, scale, size):
        self.attempt()
        weights = np.exp(-np.abs(np.arange(-12, 13)) / scale)
        return np.asarray([self.choose((weights / weights.sum()).tolist()) - 12])


def gaussian(sigma, far):
    y = np.arange(-far, far + 1)
    weights = np.exp(-(y**2) / (2 * sigma**2))
    return dict(zip(y.tolist(), (weights / weights.sum()).tolist(), strict=True))


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 8, 200, 256])
def test_integers_are_uniform_over_all_words(bound):
    """All 256 bytes are read once, and those that do not fit are replaced by the byte 0."""
    first = [np.arange(256, dtype=np.uint8).tobytes()]
    drawn = ExactRandom(lambda n: first.pop() if first else b"\0" * n).below(bound, 256)
    counts = np.bincount(drawn, minlength=bound)
    each = 256 >> (bound - 1).bit_length()
    assert counts.size == bound
    assert set(counts[1:].tolist()) <= {each}
    assert counts[0] == 256 - each * (bound - 1)


@pytest.mark.parametrize(("bound", "width"), [(2**8, 1), (2**9, 2), (2**16, 2), (2**17, 4), (2**40, 8), (2**63, 8)])
def test_integers_of_all_sizes_read_words_that_hold_them(bound, width):
    """One word of ones, the largest integer, and one of zeros; a bound just above needs one more bit."""
    drawn = ExactRandom(lambda n: b"\xff" * width + b"\0" * (n - width)).below(bound, 2)
    assert drawn.tolist() == [bound - 1, 0]
    read = []
    ExactRandom(lambda n: read.append(n) or b"\0" * n).below(bound - 1, 3)
    assert read == [3 * width]


@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, 1), (1, 3), (5, 7), (3, 1), (7, 2), (2**41 - 1, 2**41)])
def test_a_coin_shows_heads_with_exactly_its_exponential_probability(a, b):
    found = enumerated(lambda random: bool(random.exponential_coins(np.asarray([a]), b)[0]), WithScriptedCoins)
    assert found.get(True, 0.0) == pytest.approx(math.exp(-a / b), abs=1e-9)


@pytest.mark.parametrize("scale", [1, 3, 4])
def test_laplace_samples_have_exactly_their_probabilities(scale):
    found = enumerated(lambda random: int(random.discrete_laplace(scale, 1)[0]), WithScriptedExponentials, 1e-9)
    total = (1 + math.exp(-1 / scale)) / (1 - math.exp(-1 / scale))
    for y in range(-12, 13):
        assert found[y] == pytest.approx(math.exp(-abs(y) / scale) / total, abs=1e-7)


@pytest.mark.parametrize("sigma", [1, 2])
def test_gaussian_samples_have_exactly_their_probabilities(sigma):
    found = enumerated(lambda random: int(random.discrete_gaussian(sigma, 1)[0]), WithScriptedLaplace, 0.0)
    assert found == pytest.approx(gaussian(sigma, 12), rel=1e-9)


@pytest.mark.parametrize(("sigma", "far"), [(1, 3), (3, 9)])
def test_samples_of_fixed_bytes_fit_the_distribution(sigma, far):
    """A chi-square test; were the bytes random, a right sampler would fail once in a thousand times."""
    drawn = ExactRandom(np.random.default_rng(5).bytes).discrete_gaussian(sigma, 100_000)
    inside = drawn[np.abs(drawn) <= far]
    expected = np.asarray(list(gaussian(sigma, far).values())) * inside.size
    assert chisquare(np.bincount(inside + far), expected).pvalue > 1e-3
    assert np.abs(drawn).max() > far


def test_samples_with_a_large_deviation_are_nearly_normal():
    drawn = ExactRandom(np.random.default_rng(5).bytes).discrete_gaussian(2**20, 20_000)
    assert kstest(drawn / 2**20, "norm").pvalue > 1e-3
    assert np.unique(drawn).size > 19_000


def test_bytes_come_from_the_operating_system():
    assert ExactRandom()._source is os.urandom
    one, two = (ExactRandom().discrete_gaussian(2**20, 50) for _ in range(2))
    assert (one != two).any()


@pytest.mark.parametrize("sigma", [1, 2, 5])
@pytest.mark.parametrize("shift", [1, 2, 7])
def test_divergences_of_shifted_gaussians_are_within_the_cited_bound(sigma, shift):
    y = np.arange(-60 * sigma, 60 * sigma + shift)
    log_p, log_q = (-((y - mean) ** 2) / (2 * sigma**2) for mean in (0, shift))
    log_total = logsumexp(log_p)
    for order in (1.5, 2.0, 3.0, 8.0):
        divergence = (logsumexp(order * log_p + (1 - order) * log_q) - log_total) / (order - 1)
        assert divergence <= order * shift**2 / (2 * sigma**2) * (1 + 1e-12)
