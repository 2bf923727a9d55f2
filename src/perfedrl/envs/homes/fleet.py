"""Fleets of homes that differ in their people and panels, batteries and tariffs."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from perfedrl.envs.control.physics import as_floats
from perfedrl.envs.fleet import Fleet, family_fleet
from perfedrl.envs.homes.battery import SETTINGS, HomeBattery
from perfedrl.envs.homes.data import USUAL, profiles
from perfedrl.envs.new_agents import Settings
from perfedrl.envs.variation import Vary, vary_agents

RANGES: Mapping[str, Any] = {
    "capacity": [5.0, 13.5],
    "power": [2.5, 5.0],
    "efficiency": [0.8, 0.95],
    "base_price": [0.12, 0.22],
    "peak_price": [0.35, 0.55],
    "feed_in": [0.02, 0.1],
    "peak_start": {"list": [6.0, 8.0, 16.0, 18.0, 20.0]},
    "peak_hours": {"list": [3.0, 4.0, 5.0]},
}
"""How homes differ in a parameter whose name alone is given; for `home` see `apart`."""

UNSEEN = 4
"""The most homes that held-out agents live in."""

HINTS = {
    "home": "a number from 1 to 17",
    "capacity": "kWh",
    "power": "kW",
    "efficiency": "of charging and discharging together",
    "base_price": "dollars per kWh",
    "peak_price": "dollars per kWh",
    "feed_in": "dollars per kWh",
    "peak_start": "hour of the day",
    "peak_hours": "hours",
}


def homes(
    agents: int = 22,
    held_out: int = 8,
    seed: int = 0,
    vary: Vary = ("home", "capacity", "power", "feed_in", "peak_start"),
    days: int = 1,
    discount: float = 0.99,
    home: int = 1,
    capacity: float = 6.4,
    power: float = 5.0,
    efficiency: float = 0.9,
    base_price: float = 0.15,
    peak_price: float = 0.45,
    feed_in: float = 0.05,
    peak_start: float = 16.0,
    peak_hours: float = 4.0,
) -> Fleet:
    """Homes with solar panels and batteries, on hourly measurements of 17 homes over a year.

    An episode is `days` consecutive days with a decision per hour: to use the battery for the home's own load, to save
    what is stored, or to charge it from the grid. Agents learn from three weeks out of four and are measured on the
    fourth. Usually they differ in the home, in their battery and in their tariff, none of which they observe; held-out
    agents then live in up to four homes in which no training agent lives.
    """
    given = (home, capacity, power, efficiency, base_price, peak_price, feed_in, peak_start, peak_hours)
    base = dict(zip(SETTINGS, given, strict=True))

    def make(_: Any, settings: Settings) -> HomeBattery:
        own: dict[str, Any] = as_floats(settings)
        learned, tested = (profiles(own["home"], days, test) for test in (False, True))
        return HomeBattery(*learned, *tested, **own, discount=discount)

    make(None, base)  # checks the shared values before the drawn ones
    parts = vary_agents(vary, agents, held_out, seed, SETTINGS, {"home": apart(agents, held_out, seed), **RANGES})
    train, unseen = ([{**base, **values} for values in part] for part in parts)
    return family_fleet(make, [as_floats(x) for x in train], [as_floats(x) for x in unseen], hints=HINTS)


def apart(agents: int, held_out: int, seed: int) -> dict[str, list[int]]:
    """The usual variation of `home`: held-out agents live in up to four homes in which no training agent lives."""
    order = np.random.default_rng([seed, zlib.crc32(b"homes")]).permutation(USUAL)
    unseen, others = order[: min(held_out, UNSEEN)], order[min(held_out, UNSEEN) :]
    return {"train": np.resize(others, agents).tolist(), "held_out": np.resize(unseen, held_out).tolist()}
