"""Figures of the paper's tabular experiments."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, ORANGE, Axis, Level, Lines, Plot, Series
from perfedrl.report.run_figures import MEAN_RETURN, seeds
from perfedrl.studies.base import Runs, final
from perfedrl.studies.paper_tabular.study import ALPHAS

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
    at = np.asarray(ALPHAS)
    series = [
        Series(label, at, np.stack([final(runs[v, a]) for a in ALPHAS], axis=1), color)
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
