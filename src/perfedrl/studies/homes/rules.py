"""What fixed rules save in a fleet's unseen homes, and what perfect foresight would: yardsticks of the study."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from perfedrl.compilation import jit
from perfedrl.envs.homes import SAVE, SELF_USE, BatteryState, HomeBattery, homes
from perfedrl.envs.homes.battery import DAY
from perfedrl.exact.battery import best_schedule
from perfedrl.types import Array

STARTS = (0.25, 0.75)
"""How full batteries are when a day begins."""

Rule = Callable[[HomeBattery, BatteryState], Int[Array, "*n"]]
"""A home and its state -> the mode of the next hour."""


class RuleSavings(NamedTuple):
    """Mean savings per test day in dollars, by home. The names of the fields are those of the arrays in the files."""

    self_use: Float[np.ndarray, " agent"]
    tariff_rule: Float[np.ndarray, " agent"]
    foresight: Float[np.ndarray, " agent"]


def self_use(_: HomeBattery, state: BatteryState) -> Int[Array, "*n"]:
    """Store surplus and cover the load at any hour, which needs no knowledge of the tariff."""
    return jnp.full_like(state.hour, SELF_USE)


def tariff_rule(task: HomeBattery, state: BatteryState) -> Int[Array, "*n"]:
    """Cover the load in peak hours and save in all others, for an owner who tells the battery the tariff."""
    peak = jnp.mod(state.hour - task.peak_start, DAY) < task.peak_hours
    return jnp.where(peak, SELF_USE, SAVE).astype(state.hour.dtype)


def rule_savings(fleet: Mapping[str, Any]) -> RuleSavings:
    """Measure the rules and the linear program on every test day of the held-out homes of a fleet."""
    made = homes(**fleet)
    tasks = [made.task(i, held_out=True).measured_on for i in range(made.held_out_agents)]
    return RuleSavings(
        np.asarray([by_rule(task, self_use) for task in tasks]),
        np.asarray([by_rule(task, tariff_rule) for task in tasks]),
        np.asarray([by_foresight(task) for task in tasks]),
    )


def by_rule(task: HomeBattery, rule: Rule) -> float:
    """Mean savings of a rule over all days of a home's data and all starts."""
    days, starts = (x.ravel() for x in np.meshgrid(np.arange(len(task.load)), np.asarray(STARTS)))
    return float(_day_savings(task, rule, days, starts * float(task.capacity)).mean())


def _savings(task: HomeBattery, rule: Rule, days: Int[Array, " n"], charges: Float[Array, " n"]) -> Float[Array, " n"]:
    def hour(state: BatteryState, _: None) -> tuple[BatteryState, Float[Array, ""]]:
        after, reward, _over = task.step(state, rule(task, state), jnp.zeros(0))
        return after, reward

    def day(episode: Int[Array, ""], charge: Float[Array, ""]) -> Float[Array, ""]:
        start = BatteryState(episode.astype(jnp.int32), jnp.zeros((), jnp.int32), charge.astype(jnp.float32))
        return jnp.sum(jax.lax.scan(hour, start, length=task.horizon + 1)[1])

    return jax.vmap(day)(days, charges)


_day_savings = jit(_savings, static_argnums=1)


def by_foresight(task: HomeBattery) -> float:
    """Mean savings over the same days and starts, had all hours of each day been known in advance."""
    days = range(len(task.load))
    return float(
        np.mean([best_schedule(task, day, start * float(task.capacity)).savings for day in days for start in STARTS])
    )
