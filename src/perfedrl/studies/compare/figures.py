"""Figures of comparisons: ranks with their critical difference, returns by method, measures by heterogeneity."""

from collections.abc import Mapping, Sequence

import numpy as np

from perfedrl.experiments.stats import bootstrap_interval, critical_difference, mean_ranks
from perfedrl.report.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    Axis,
    DotPanel,
    Dots,
    Lines,
    Marks,
    Plot,
    Range,
    Ranges,
    Series,
)
from perfedrl.studies.compare import METHODS, Comparison
from perfedrl.studies.compare.methods import ALONE, MAML, PERSONAL, SHARED
from perfedrl.studies.compare.tables import finite, measured

TRAINING, UNSEEN, GAP = "training", "unseen, 50", "gap to the optimum"
Measures = Mapping[str, Mapping[str, np.ndarray]]
"""Measures by method and name, one value per seed."""
LEVELS = (
    "per-fedavg-pg",
    "first-order",
    "first-order-tuned",
    "fedavg-pg",
    "fine-tuned",
    "mixing",
    "local-pg",
    "from-scratch",
)
"""The methods in figures by heterogeneity."""


def color(method: str) -> str:
    """The color of a method's family: MAML, other personalization, shared policy, no federation."""
    families = ((MAML, BLUE), (PERSONAL, ORANGE), (SHARED, GREEN), (ALONE, GREY))
    return next(shade for names, shade in families if method in names)


FAMILIES = "blue: MAML family; orange: other personalization; green: shared policy; grey: no federation"


def ranks(name: str, title: str, comparisons: Sequence[Comparison], measure: str) -> Ranges:
    """Mean ranks over fleets and seeds of the methods that all fleets have, with the critical difference as bars."""
    found, methods = [measured(comparison) for comparison in comparisons], in_common(comparisons, measure)
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


def in_common(comparisons: Sequence[Comparison], measure: str) -> list[str]:
    """The methods for which all comparisons have a measure."""
    found = [measured(comparison) for comparison in comparisons]
    return [m for m in METHODS if all(m in own and measure in own[m] for own in found)]


def returns(comparison: Comparison, measure: str) -> Ranges:
    """The return of each method under one measure, the best on top."""
    own = {m: x[measure] for m, x in measured(comparison).items() if measure in x and finite(x[measure])}
    lines = [Range(METHODS[m].title, *bootstrap_interval(x), color(m)) for m, x in own.items()]
    lines.sort(key=lambda line: -line.value)
    plain = measure.replace(", ", "-").replace(" ", "-")
    label = {"training": "training agents after personalization"}.get(measure, f"{measure} trajectories")
    note = f"mean over {comparison.plan.seeds} seeds, 95 % bootstrap interval. {FAMILIES}"
    title = f"{comparison.plan.name}: return, {label}"
    return Ranges(f"compare-{comparison.plan.name}-{plain}", title, "return", tuple(lines), note)


def overview(comparisons: Sequence[Comparison]) -> Dots:
    """One line per method, the best for unseen agents on top, and one panel per fleet."""
    found = [measured(comparison) for comparison in comparisons]
    present = [m for m in METHODS if any(m in own for own in found)]

    def mean(own: Measures, method: str, key: str) -> float:
        return float(own[method][key].mean()) if method in own and key in own[method] else np.nan

    order = sorted(present, key=lambda m: np.nanmean([relative_rank(own, m) for own in found]))
    marks = ((TRAINING, "training agents", GREY), (UNSEEN, "unseen agents, 50 trajectories", BLUE))
    panels = tuple(
        DotPanel(
            f"{comparison.plan.name}\nreturn",
            tuple(
                Marks(label, np.asarray([mean(own, m, key) for m in order]), shade, np.zeros(len(order), bool))
                for key, label, shade in marks
            ),
            scale="linear",
        )
        for comparison, own in zip(comparisons, found, strict=True)
    )
    title = "Mechanisms at matched budgets, means over seeds; the best for unseen agents on top"
    return Dots("compare-overview", title, tuple(METHODS[m].title for m in order), panels)


def relative_rank(own: Measures, method: str) -> float:
    """The share of methods that are better on one fleet, for unseen or else for training agents; nan if absent."""
    key = UNSEEN if UNSEEN in own.get(method, {}) else TRAINING
    if method not in own:
        return float("nan")
    if not finite(own[method][key]):
        return 1.0
    values = [x[key].mean() for x in own.values() if key in x and finite(x[key])]
    return float(sum(value > own[method][key].mean() for value in values)) / max(1, len(values))


def by_level(comparisons: Sequence[Comparison], measure: str, y_label: str) -> Lines:
    """A measure by the level of heterogeneity of one family."""
    found, levels = [measured(c) for c in comparisons], [c.plan.level for c in comparisons]
    shades = (BLUE, ORANGE, GREEN, PINK, GREY)
    present = [m for m in LEVELS if m in in_common(comparisons, measure)]
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
    family = comparisons[0].plan.family
    plain = measure.replace(", ", "-").replace(" ", "-")
    seeds = tuple(range(comparisons[0].plan.seeds))
    return Lines(f"compare-{family}-{plain}", family, Axis("heterogeneity of the agents"), y_label, series, seeds)


def summary(comparisons: Sequence[Comparison]) -> list[Plot]:
    """Figures of several comparisons together; the overview shows the last level of each family."""
    name = comparisons[0].plan.name if len(comparisons) == 1 else "all"
    shown = {c.plan.family or c.plan.name: c for c in comparisons}
    plots: list[Plot] = [overview(list(shown.values()))] if len(comparisons) > 1 else []
    for measure, what in ((TRAINING, "training agents"), (UNSEEN, "unseen agents, 50 trajectories")):
        if in_common(comparisons, measure):
            plots.append(ranks(f"compare-{name}-ranks-{what.split()[0]}", f"Ranks, {what}", comparisons, measure))
    families: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        families.setdefault(comparison.plan.family, []).append(comparison)
    for family, members in families.items():
        if family:
            plots.append(by_level(members, GAP, "distance to the agents' optimum"))
            plots.append(by_level(members, UNSEEN, "return of unseen agents, 50 trajectories"))
    return [plot for plot in plots if not isinstance(plot, Lines) or plot.series]


def details(comparison: Comparison) -> list[Plot]:
    """The return of each method on one fleet, one figure per measure."""
    measures = [m for m in (TRAINING, UNSEEN) if any(m in own for own in measured(comparison).values())]
    return [plot for measure in measures if (plot := returns(comparison, measure)).ranges]
