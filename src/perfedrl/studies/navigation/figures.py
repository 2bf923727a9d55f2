"""Figures of the navigation study: scores of unseen agents by budget, and episodes."""

import numpy as np

from perfedrl.report.plots import BLUE, GREY, PINK, Axis, Level, Lines, Panel, Plot, Rollouts, Series
from perfedrl.studies.base import Runs
from perfedrl.studies.navigation.study import MAML_AFTER, MAML_BEFORE, MAML_TRAJECTORIES, POINTS

SHOWN = (2, 0), (2, 20), (6, 20)
"""(unseen agent, budget) of each panel: a goal at a typical distance before and after the step, and a farther goal."""


def navigation(runs: Runs) -> list[Plot]:
    """The undiscounted return by budget with MAML's as levels, and episodes of unseen agents."""
    run = runs[POINTS]
    deployed = run.deployed
    series = Series("one step, first-order", deployed.budgets, deployed.outcomes["score"].mean(axis=-1), BLUE)
    after = f"MAML, one step from {MAML_TRAJECTORIES}"
    levels = (
        Level("MAML, before", MAML_BEFORE, GREY),
        Level(after, MAML_AFTER, PINK),
    )
    axis = Axis.budgets("trajectories of the new agent", deployed.budgets)
    title = "2-D navigation, unseen goals"
    scores = Lines("navigation", title, axis, "undiscounted return", (series,), tuple(run.config.seeds), levels)
    return [scores, rollouts(runs)]


def rollouts(runs: Runs) -> Rollouts:
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
