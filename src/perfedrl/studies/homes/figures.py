"""Figures of the study of homes: savings by an agent's own days and by home, and a day before and after the step."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from perfedrl.envs.homes import HomeBattery
from perfedrl.envs.homes.battery import DAY, UNIT
from perfedrl.report.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    Axis,
    DotPanel,
    Dots,
    Level,
    Lines,
    Marks,
    Plot,
    Series,
)
from perfedrl.studies.homes.study import BUDGETS, DAYS, PERSONAL, RULES, SCRATCH, SHARED, TOLD, savings

SHOWN = 7
"""The unseen agent whose day is drawn."""


def unseen_homes(evidence: Mapping[Any, Any]) -> list[Plot]:
    """Savings by days and by home, and the same day of one home before and after the step."""
    return [by_days(evidence), by_home(evidence), *(day(evidence, days) for days in (0, DAYS))]


def by_days(evidence: Mapping[Any, Any]) -> Lines:
    """Mean savings of unseen homes by the days that they learn from, beside rules and ceilings."""
    rules = evidence[RULES]
    series = tuple(
        Series(label, np.asarray(BUDGETS), np.stack([savings(evidence, key, m).mean(-1) for m in BUDGETS], 1), color)
        for key, label, color in (
            (PERSONAL, "initialization by ProMP, one step", BLUE),
            (SHARED, "shared policy by FedPPO, one step", GREEN),
            (SCRATCH, "from scratch", PINK),
        )
    )
    levels = (
        Level("self-use at all hours", float(rules["self_use"].mean()), GREY),
        Level("rule that is told the tariff", float(rules["tariff_rule"].mean()), ORANGE),
        Level("policy that sees tariff and battery", float(savings(evidence, TOLD, 0).mean()), GREEN),
        Level("perfect foresight", float(rules["foresight"].mean()), PINK),
    )
    axis = Axis.budgets("days of the home's own that it learns from", BUDGETS)
    seeds = tuple(evidence[PERSONAL].config.seeds)
    return Lines(
        "homes",
        "Eight unseen agents in four homes, on test weeks",
        axis,
        "dollars saved per day",
        series,
        seeds,
        levels,
    )


def by_home(evidence: Mapping[Any, Any]) -> Dots:
    """Savings of every unseen home, mean over seeds."""
    fleet, rules = evidence[PERSONAL].config.experiment.fleet, evidence[RULES]
    tasks = [fleet.task(i, held_out=True) for i in range(fleet.held_out_agents)]
    labels = tuple(described(task) for task in tasks)
    marks = tuple(
        Marks(label, values, color, np.zeros(len(tasks), bool))
        for label, values, color in (
            ("self-use", rules["self_use"], GREY),
            ("shared policy", savings(evidence, SHARED, 0).mean(axis=0), GREEN),
            (f"one step, {DAYS} days", savings(evidence, PERSONAL, DAYS).mean(axis=0), BLUE),
            ("perfect foresight", rules["foresight"], PINK),
        )
    )
    panel = DotPanel("dollars saved per day", marks, scale="linear")
    return Dots("homes-by-home", "Unseen homes one by one", labels, (panel,))


def described(task: HomeBattery) -> str:
    """A home in a few words."""
    start, end = float(task.peak_start), float(task.peak_start + task.peak_hours)
    return f"home {float(task.home):g}, {float(task.capacity):.1f} kWh, peak {start:g}-{end:g} h"


def day(evidence: Mapping[Any, Any], days: int) -> Lines:
    """One test day of one unseen home, hour by hour, under the policy with so many days of its own."""
    run = evidence[PERSONAL]
    task, deployed = run.config.experiment.fleet.task(SHOWN, held_out=True), run.deployed
    (at,) = np.flatnonzero(deployed.budgets == days)
    obs = np.asarray(deployed.rollouts[0, at, SHOWN, 0], float)
    charge, load, solar = (obs[:, DAY] + 1) / 2 * float(task.capacity), UNIT * obs[:, DAY + 1], UNIT * obs[:, DAY + 2]
    one_way, stored = np.sqrt(float(task.efficiency)), np.diff(charge)
    grid = (load - solar)[:-1] + np.where(stored > 0, stored / one_way, stored * one_way)
    hours = np.arange(DAY)
    series = tuple(
        Series(label, hours[: len(values)], values[None], color, dashed)
        for label, values, color, dashed in (
            ("load, kW", load, GREY, False),
            ("solar generation, kW", solar, ORANGE, False),
            ("in the battery, kWh", charge, BLUE, False),
            ("from the grid, kW (below 0: fed in)", grid, PINK, True),
            ("price, 0.1 dollars per kWh", 10 * np.asarray(task.price(hours), float), GREEN, True),
        )
    )
    when, name = (f"after one step from {days} days", "after") if days else ("before the step", "before")
    axis = Axis("hour of the day", ticks=tuple(float(x) for x in range(0, DAY, 4)))
    title = f"A test day {when}: {described(task)}"
    return Lines(
        f"homes-day-{name}", title, axis, "kW, kWh or 0.1 dollars per kWh", series, tuple(run.config.seeds)[:1]
    )
