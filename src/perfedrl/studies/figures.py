"""The figures of the paper, and of any run, as plots of saved runs; those of the theory are apart."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from perfedrl.experiments.personalize import Personalized
from perfedrl.experiments.store import Run
from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, Axis, Level, Lines, Panel, Plot, Rollouts, Series
from perfedrl.simulation.history import History
from perfedrl.studies import Runs
from perfedrl.studies.base import final
from perfedrl.studies.curvature import figures as curvature_figures
from perfedrl.studies.gym_fleets import figures as gym_fleets_figures
from perfedrl.studies.gym_fleets import study as gym_fleets_study
from perfedrl.studies.lqr import figures as lqr_figures
from perfedrl.studies.mechanisms import figures as mechanisms_figures
from perfedrl.studies.navigation import figures as navigation_figures
from perfedrl.studies.paper_neural import study as paper_neural_study
from perfedrl.studies.paper_tabular import study as paper_tabular_study
from perfedrl.studies.robustness import figures as robustness_figures
from perfedrl.studies.theory import figures as theory_figures

NEW_AGENT, MEAN_RETURN = "trajectories of the new agent", "expected return, mean over agents"
AFTER = "return after adaptation, F"
METHODS = {
    "exact": ("Per-FedAvg-PG, exact", BLUE),
    "first-order": ("Per-FedAvg-PG, first-order", ORANGE),
    "fedavg-pg": ("FedAvg-PG", GREEN),
}


def personalization(runs: Runs) -> list[Plot]:
    """Figure "Tabular gridworld", left: F against trajectories per agent."""
    histories = {variant: runs[variant, 2.0].history for variant in METHODS}
    series = [
        Series(label, histories[v].trajectories, histories[v].after.mean(axis=-1), color)
        for v, (label, color) in METHODS.items()
    ]
    exact = histories["exact"]
    before = exact.before.mean(axis=-1)
    series.append(Series("exact, before adaptation", exact.trajectories, before, BLUE, dashed=True))
    uniform = Level("uniform policy", float(exact.before[:, 0].mean()))
    axis = Axis("trajectories per agent")
    return [
        Lines("e1", "Personalization within federation", axis, MEAN_RETURN, tuple(series), seeds(exact), (uniform,))
    ]


def step_size(runs: Runs) -> list[Plot]:
    """Figure "Tabular gridworld", right: final F against the adaptation step size."""
    at = np.asarray(paper_tabular_study.ALPHAS)
    series = [
        Series(label, at, np.stack([final(runs[v, a]) for a in paper_tabular_study.ALPHAS], axis=1), color)
        for v, (label, color) in METHODS.items()
    ]
    shown = tuple(series), seeds(runs["exact", 2.0].history)
    return [Lines("e3", "The adaptation step size", Axis("adaptation step size α"), AFTER, *shown)]


def learning_curves(runs: Runs) -> list[Plot]:
    """Figure "Learning curves": F against communication rounds."""
    series = [
        Series(label, runs[v, 2.0].history.rounds, runs[v, 2.0].history.after.mean(axis=-1), color)
        for v, (label, color) in METHODS.items()
    ]
    shown = tuple(series), seeds(runs["exact", 2.0].history)
    return [Lines("e6", "Learning curves", Axis("communication round k"), AFTER, *shown)]


def curvature_bottleneck(runs: Runs) -> list[Plot]:
    """Figure "Neural navigation", left: return against the curvature batch, every seed and the median."""
    batches = [m for m in runs if m != paper_neural_study.REFERENCE]
    values = np.stack([final(runs[m]) for m in batches], axis=1)
    series = Series("Per-FedAvg-PG, exact: median and seeds", np.asarray(batches), values, BLUE, centre="median")
    levels = (
        Level("FedAvg-PG reference, mean", float(final(runs[paper_neural_study.REFERENCE]).mean()), GREEN),
        Level("a seed has trained", paper_neural_study.TRAINS, GREY),
    )
    axis = Axis("curvature batch mₕ (trajectories)", "log", ticks=tuple(map(float, batches)))
    shown = (series,), seeds(runs[paper_neural_study.REFERENCE].history), levels
    return [Lines("e4", "The curvature bottleneck", axis, "return after adaptation", *shown)]


def few_shot(runs: Runs) -> list[Plot]:
    """Figure "Neural navigation", right, and its companion: return and success on held-out agents by budget."""
    meta, scratch = runs[paper_neural_study.META], runs[paper_neural_study.SCRATCH]
    return [by_budget(f"e5-{outcome}", outcome, meta, scratch) for outcome in ("return", "success")]


def by_budget(name: str, outcome: Literal["return", "success"], meta: Run, scratch: Run) -> Lines:
    """What new agents get from a budget: personalized from an initialization, and alone from scratch."""
    deployed, history = meta.deployed, scratch.history
    rate = outcome == "success"
    before, after = (
        history.outcomes[f"{when}.success"] if rate else getattr(history, when) for when in ("before", "after")
    )
    series = (
        Series("meta-initialization, one step", deployed.budgets, deployed.outcomes[outcome].mean(axis=-1), ORANGE),
        Series("from scratch", history.trajectories[1:], after[:, 1:].mean(axis=-1), PINK),
    )
    levels = (Level("random initialization", float(before[:, 0].mean())),)
    far = [x for x in history.trajectories if x > deployed.budgets[-1]]
    axis = Axis.budgets(NEW_AGENT, (*deployed.budgets, *far))
    label = "success rate" if rate else outcome
    title, y_label = f"Few-shot {label} on unseen agents", f"{label} on held-out goals"
    return Lines(name, title, axis, y_label, series, seeds(meta.history), levels, percent=rate)


def rollouts(runs: Runs) -> list[Plot]:
    """Figure "Held-out rollouts"."""
    task = runs[paper_neural_study.META].config.experiment.fleet.task(paper_neural_study.SHOWN_AGENT, held_out=True)
    panels = tuple(
        Panel(title, paths, task.goal, task.radius) for title, paths in paper_neural_study.shown(runs).items()
    )
    return [Rollouts("e7", "Episodes on an unseen goal", panels, task.box)]


FIGURES: Mapping[str, Callable[[Any], list[Plot]]] = MappingProxyType(
    {
        "e1": personalization,
        "e3": step_size,
        "e4": curvature_bottleneck,
        "e5": few_shot,
        "e6": learning_curves,
        "e7": rollouts,
        "theory": theory_figures.figures,
        "curvature": curvature_figures.curvature,
        "fewshot": curvature_figures.few_shot,
        "robustness": robustness_figures.robustness,
        "privacy": robustness_figures.private,
        "lqr": lqr_figures.figures,
        "navigation": navigation_figures.navigation,
        "fednpg": mechanisms_figures.fednpg,
        "fedsarsa": mechanisms_figures.fedsarsa,
        "fast-fedpg": mechanisms_figures.fast_fedpg,
        "client-sampling": mechanisms_figures.client_sampling,
        **{name: partial(gym_fleets_figures.unseen, study) for name, study in gym_fleets_study.STUDIES.items()},
    }
)


def learning(run: Run) -> list[Plot]:
    """What a single run measured while it trained, and what it is worth to the agents it was deployed to."""
    h = run.history
    shown = [("training agents, before adaptation", h.before, BLUE, True), ("training agents", h.after, BLUE, False)]
    if h.held_out_after.shape[-1]:
        shown += [
            ("held-out agents, before adaptation", h.held_out_before, PINK, True),
            ("held-out agents", h.held_out_after, PINK, False),
        ]
    series = tuple(Series(label, h.trajectories, x.mean(axis=-1), color, dash) for label, x, color, dash in shown)
    axis = Axis("trajectories per agent")
    plots: list[Plot] = [Lines("learning", "Return while training", axis, MEAN_RETURN, series, seeds(h))]
    deployed = run.deployment
    if deployed is not None and len(deployed.budgets) > 1:
        agents = deployed_agents(run)
        budgets = Series(agents, deployed.budgets, deployed.outcomes["return"].mean(axis=-1), ORANGE)
        axis = Axis.budgets("trajectories of the agent", deployed.budgets)
        plots.append(Lines("few-shot", f"Personalization of {agents}", axis, "return", (budgets,), seeds(h)))
    return plots + shown_rollouts(run)


def shown_rollouts(run: Run) -> list[Plot]:
    """The episodes that a run kept of the first agent it was deployed to, from the fewest and the most trajectories."""
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
    """An agent's episodes before and after personalization, where they are in the plane."""
    task = own.task
    if not in_the_plane(task, own.rollouts_before):
        return []
    panels = (
        Panel("before", own.rollouts_before, task.goal, task.radius),
        Panel(f"after {own.cost} trajectories", own.rollouts_after, task.goal, task.radius),
    )
    return [Rollouts("personalized", f"Personalized to {own.agent}", panels, task.box)]


def in_the_plane(task: Any, rollouts: np.ndarray) -> bool:
    """Whether episodes are paths in the plane around a goal."""
    located = task.goal is not None and task.radius is not None and task.box is not None
    return rollouts.size > 0 and rollouts.shape[-1] == 2 and located


def deployed_agents(run: Run) -> str:
    return "training agents" if run.config.experiment.fleet.held_out is None else "held-out agents"


def seeds(history: History) -> tuple[int, ...]:
    return tuple(int(seed) for seed in history.seeds)
