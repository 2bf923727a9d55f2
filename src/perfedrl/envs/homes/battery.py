"""A home with solar panels, a battery and a tariff: one agent's task.

Every hour the agent chooses one of three modes of its battery. The home's load and solar generation are measured ones.
Energies are in kWh, powers in kW, prices in dollars per kWh; since a decision lasts an hour, a power and the energy of
its hour are the same number.
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from perfedrl.envs.base import Task, check_episode
from perfedrl.envs.control.physics import Constant, like
from perfedrl.errors import UserError
from perfedrl.types import Array, Noise, Trajectory

DAY = 24

SELF_USE, SAVE, CHARGE = range(3)
"""The modes. `SELF_USE`: store what the panels make beyond the load, and cover the load beyond that from the battery,
the rule of most home batteries. `SAVE`: store, and keep what is stored. `CHARGE`: charge with full power, from the grid
where the panels do not suffice. No mode feeds stored energy into the grid."""

UNIT = 2.0
"""The unit of observed loads and solar generation, in kW."""

Energy = Float[Array, "*n"]


class BatteryState(NamedTuple):
    """The episode of the data that is played, the hour in it, and the energy in the battery."""

    episode: Int[Array, ""]
    hour: Int[Array, ""]
    charge: Float[Array, ""]


class Flows(NamedTuple):
    """The energies of one hour: into the battery at the meter, and into its store; negative when it discharges."""

    metered: Energy
    stored: Energy


class HomeBattery(Task):
    """One home. An episode is one day or several; its reward, summed, is what the battery saves on the bill.

    An hour's reward is the cost of the hour without a battery, less its cost with it, plus the change of the energy in
    the battery, valued at what it costs to put it there at `base_price`. So nothing is gained by emptying the battery,
    and nothing lost by filling it at that price.

    The agent observes the hour of the day (24 numbers, one of them 1), how full the battery is (-1 empty, 1 full), and
    the home's present load and solar generation. It does not observe the tariff, the battery's size, or the hours to
    come.
    """

    load: Float[Array, "*n episodes hours"]
    solar: Float[Array, "*n episodes hours"]
    test_load: Float[Array, "*n tests hours"]
    test_solar: Float[Array, "*n tests hours"]
    home: Constant
    capacity: Constant = 6.4
    power: Constant = 5.0
    efficiency: Constant = 0.9
    """The share of the energy taken from the meter to charge that comes back when it is discharged."""
    base_price: Constant = 0.15
    peak_price: Constant = 0.45
    feed_in: Constant = 0.05
    peak_start: Constant = 16.0
    """The hour of the day at which the peak price begins."""
    peak_hours: Constant = 4.0
    discount: float = eqx.field(static=True, default=0.99)

    reset_noise = 2
    step_noise = 0
    actions = 3
    observation_size = DAY + 3

    def __check_init__(self) -> None:
        check_episode(self.horizon, self.discount)
        check_home(self)

    @property
    def horizon(self) -> int:
        """The last decision is that of an episode's last hour."""
        return self.load.shape[-1] - 1

    @property
    def settings(self) -> dict[str, Any]:
        """The home's number, its battery and its tariff, without the measured hours."""
        return {name: np.asarray(getattr(self, name)) for name in SETTINGS}

    @property
    def measured_on(self) -> "HomeBattery":
        """The same home in its test weeks."""
        return dataclasses.replace(self, load=self.test_load, solar=self.test_solar)

    def reset(self, u: Noise) -> BatteryState:
        """Draw an episode of the data, and a charge between empty and full."""
        count = self.load.shape[-2]
        episode = jnp.minimum((u[0] * count).astype(jnp.int32), count - 1)
        return BatteryState(episode, jnp.zeros((), jnp.int32), u[1] * like(self, u).capacity)

    def observe(self, state: BatteryState) -> Float[Array, " 27"]:
        its = like(self, state.charge)
        hour = jax.nn.one_hot(state.hour % DAY, DAY, dtype=state.charge.dtype)
        energies = [x[state.episode, state.hour % x.shape[-1]] / UNIT for x in (its.load, its.solar)]
        return jnp.concatenate([hour, jnp.stack([2 * state.charge / its.capacity - 1, *energies])])

    def step(
        self, state: BatteryState, action: Int[Array, ""], u: Noise
    ) -> tuple[BatteryState, Float[Array, ""], bool]:
        its = like(self, state.charge)
        net = (its.load - its.solar)[state.episode, state.hour]
        flows = its.flows(state.charge, its.wanted(net, action))
        saved = its.cost(state.hour, net) - its.cost(state.hour, net + flows.metered)
        after = BatteryState(state.episode, state.hour + 1, state.charge + flows.stored)
        return after, saved + its.stored_value * flows.stored, False

    def wanted(self, net: Energy, mode: Int[Array, "*n"]) -> Energy:
        """The energy that a mode puts into the battery in an hour if it can, where the home lacks `net` without it."""
        return jnp.select([mode == SELF_USE, mode == SAVE], [-net, jnp.maximum(-net, 0.0)], self.power)

    def flows(self, charge: Energy, wanted: Energy) -> Flows:
        """The energies of an hour: as wanted, within the battery's power, until its store is full or empty."""
        one_way = jnp.sqrt(self.efficiency)
        within = jnp.clip(wanted, -self.power, self.power)
        stored = jnp.clip(jnp.where(within > 0, within * one_way, within / one_way), -charge, self.capacity - charge)
        return Flows(jnp.where(stored > 0, stored / one_way, stored * one_way), stored)

    def price(self, hour: Int[Array, "*n"] | int) -> Energy:
        """The price of energy from the grid in an hour of an episode."""
        peak = jnp.mod(hour - self.peak_start, DAY) < self.peak_hours
        return jnp.where(peak, self.peak_price, self.base_price)

    def cost(self, hour: Int[Array, "*n"] | int, net: Energy) -> Energy:
        """The cost of taking `net` from the grid in an hour; what is fed in earns `feed_in`."""
        return jnp.where(net > 0, net * self.price(hour), net * self.feed_in)

    @property
    def stored_value(self) -> Energy:
        """The value of 1 kWh in the battery: what it costs to put it there at the base price."""
        return self.base_price / jnp.sqrt(self.efficiency)

    def outcomes(self, episode: Trajectory) -> dict[str, Float[Array, ""]]:
        """Savings and bill per day in dollars, share of solar energy used at home, highest hourly import in kW.

        Savings include the change of the energy in the battery, the bill does not. On a day without sun the share is 1.
        """
        its = like(self, episode.reward)
        hours = jnp.arange(episode.reward.shape[-1])
        charge = (episode.obs[:, DAY] + 1) / 2 * its.capacity
        load, solar = UNIT * episode.obs[:, DAY + 1], UNIT * episode.obs[:, DAY + 2]
        net = load - solar
        net = net + its.flows(charge, its.wanted(net, episode.action)).metered
        generated, exported = jnp.sum(solar), jnp.sum(jnp.maximum(-net, 0.0))
        share = jnp.where(generated > 0, 1 - exported / jnp.maximum(generated, 1e-6), 1.0)
        days = len(hours) / DAY
        return {
            "savings": jnp.sum(episode.reward) / days,
            "bill": jnp.sum(its.cost(hours, net)) / days,
            "solar_used": jnp.clip(share, 0.0, 1.0),
            "peak_import": jnp.maximum(jnp.max(net), 0.0),
        }


