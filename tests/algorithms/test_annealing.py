"""Rates that fall over rounds."""

import numpy as np
import pytest

import perfedrl as pf
from perfedrl.algorithms.annealing import LAST_SHARE, Annealing


@pytest.mark.parametrize(
    ("schedule", "gone"), [("linear", [0, 0.25, 0.5, 0.75, 1, 1]), ("cosine", [0, 0.1464466, 0.5, 0.8535534, 1, 1])]
)
def test_the_rate_falls_to_its_last_share_and_stays_there(schedule, gone):
    annealing = Annealing(4, schedule)
    number, rates = annealing.first_round, []
    for _ in range(6):
        rates.append(float(annealing.rate(0.3, number)))
        number = annealing.next_round(number)
    np.testing.assert_allclose(rates, 0.3 * (1 - (1 - LAST_SHARE) * np.asarray(gone)), rtol=1e-5)


def test_without_rounds_nothing_is_sent_and_the_rate_stays():
    constant = Annealing()
    assert constant.first_round == constant.next_round(()) == ()
    assert constant.rate(0.3, ()) == 0.3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, "linear"), "anneal must be at least 1"),
        ((2.5, "linear"), "anneal must be a whole number"),
        ((4, "steps"), "the schedule must be 'linear' or 'cosine'; it is 'steps'"),
        ((None, "cosine"), "schedule = 'cosine' needs anneal"),
    ],
)
def test_bad_settings_are_one_sentence(arguments, said, untyped):
    with pytest.raises(pf.UserError, match=said):
        Annealing(*arguments)
