"""Figures of comparisons: ranks with their critical difference, returns by method, who wins as agents grow apart."""

from collections.abc import Sequence

import numpy as np

from perfedrl.experiments.compare import METHODS, Comparison
from perfedrl.experiments.stats import bootstrap_interval, critical_difference, mean_ranks
from perfedrl.report.compare_tables import finite, measured
from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, Axis, Lines, Plot, Range, Ranges, Series

MAML = ("per-fedavg-pg", "first-order", "hessian-free", "two-steps", "sg-mrl", "sg-mrl-pooled", "storm", "reptile")
PERSONAL = ("mixing", "mixing-zo", "shared-representation", "pfedme", "pmeta-rl", "fine-tuned")
ALONE = ("local-pg", "from-scratch")
LEVELS = ("per-fedavg-pg", "first-order", "fedavg-pg", "fine-tuned", "mixing", "pmeta-rl", "local-pg", "from-scratch")


def color(method: str) -> str:
    """By family: MAML's, other personalization, no federation, one shared policy."""
    families = ((MAML, BLUE), (PERSONAL, ORANGE), (ALONE, GREY))
    return next((shade for names, shade in families if method in names), GREEN)


FAMILIES = "blue: MAML family; orange: other personalization; green: shared policy; grey: no federation"


def ranks(name: str, title: str, comparisons: Sequence[Comparison], measure: str) -> Ranges:
    """Mean ranks over all fleets and seeds of the methods that all of them have; bars that do not meet differ."""
    found = [measured(comparison) for comparison in comparisons]
    methods = [m for m in METHODS if all(m in own and measure in own[m] for own in found)]
    blocks = np.concatenate([np.stack([own[m][measure] for m in methods], axis=1) for own in found])
    sign = -1.0 if measure.startswith("gap") else 1.0
    mean, half = mean_ranks(sign * blocks), critical_difference(len(methods), len(blocks)) / 2
    order = np.argsort(mean, kind="stable")
    lines = [
        Range(METHODS[methods[i]].title, mean[i], mean[i] - half, mean[i] + half, color(methods[i])) for i in order
    ]
    what = f"mean rank, 1 is best ({len(blocks)} fleets x seeds)"
    note = f"bars: critical difference {2 * half:.2f} (Nemenyi, 95 %); those that do not meet differ. {FAMILIES}"
    return Ranges(name, title, what, tuple(lines), note)


def returns(comparison: Comparison, measure: str) -> Ranges:
    """Every method's return under one measure, the best on top."""
    own = {m: x[measure] for m, x in measured(comparison).items() if measure in x and finite(x[measure])}
    lines = [Range(METHODS[m].title, *bootstrap_interval(x), color(m)) for m, x in own.items()]
    lines.sort(key=lambda line: -line.value)
    plain = measure.replace(", ", "-").replace(" ", "-")
    label = {"training": "training agents after personalization"}.get(measure, f"{measure} trajectories")
    note = f"mean over {comparison.plan.seeds} seeds, 95 % bootstrap interval. {FAMILIES}"
    title = f"{comparison.plan.name}: return, {label}"
    return Ranges(f"compare-{comparison.plan.name}-{plain}", title, "return", tuple(lines), note)


def by_level(comparisons: Sequence[Comparison], levels: Sequence[float], measure: str, y_label: str) -> Lines:
    """A measure over the level of heterogeneity."""
    found = [measured(comparison) for comparison in comparisons]
    shades = (BLUE, ORANGE, GREEN, PINK, GREY)
    present = [m for m in LEVELS if all(m in own and measure in own[m] for own in found)]
    series = tuple(
        Series(
            METHODS[m].title,
            np.asarray(levels, float),
            np.stack([own[m][measure] for own in found], axis=1),
            shades[i % len(shades)],
            dashed=i >= len(shades),
        )
        for i, m in enumerate(present)
    )
    plain = measure.replace(", ", "-").replace(" ", "-")
    axis = Axis("heterogeneity of the agents")
    seeds = tuple(range(comparisons[0].plan.seeds))
    return Lines(f"compare-levels-{plain}", "Random MDPs", axis, y_label, series, seeds)


def of(comparisons: Sequence[Comparison]) -> list[Plot]:
    """The figures of some comparisons."""
    name = comparisons[0].plan.name if len(comparisons) == 1 else "all"
    plots: list[Plot] = []
    for measure, what in (("training", "training agents"), ("unseen, 50", "unseen agents, 50 trajectories")):
        if any(measure in own for own in measured(comparisons[0]).values()):
            plots.append(ranks(f"compare-{name}-ranks-{what.split()[0]}", f"Ranks, {what}", comparisons, measure))
            plots += [returns(comparison, measure) for comparison in comparisons]
    return plots
