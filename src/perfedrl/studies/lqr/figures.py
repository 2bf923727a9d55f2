"""Figures of the linear-quadratic study: unseen systems' cost above their optimum by round."""

from perfedrl.report.plots import BLUE, GREEN, GREY, PINK, Axis, Level, Lines, Plot, Series
from perfedrl.studies.lqr.study import AFTER, BEFORE, FLEETS, STEP, Outcomes, RelativeCosts

LABELS = {
    ("meta", AFTER): ("Per-FedAvg-PG, after one step", BLUE, False),
    ("meta", BEFORE): ("Per-FedAvg-PG, before", BLUE, True),
    ("fedavg", AFTER): ("FedAvg-PG, after one step", GREEN, False),
    ("fedavg", BEFORE): ("FedAvg-PG, before", GREEN, True),
}


def figures(found: Outcomes) -> list[Plot]:
    """One figure for each heterogeneity above zero."""
    return [gaps(f"lqr-{10 * epsilon:02.0f}", epsilon, outcome) for epsilon, outcome in found.items() if epsilon]


def gaps(name: str, epsilon: float, outcome: RelativeCosts) -> Lines:
    """Costs above the unseen systems' optima by round, divided by that of the average-optimal gain in the same fleet.

    Without the division the spread would mostly be that between fleets.
    """
    best = outcome.average_optimal
    unit = best[BEFORE]
    series = tuple(
        Series(label, outcome.rounds.astype(float), outcome.gaps[key] / unit[:, None], color, dashed)
        for key, (label, color, dashed) in LABELS.items()
    )
    levels = (
        Level("average-optimal gain", 1.0, GREY),
        Level("average-optimal gain, after one step", float((best[AFTER] / unit).mean()), PINK),
    )
    fleets = tuple(FLEETS[: len(unit)])
    title = f"Unseen linear systems, ε = {epsilon:g}, α = {STEP[epsilon]:g}"
    y_label = "gap (average-optimal gain: 1, optimum: 0)"
    axis = Axis("communication round k")
    return Lines(name, title, axis, y_label, series, fleets, levels)
