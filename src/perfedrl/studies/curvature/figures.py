"""Figures of the curvature study: returns by curvature setting, the gridworld, variances."""

from dataclasses import replace

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, Axis, Level, Lines, Plot, Series, Strip, Strips
from perfedrl.studies.base import Runs, final
from perfedrl.studies.curvature.study import AUTO, FIRST_ORDER, TABULAR_BETA, Evidence
from perfedrl.studies.estimators.figures import comparison
from perfedrl.studies.paper_neural.study import TRAINS

LABELS = {
    "score": "as in the paper",
    "causal": "causal, leave-one-out",
    "causal, ridge": "causal, ridge",
    "causal, alpha 0.5": "causal, leave-one-out, α = 0.5",
    "causal, ridge, alpha 0.5": "causal, ridge, α = 0.5",
    "central differences": "central differences",
    "limited": "causal, limited",
    "shrunk": "causal, shrunk",
    AUTO: "causal, automatic split",
    FIRST_ORDER: "first-order, no curvature",
}
"""Labels of the curvature settings."""


def curvature(evidence: Evidence) -> list[Plot]:
    """Return after adaptation of each seed by curvature setting and batch; F on the gridworld by round; variances."""
    runs = evidence.runs
    strips = tuple(
        Strip(
            f"{LABELS[setting]}, mₕ = {m}" if m else LABELS[setting], final(run), GREY if setting == "score" else BLUE
        )
        for (setting, m), run in runs.items()
        if m != "grid"
    )
    seeds = tuple(runs["score", 10].config.seeds)
    title = "The exact variant with small curvature batches"
    shown = Strips("curvature", title, "return of training agents after adaptation", strips, seeds, (reached(),))
    compared = comparison(evidence.comparison)
    without_times = replace(compared, name="curvature-variance", panels=compared.panels[:-1])
    return [shown, gridworld(runs), without_times]


def reached() -> Level:
    """The return from which on a seed counts as trained."""
    return Level("a seed has trained", TRAINS, GREY)


def gridworld(runs: Runs) -> Lines:
    """F by round on the gridworld, at the larger beta that lower variance allows."""
    named = {"exact": ("exact", BLUE), "first-order": ("first-order", ORANGE), "fedavg-pg": ("FedAvg-PG", GREEN)}
    histories = {variant: runs[variant, "grid"].history for variant in named}
    series = tuple(
        Series(label, histories[v].rounds, histories[v].after.mean(axis=-1), color)
        for v, (label, color) in named.items()
    )
    levels = (Level("exact, as in the paper", 0.79, GREY),)
    axis, seeds = Axis("communication round k"), tuple(runs["exact", "grid"].config.seeds)
    title = f"Gridworld with baselines, β = {TABULAR_BETA:g}"
    return Lines("curvature-gridworld", title, axis, "return after adaptation, F", series, seeds, levels)
