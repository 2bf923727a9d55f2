"""The most that a home's battery could save on an episode whose hours are all known in advance, by linear programming.

Nobody knows the hours to come, so that no controller reaches it on average; it bounds them all.
"""

from typing import NamedTuple

import numpy as np
import scipy.optimize
from jaxtyping import Float

from perfedrl.envs.homes import HomeBattery


class BatterySchedule(NamedTuple):
    """The best use of the battery in an episode, and what it saves: the sum of rewards, not discounted."""

    savings: float
    metered: Float[np.ndarray, " hours"]
    """The energy into the battery, hour by hour; negative where it discharges."""


def best_schedule(task: HomeBattery, episode: int, charge: float) -> BatterySchedule:
    """Solve the linear program of one episode of a home's data that starts with `charge` kWh in the battery.

    Any energies are allowed that the battery can take and give, not only those of the three modes. Variables are, for
    every hour, the energies into and out of the battery at the meter and those imported from and exported to the grid.
    An optimum never imports and exports in one hour, since feeding in earns at most the base price, and never charges
    and discharges in one, since that loses energy.
    """
    T, hours = task.load.shape[-1], np.arange(task.load.shape[-1])
    net = np.asarray(task.load - task.solar, float)[episode]
    price, one_way = np.asarray(task.price(hours), float), float(np.sqrt(task.efficiency))
    one, none = np.eye(T), np.zeros((T, T))
    balance = np.hstack([one, -one, -one, one])
    stored = np.hstack([one_way * np.tril(np.ones((T, T))), -np.tril(np.ones((T, T))) / one_way, none, none])
    feed_in, value = float(task.feed_in), float(task.base_price) / one_way
    cost = np.concatenate([np.zeros(2 * T), price, np.full(T, -feed_in)]) - value * stored[-1]
    most = float(task.power)
    found = scipy.optimize.linprog(
        cost,
        A_ub=np.vstack([stored, -stored]),
        b_ub=np.concatenate([np.full(T, float(task.capacity) - charge), np.full(T, charge)]),
        A_eq=balance,
        b_eq=-net,
        bounds=[(0, most)] * (2 * T) + [(0, None)] * (2 * T),
    )
    idle = float(np.sum(np.where(net > 0, net * price, net * feed_in)))
    return BatterySchedule(idle - found.fun, found.x[:T] - found.x[T : 2 * T])
