"""Settings that are valid but can hardly be meant are warned about, and ordinary ones are not."""

import logging

import pytest
from tiny_config import BASE, changed

from perfedrl.experiments.config import make_config
from perfedrl.experiments.plausibility import implausible, unscaled_steps


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (changed(algorithm={"beta": 1e30}), "beta = 1e+30"),
        (changed(algorithm={"alpha": 1e-20}), "alpha = 1e-20"),
        (changed(entropy=1e9), "entropy = 1e+09"),
        (changed(server={"optimizer": "sgd", "rate": 1e12}), "rate = 1e+12"),
    ],
)
def test_a_number_that_can_hardly_be_meant_is_named(table, named, caplog):
    with caplog.at_level(logging.WARNING, "perfedrl"):
        make_config(table)
    assert named in caplog.text


GAUSSIAN = {"name": "gaussian-mlp"}


@pytest.mark.parametrize(
    ("advantage", "policy", "said"),
    [
        ({"name": "reward-to-go"}, GAUSSIAN, 'the steps of promp depend on the unit of rewards; set advantage = "gae"'),
        ({"name": "gae", "times_variance": False}, GAUSSIAN, "set times_variance = true in [advantage]"),
        ({"name": "gae", "times_variance": True}, GAUSSIAN, None),
        ({"name": "gae", "times_variance": False}, {"name": "mlp"}, None),
    ],
)
def test_clipped_steps_in_units_of_rewards_or_of_the_policy_are_warned_about(advantage, policy, said):
    found = unscaled_steps({"name": "promp"}, advantage, policy)
    assert found == [] if said is None else said in found[0]
    assert unscaled_steps({"name": "fedavg-pg"}, advantage, policy) == []


def test_ordinary_settings_and_bounds_that_are_switched_off_are_not(caplog):
    with caplog.at_level(logging.WARNING, "perfedrl"):
        make_config(BASE)
    assert caplog.text == ""
    assert implausible({"clip": 1e30, "limit": 1e20, "local_steps": 10**7, "alpha": 0.0, "beta": 1e-5}) == []
