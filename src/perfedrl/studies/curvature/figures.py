"""The figures beyond the paper: curvature with small batches, and few-shot personalization that helps."""

from dataclasses import replace

from perfedrl.report.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    Axis,
    Level,
    Lines,
    Panel,
    Plot,
    Rollouts,
    Series,
    Strip,
    Strips,
)
from perfedrl.studies import Runs
from perfedrl.studies.base import final
from perfedrl.studies.curvature import study as curvature_study
from perfedrl.studies.estimators.figures import comparison
from perfedrl.studies.paper_neural.study import META, SHOWN_AGENT, TRAINS

WAYS = {
    "score": "as in the paper",
    "causal": "causal, leave-one-out",
    "causal, ridge": "causal, ridge",
    "causal, alpha 0.5": "causal, leave-one-out, α = 0.5",
    "causal, ridge, alpha 0.5": "causal, ridge, α = 0.5",
    "central differences": "central differences",
    "limited": "causal, limited",
    "shrunk": "causal, shrunk",
    curvature_study.AUTO: "causal, automatic split",
    curvature_study.FIRST_ORDER: "first-order, no curvature",
}
"""How the ways to estimate the curvature term are called."""


def curvature(evidence: curvature_study.Evidence) -> list[Plot]:
    """Return after adaptation of every seed, by way and curvature batch; F on the gridworld by round; variances."""
    runs = evidence.runs
    strips = tuple(
        Strip(f"{WAYS[way]}, mₕ = {m}" if m else WAYS[way], final(run), GREY if way == "score" else BLUE)
        for (way, m), run in runs.items()
        if m != "grid"
    )
    seeds = tuple(runs["score", 10].config.seeds)
    title = "The exact variant with small curvature batches"
    shown = Strips("curvature", title, "return of training agents after adaptation", strips, seeds, (reached(),))
    compared = comparison(evidence.study)
    without_times = replace(compared, name="curvature-variance", panels=compared.panels[:-1])
    return [shown, gridworld(runs), without_times]


def reached() -> Level:
    return Level("a seed has trained", TRAINS, GREY)


def gridworld(runs: Runs) -> Lines:
    """F against rounds at the longer step that less noise allows."""
    named = {"exact": ("exact", BLUE), "first-order": ("first-order", ORANGE), "fedavg-pg": ("FedAvg-PG", GREEN)}
    histories = {variant: runs[variant, "grid"].history for variant in named}
    series = tuple(
        Series(label, histories[v].rounds, histories[v].after.mean(axis=-1), color)
        for v, (label, color) in named.items()
    )
    levels = (Level("exact, as in the paper", 0.79, GREY),)
    axis, seeds = Axis("communication round k"), tuple(runs["exact", "grid"].config.seeds)
    title = f"Gridworld with baselines, β = {curvature_study.TABULAR_BETA:g}"
    return Lines("curvature-gridworld", title, axis, "return after adaptation, F", series, seeds, levels)


def few_shot(runs: Runs) -> list[Plot]:
    """Return and success on held-out agents by budget: as in the paper, with baselines, and as recommended."""
    named = {
        META: ("first-order, as in the paper", GREY),
        curvature_study.BASELINES_ONLY: ("the same with baselines", ORANGE),
        curvature_study.RECOMMENDED: ("recommended", BLUE),
    }
    plots: list[Plot] = []
    for outcome, label in (("return", "return"), ("success", "success rate")):
        rate = outcome == "success"
        series = tuple(
            Series(name, runs[key].deployed.budgets, runs[key].deployed.outcomes[outcome].mean(axis=-1), color)
            for key, (name, color) in named.items()
        )
        levels = () if rate else (Level("optimum", curvature_study.HELD_OUT_BEST, PINK),)
        axis = Axis.budgets("trajectories of the new agent", runs[META].deployed.budgets)
        title, seeds = f"Few-shot {label} on unseen agents", tuple(runs[META].config.seeds)
        plots.append(
            Lines(f"fewshot-{outcome}", title, axis, f"{label} on held-out goals", series, seeds, levels, percent=rate)
        )
    return [*plots, rollouts(runs)]


def rollouts(runs: Runs) -> Rollouts:
    """Episodes of an unseen agent with the recommended initialization, before and after its step."""
    run = runs[curvature_study.RECOMMENDED]
    task = run.config.experiment.fleet.task(SHOWN_AGENT, held_out=True)
    at = {int(m): run.deployed.rollouts[0, i, SHOWN_AGENT] for i, m in enumerate(run.deployed.budgets)}
    titles = {0: "before adaptation", 20: "after one step from 20 trajectories", 200: "from 200 trajectories"}
    panels = tuple(Panel(title, at[m], task.goal, task.radius) for m, title in titles.items())
    return Rollouts("fewshot-rollouts", "Episodes on an unseen goal, as recommended", panels, task.box)
