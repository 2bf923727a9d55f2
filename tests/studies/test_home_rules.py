"""The yardsticks of the study of homes: rules, and the foresight that bounds them."""

import jax.numpy as jnp
import numpy as np
import pytest

from perfedrl.envs.homes import SAVE, SELF_USE, BatteryState, HomeBattery
from perfedrl.studies.homes.rules import by_foresight, by_rule, self_use, tariff_rule


def flat_home(peak_start: float) -> HomeBattery:
    """A home without panels that uses 1 kWh every hour, with an ideal battery of 4 kWh, on one day."""
    load = np.ones((1, 24), np.float32)
    own = {"capacity": 4.0, "power": 4.0, "efficiency": 1.0, "base_price": 0.1, "peak_price": 0.3, "feed_in": 0.0}
    return HomeBattery(load, 0 * load, load, 0 * load, home=1.0, **own, peak_start=peak_start, peak_hours=4.0)


def test_the_tariff_rule_covers_the_load_in_peak_hours_alone():
    hours = jnp.arange(24, dtype=jnp.int32)
    modes = tariff_rule(flat_home(20.0), BatteryState(0 * hours, hours, 0.0 * hours))
    assert modes.tolist() == 20 * [SAVE] + 4 * [SELF_USE]
    assert self_use(flat_home(20.0), BatteryState(hours, hours, 0.0 * hours)).tolist() == 24 * [SELF_USE]


def test_savings_of_rules_and_of_foresight_computed_by_hand():
    """Starts of 1 and 3 kWh. Saved until the peak they save 0.2 a kWh; used at once, nothing beyond their worth.

    With foresight the battery is filled at the base price before the peak, which then saves four times 0.2.
    """
    task = flat_home(20.0)
    assert by_rule(task, tariff_rule) == pytest.approx(0.2 * 2, abs=1e-5)
    assert by_rule(task, self_use) == pytest.approx(0.0, abs=1e-5)
    assert by_foresight(task) == pytest.approx(0.2 * 4, abs=1e-5)
    early = flat_home(0.0)
    assert by_rule(early, self_use) == pytest.approx(0.2 * 2, abs=1e-5)
    assert by_foresight(early) == pytest.approx(0.2 * 2, abs=1e-5)
