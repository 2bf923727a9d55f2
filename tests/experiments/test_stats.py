"""Intervals of shares: within 0 and 1, Wilson's for counts, with the coverage that they state; means over agents."""

import warnings
from itertools import combinations_with_replacement
from math import factorial

import numpy as np
import pytest
from scipy.special import ndtri
from scipy.stats import binom

from perfedrl.experiments.stats import mean_interval, mean_share_interval, outcome_interval, over_agents, score_interval


@pytest.mark.parametrize(
    ("count", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (1, 29, 0.0061, 0.1718)],
)
def test_the_score_interval_of_a_count_is_wilsons(count, n, low, high):
    """Newcombe (1998), Statistics in Medicine 17, table I, method 3."""
    share = count / n
    assert score_interval(share, share * (1 - share) / n, ndtri(0.975)) == pytest.approx((share, low, high), abs=5e-5)


def enumerated(seeds, episodes, share):
    """All possible success rates of some seeds, up to their order, with their probabilities."""
    counts = np.asarray(list(combinations_with_replacement(range(episodes + 1), seeds)))
    repeats = [np.unique(row, return_counts=True)[1] for row in counts]
    orders = [factorial(seeds) / np.prod([factorial(c) for c in row]) for row in repeats]
    return counts / episodes, np.asarray(orders) * binom.pmf(counts, episodes, share).prod(axis=1)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.9, 0.95])
def test_by_enumeration_the_interval_of_a_mean_share_covers_as_stated_and_stays_within_0_and_1(share):
    """Three seeds of 20 episodes each: all outcomes, with their probabilities."""
    values, probability = enumerated(3, 20, share)
    assert probability.sum() == pytest.approx(1)
    _, low, high = np.asarray([mean_share_interval(x) for x in values]).T
    assert (low >= 0).all()
    assert (high <= 1).all()
    covered = probability[(low <= share) & (share <= high)].sum()
    assert 0.93 <= covered <= 0.97
    _, _, student = np.asarray([mean_interval(x) for x in values]).T
    assert share < 0.9 or probability[student > 1].sum() > 0.7, "why Student's interval does not do"


def test_a_success_rate_near_1_has_an_interval_below_1():
    """Two seeds, for which Student's interval is 0.390 .. 1.355."""
    values = np.asarray([0.834, 0.910])
    assert mean_interval(values).high > 1.3
    assert 0 < outcome_interval("success", values).low < 0.872 < outcome_interval("success", values).high < 1
    assert outcome_interval("return", values) == mean_interval(values)
    assert outcome_interval("success", 3 * values) == mean_interval(3 * values), "not shares, in spite of the name"


def test_the_ends_of_the_interval_solve_its_equation():
    """|x - p| = t sqrt(s^2 / n p (1 - p) / (x (1 - x))), with Student's quantile for three degrees of freedom."""
    values = np.asarray([0.9, 1.0, 0.7, 0.95])
    mean, *ends = mean_share_interval(values)
    for p in ends:
        deviation = np.sqrt(values.var(ddof=1) / 4 * p * (1 - p) / (mean * (1 - mean)))
        assert abs(mean - p) == pytest.approx(3.182446 * deviation, rel=1e-6)


def test_seeds_that_agree_give_a_point_and_one_seed_gives_all():
    assert mean_share_interval(np.ones(4)) == (1, 1, 1)
    assert mean_share_interval(np.asarray([1.0] * 9 + [np.nextafter(1, 0)])) == (1, 1, 1)
    assert mean_share_interval(np.asarray([0.25])) == (0.25, 0, 1)
    assert np.isnan(mean_share_interval(np.asarray([np.nan, 0.5]))).all()


def test_a_mean_over_agents_counts_those_with_a_value():
    values = np.asarray([[1.0, 3.0], [np.nan, 5.0], [np.nan, np.nan]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(over_agents(values), [2.0, 5.0, np.nan])
        single = over_agents(values[0])
    assert isinstance(single, np.ndarray)
    assert single == 2.0
