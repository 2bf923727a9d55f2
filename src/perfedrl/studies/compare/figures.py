"""Figures of comparisons: ranks with their critical difference, returns by method, measures by heterogeneity."""

from collections.abc import Iterable, Mapping, Sequence

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
from perfedrl.studies.compare import Comparison, find_method
from perfedrl.studies.compare.methods import ALONE, MAML, PERSONAL, SHARED
from perfedrl.studies.compare.own_methods import in_order
from perfedrl.studies.compare.tables import finite, measured, unseen_measure

TRAINING, GAP = "training", "gap to the optimum"
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
    """The color of a method's family: MAML, other personalization, shared policy, no federation, the user's own."""
    families = ((MAML, BLUE), (PERSONAL, ORANGE), (SHARED, GREEN), (ALONE, GREY))
    return next((shade for names, shade in families if method in names), PINK)


def families(methods: Iterable[str]) -> str:
    """What the colors of some methods mean."""
    own = "; pink: your own" if PINK in map(color, methods) else ""
    return f"blue: MAML family; orange: other personalization; green: shared policy; grey: no federation{own}"


def agents_of(measure: str) -> str:
    """The agents of a measure, in words."""
    return "training agents" if measure == TRAINING else f"unseen agents, {measure.split()[-1]} trajectories"


def ranks(name: str, title: str, comparisons: Sequence[Comparison], measure: str) -> Ranges:
    """Mean ranks over fleets and seeds of the methods that all fleets have, with the critical difference as bars.

    Bars are cut at the first and the last rank, which changes neither which of them meet nor which do not.
    """
    found, methods = [measured(comparison) for comparison in comparisons], in_common(comparisons, measure)
    blocks = np.concatenate([np.stack([own[m][measure] for m in methods], axis=1) for own in found])
    sign = -1.0 if measure.startswith("gap") else 1.0
    mean, half = mean_ranks(sign * blocks), critical_difference(len(methods), len(blocks)) / 2
    order = np.argsort(mean, kind="stable")
    low, high = np.clip([mean - half, mean + half], 1, len(methods))
    lines = [Range(find_method(methods[i]).title, mean[i], low[i], high[i], color(methods[i])) for i in order]
    what = f"mean rank, 1 is best ({len(blocks)} fleets x seeds)"
    note = (
        f"bars: critical difference {2 * half:.2f} (Nemenyi, 95 %); those that do not meet differ. {families(methods)}"
    )
    return Ranges(name, title, what, tuple(lines), note)


def in_common(comparisons: Sequence[Comparison], measure: str) -> list[str]:
    """The methods for which all comparisons have a measure."""
    found = [measured(comparison) for comparison in comparisons]
    every = in_order(m for own in found for m in own)
    return [m for m in every if all(m in own and measure in own[m] for own in found)]


def returns(comparison: Comparison, measure: str) -> Ranges:
    """The return of each method under one measure, the best on top."""
    own = {m: x[measure] for m, x in measured(comparison).items() if measure in x and finite(x[measure])}
    lines = [Range(find_method(m).title, *bootstrap_interval(x), color(m)) for m, x in own.items()]
    lines.sort(key=lambda line: -line.value)
    plain = measure.replace(", ", "-").replace(" ", "-")
    label = "training agents after personalization" if measure == TRAINING else agents_of(measure)
    note = f"mean over {comparison.plan.seeds} seeds, 95 % bootstrap interval. {families(own)}"
    title = f"{comparison.plan.name}: return, {label}"
    return Ranges(f"compare-{comparison.plan.name}-{plain}", title, "return", tuple(lines), note)


def overview(comparisons: Sequence[Comparison]) -> Dots:
    """One line per method and one panel per fleet, in the order that the title says."""
    found, unseen = [measured(comparison) for comparison in comparisons], unseen_measure(comparisons)

    def mean(own: Measures, method: str, key: str) -> float:
        return float(own[method][key].mean()) if method in own and key in own[method] else np.nan

    marks = [(TRAINING, agents_of(TRAINING), GREY)] + ([(unseen, agents_of(unseen), BLUE)] if unseen else [])
    order = best_first(found, unseen or TRAINING)
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
    by = "unseen" if unseen else "training"
    title = f"Mechanisms at matched budgets, means over seeds; by mean rank for {by} agents, the best on top"
    return Dots("compare-overview", title, tuple(find_method(m).title for m in order), panels)


def best_first(found: Sequence[Measures], measure: str) -> list[str]:
    """Methods by the mean over fleets of their relative rank under a measure; those without it last, by training."""
    present = in_order(m for own in found for m in own)

    def place(method: str) -> tuple[float, float]:
        ranks = [[relative_rank(own, method, key) for own in found] for key in (measure, TRAINING)]
        first, second = (float(np.mean(known)) if (known := [x for x in row if x == x]) else np.inf for row in ranks)
        return first, second

    return sorted(present, key=place)


def relative_rank(own: Measures, method: str, measure: str) -> float:
    """The share of methods that are better on one fleet under a measure, 1 if diverged; nan without the measure."""
    if measure not in own.get(method, {}):
        return float("nan")
    if not finite(own[method][measure]):
        return 1.0
    values = [x[measure].mean() for x in own.values() if measure in x and finite(x[measure])]
    return float(sum(value > own[method][measure].mean() for value in values)) / max(1, len(values))


def by_level(comparisons: Sequence[Comparison], measure: str, agents: str, y_label: str) -> Lines:
    """A measure by the level of heterogeneity of one family; `agents` are those that it measures."""
    found, levels = [measured(c) for c in comparisons], [c.plan.level for c in comparisons]
    shades = (BLUE, ORANGE, GREEN, PINK, GREY)
    present = [m for m in LEVELS if m in in_common(comparisons, measure)]
    series = tuple(
        Series(
            find_method(m).title,
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
    title, axis = f"{family}, {agents}", Axis("heterogeneity of the agents")
    return Lines(f"compare-{family}-{plain}", title, axis, y_label, series, seeds)


def summary(comparisons: Sequence[Comparison]) -> list[Plot]:
    """Figures of several comparisons together; the overview shows the last level of each family."""
    name = comparisons[0].plan.name if len(comparisons) == 1 else "all"
    shown = {c.plan.family or c.plan.name: c for c in comparisons}
    plots: list[Plot] = [overview(list(shown.values()))] if len(comparisons) > 1 else []
    unseen = unseen_measure(comparisons)
    for measure in [TRAINING] + ([unseen] if unseen else []):
        if in_common(comparisons, measure):
            agents = agents_of(measure)
            plots.append(ranks(f"compare-{name}-ranks-{agents.split()[0]}", f"Ranks, {agents}", comparisons, measure))
    levels: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        levels.setdefault(comparison.plan.family, []).append(comparison)
    for family, members in levels.items():
        if family:
            plots.append(by_level(members, GAP, agents_of(TRAINING), "distance to the agents' optimum"))
            plots += [by_level(members, unseen, agents_of(unseen), "return")] if unseen else []
    return [plot for plot in plots if not isinstance(plot, Lines) or plot.series]


def details(comparison: Comparison) -> list[Plot]:
    """The return of each method on one fleet, one figure per measure."""
    unseen = unseen_measure([comparison])
    measures = [TRAINING, unseen] if unseen else [TRAINING]
    return [plot for measure in measures if (plot := returns(comparison, measure)).ranges]