SETTINGS = tuple(
    field.name
    for field in dataclasses.fields(HomeBattery)
    if field.name not in ("load", "solar", "test_load", "test_solar", "discount")
)
"""The numbers that describe a home: in these, and in the measured hours, homes differ."""

RULES = {
    "capacity": ("a number > 0", lambda x, _: x > 0),
    "power": ("a number > 0", lambda x, _: x > 0),
    "efficiency": ("a number > 0 and <= 1", lambda x, _: (x > 0) & (x <= 1)),
    "base_price": ("a number > 0", lambda x, _: x > 0),
    "peak_price": ("at least base_price", lambda x, task: x >= np.asarray(task.base_price)),
    "feed_in": ("from 0 to base_price", lambda x, task: (x >= 0) & (x <= np.asarray(task.base_price))),
    "peak_start": ("an hour of the day, >= 0 and < 24", lambda x, _: (x >= 0) & (x < DAY)),
    "peak_hours": ("from 0 to 24", lambda x, _: (x >= 0) & (x <= DAY)),
}
"""What a home's numbers must be. With a feed-in price above the base price, buying in order to sell would pay."""


def check_home(task: HomeBattery) -> None:
    """Check a home's battery and tariff; traced numbers are not checked."""
    if any(isinstance(getattr(task, name), jax.Array) for name in RULES):
        return
    for name, (what, holds) in RULES.items():
        value = np.asarray(getattr(task, name))
        if not np.all(np.isfinite(value) & holds(value, task)):
            raise UserError(f"{name} must be {what}; it is {value}")
