"""Hourly load and solar generation of 17 homes in Fontana, California, for 52 weeks from a Monday, 1 August.

`fontana.npz` is made by `convert.py` from the data of the CityLearn Challenge 2022 in the wheel CityLearn 2.1.2 (MIT
licence: `LICENSE-CityLearn.txt`). Every fourth week is a test week: agents learn from the others and are measured on
these.
"""

from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from perfedrl.envs.homes.convert import STEP, WEEKS
from perfedrl.errors import UserError

HOMES = tuple(range(1, 18))
"""The numbers of all homes, those of CityLearn's files."""

MISMETERED = (12, 15)
"""Homes whose recorded load is near zero at night and follows the sun: its correlation with the solar generation of
home 1 is 0.96 and 0.90, and at most 0.42 in all others. Probably generation was metered as load; fleets do not draw
them by default."""

USUAL = tuple(home for home in HOMES if home not in MISMETERED)

LONGEST = 7
"""The most days of an episode: weeks for learning and for tests are kept apart."""


class Profiles(NamedTuple):
    """The episodes that one home's data has: energies in kWh, hour by hour."""

    load: Float[np.ndarray, "episodes hours"]
    solar: Float[np.ndarray, "episodes hours"]


@cache
def measurements() -> tuple[np.ndarray, np.ndarray]:
    """Load and solar generation of all homes in units of `STEP`, as [home, day, hour]."""
    with files("perfedrl.envs.homes").joinpath("fontana.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["load"], arrays["solar"]


def profiles(home: float, days: int, test: bool) -> Profiles:
    """All runs of consecutive days within one week of a home, from the weeks for tests or from the others."""
    if home not in HOMES:
        raise UserError(f"there is no home {home:g}: the homes are {HOMES[0]} to {HOMES[-1]}")
    if not 1 <= days <= LONGEST or days != int(days):
        raise UserError(
            f"days must be a whole number from 1 to {LONGEST}, for episodes lie within a week of the data; it is {days}"
        )
    weeks = np.arange(WEEKS)
    mondays = 7 * weeks[(weeks % 4 == 3) == test]
    first = (mondays[:, None] + np.arange(LONGEST + 1 - int(days))).ravel()
    chosen = first[:, None] + np.arange(int(days))
    load, solar = ((STEP * x[int(home) - 1][chosen]).astype(np.float32) for x in measurements())
    return Profiles(load.reshape(len(first), -1), solar.reshape(len(first), -1))
