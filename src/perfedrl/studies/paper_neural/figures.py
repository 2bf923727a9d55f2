"""Figures of the paper's neural experiments."""

from typing import Literal

import numpy as np

from perfedrl.experiments.store import Run
from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, Axis, Level, Lines, Panel, Plot, Rollouts, Series
from perfedrl.report.run_figures import seeds
from perfedrl.studies.base import Runs, final
from perfedrl.studies.paper_neural.study import META, REFERENCE, SCRATCH, SHOWN_AGENT, TRAINS, shown

NEW_AGENT = "trajectories of the new agent"


def curvature_bottleneck(runs: Runs) -> list[Plot]:
    """Figure "Neural navigation", left: return against the curvature batch, every seed and the median."""
    batches = [m for m in runs if m != REFERENCE]
    values = np.stack([final(runs[m]) for m in batches], axis=1)
    series = Series("Per-FedAvg-PG, exact: median and seeds", np.asarray(batches), values, BLUE, centre="median")
    levels = (
        Level("FedAvg-PG reference, mean", float(final(runs[REFERENCE]).mean()), GREEN),
        Level("a seed has trained", TRAINS, GREY),
    )
    axis = Axis("curvature batch mₕ (trajectories)", "log", ticks=tuple(map(float, batches)))
    title, of = "The curvature bottleneck", seeds(runs[REFERENCE].history)
    return [Lines("e4", title, axis, "return after adaptation", (series,), of, levels)]


def few_shot(runs: Runs) -> list[Plot]:
    """Figure "Neural navigation", right, and its companion: return and success on held-out agents by budget."""
    meta, scratch = runs[META], runs[SCRATCH]
    return [by_budget(f"e5-{outcome}", outcome, meta, scratch) for outcome in ("return", "success")]


def by_budget(name: str, outcome: Literal["return", "success"], meta: Run, scratch: Run) -> Lines:
    """An outcome of new agents by budget: personalized from an initialization, and from scratch."""
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
    task = runs[META].config.experiment.fleet.task(SHOWN_AGENT, held_out=True)
    panels = tuple(Panel(title, paths, task.goal, task.radius) for title, paths in shown(runs).items())
    return [Rollouts("e7", "Episodes on an unseen goal", panels, task.box)]
