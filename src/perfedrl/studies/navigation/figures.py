"""Figures of the navigation study: scores of unseen agents by budget, and episodes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, PINK, Axis, Level, Lines, Panel, Plot, Rollouts, Series
from perfedrl.studies.navigation.maml_goals import (
    AS_TRAINED,
    GENERALIZED,
    GOAL_BUDGETS,
    MAML_AFTER,
    MAML_BEFORE,
    MAML_TRAJECTORIES,
)
from perfedrl.studies.navigation.study import POINTS

TRAJECTORIES, SCORE = "trajectories of the new agent", "undiscounted return"

SHOWN = (2, 0), (2, 20), (6, 20)
"""(unseen agent, budget) of each panel: a goal at a typical distance before and after the step, and a farther goal."""


def navigation(evidence: Mapping[Any, Any]) -> list[Plot]:
    """The undiscounted return by budget on the fleet's unseen goals and on MAML's, and episodes of unseen agents."""
    return [fleet_scores(evidence), maml_goal_scores(evidence), rollouts(evidence)]


def fleet_scores(runs: Mapping[Any, Any]) -> Lines:
    """The undiscounted return by budget on the fleet's unseen goals, with MAML's on its own goals as levels."""
    run = runs[POINTS]
    deployed = run.deployed
    series = Series("one step, first-order", deployed.budgets, deployed.outcomes["score"].mean(axis=-1), BLUE)
    axis = Axis.budgets(TRAJECTORIES, deployed.budgets)
    title = "2-D navigation, unseen goals of the fleet"
    levels = maml_levels(", on its own goals")
    return Lines("navigation", title, axis, SCORE, (series,), tuple(run.config.seeds), levels)


def maml_goal_scores(evidence: Mapping[Any, Any]) -> Lines:
    """The undiscounted return by budget on the goals of MAML's test, with MAML's as levels."""
    series = tuple(
        Series(name, np.asarray(GOAL_BUDGETS), evidence[name]["score"].mean(axis=-1), color)
        for name, color in ((AS_TRAINED, BLUE), (GENERALIZED, GREEN))
    )
    axis, seeds = Axis.budgets(TRAJECTORIES, GOAL_BUDGETS), tuple(evidence[POINTS].config.seeds)
    title = "2-D navigation, the 40 goals of MAML's test"
    return Lines("navigation-maml-goals", title, axis, SCORE, series, seeds, maml_levels())


def maml_levels(where: str = "") -> tuple[Level, Level]:
    """MAML's published scores."""
    after = f"MAML, one step from at least {MAML_TRAJECTORIES}{where}"
    return Level(f"MAML, before{where}", MAML_BEFORE, GREY), Level(after, MAML_AFTER, PINK)


def rollouts(runs: Mapping[Any, Any]) -> Rollouts:
    """Episodes of unseen agents before and after their step, whose length hardly depends on the goal's distance."""
    run = runs[POINTS]
    fleet, deployed = run.config.experiment.fleet, run.deployed
    panels = []
    for agent, m in SHOWN:
        task = fleet.task(agent, held_out=True)
        (at,) = np.flatnonzero(deployed.budgets == m)
        when = f"after {m} trajectories" if m else "before adaptation"
        title = f"{when}, goal at {np.linalg.norm(task.goal):.2f}"
        panels.append(Panel(title, deployed.rollouts[0, at, agent], task.goal, task.radius))
    return Rollouts("navigation-rollouts", "Episodes on unseen goals", tuple(panels), task.box)
