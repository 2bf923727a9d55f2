"""Figures of any run: learning curves, personalization by budget, and episodes in the plane."""

from typing import Any

import numpy as np

from perfedrl.experiments.personalize import Personalized
from perfedrl.experiments.stats import how_many, over_agents
from perfedrl.experiments.store import Run
from perfedrl.report.plots import BLUE, ORANGE, PINK, Axis, Lines, Panel, Plot, Rollouts, Series
from perfedrl.simulation.history import History

MEAN_RETURN = "expected return, mean over agents"


def learning(run: Run) -> list[Plot]:
    """The figures of one run: return while training, return by deployment budget, and saved episodes."""
    h = run.history
    shown = [("training agents, before adaptation", h.before, BLUE, True), ("training agents", h.after, BLUE, False)]
    if h.held_out_after.shape[-1]:
        shown += [
            ("held-out agents, before adaptation", h.held_out_before, PINK, True),
            ("held-out agents", h.held_out_after, PINK, False),
        ]
    series = tuple(
        Series(how_many(x, label), h.trajectories, over_agents(x), color, dash) for label, x, color, dash in shown
    )
    axis = Axis("trajectories per agent")
    plots: list[Plot] = [Lines("learning", "Return while training", axis, MEAN_RETURN, series, seeds(h))]
    deployed = run.deployment
    if deployed is not None and len(deployed.budgets) > 1:
        agents = deployed_agents(run)
        budgets = Series(agents, deployed.budgets, over_agents(deployed.outcomes["return"]), ORANGE)
        axis = Axis.budgets("trajectories of the agent", deployed.budgets)
        plots.append(Lines("few-shot", f"Personalization of {agents}", axis, "return", (budgets,), seeds(h)))
    return plots + shown_rollouts(run)


def shown_rollouts(run: Run) -> list[Plot]:
    """Saved episodes of the first agent of the deployment, at the smallest and the largest budget."""
    fleet, deployed = run.config.experiment.fleet, run.deployment
    task = fleet.task(0, held_out=fleet.held_out is not None)
    if deployed is None or not in_the_plane(task, deployed.rollouts):
        return []
    chosen = sorted({0, len(deployed.budgets) - 1})
    panels = tuple(
        Panel(f"{deployed.budgets[b]} trajectories", deployed.rollouts[0, b, 0], task.goal, task.radius) for b in chosen
    )
    return [Rollouts("rollouts", f"Episodes of the first of the {deployed_agents(run)}", panels, task.box)]


def before_and_after(own: Personalized) -> list[Plot]:
    """An agent's episodes before and after personalization; no figure where they are not paths in the plane."""
    task = own.task
    if not in_the_plane(task, own.rollouts_before):
        return []
    panels = (
        Panel("before", own.rollouts_before, task.goal, task.radius),
        Panel(f"after {own.cost} trajectories", own.rollouts_after, task.goal, task.radius),
    )
    return [Rollouts("personalized", f"Personalized to {own.agent}", panels, task.box)]


def in_the_plane(task: Any, rollouts: np.ndarray) -> bool:
    """Whether episodes are paths in the plane and the task has a goal region and a box."""
    located = task.goal is not None and task.radius is not None and task.box is not None
    return rollouts.size > 0 and rollouts.shape[-1] == 2 and located


def deployed_agents(run: Run) -> str:
    """The name of the agents that a run was deployed to."""
    return "training agents" if run.config.experiment.fleet.held_out is None else "held-out agents"


def seeds(history: History) -> tuple[int, ...]:
    """The seeds of a history as plain integers."""
    return tuple(int(seed) for seed in history.seeds)
