"""The figures of the linear-quadratic family: what unseen systems pay above their optimum, while training goes on."""

from perfedrl.report.plots import BLUE, GREEN, GREY, PINK, Axis, Level, Lines, Plot, Series
from perfedrl.studies.lqr import study as lqr_study

LABELS = {
    ("meta", lqr_study.AFTER): ("Per-FedAvg-PG, after one step", BLUE, False),
    ("meta", lqr_study.BEFORE): ("Per-FedAvg-PG, before", BLUE, True),
    ("fedavg", lqr_study.AFTER): ("FedAvg-PG, after one step", GREEN, False),
    ("fedavg", lqr_study.BEFORE): ("FedAvg-PG, before", GREEN, True),
}


def figures(found: lqr_study.Study) -> list[Plot]:
    """One for each level of heterogeneity but none."""
    return [gaps(f"lqr-{10 * epsilon:02.0f}", epsilon, outcome) for epsilon, outcome in found.items() if epsilon]


def gaps(name: str, epsilon: float, outcome: lqr_study.Outcome) -> Lines:
    """Costs above the unseen systems' optima by round, in units of what the best gain on average leaves in that fleet.

    Without the unit the spread would be that of the fleets.
    """
    best = outcome.average_optimal
    unit = best[lqr_study.BEFORE]
    series = tuple(
        Series(label, outcome.rounds.astype(float), outcome.gaps[key] / unit[:, None], color, dashed)
        for key, (label, color, dashed) in LABELS.items()
    )
    levels = (
        Level("average-optimal gain", 1.0, GREY),
        Level("average-optimal gain, after one step", float((best[lqr_study.AFTER] / unit).mean()), PINK),
    )
    fleets = tuple(lqr_study.FLEETS[: len(unit)])
    title = f"Unseen linear systems, ε = {epsilon:g}, α = {lqr_study.STEP[epsilon]:g}"
    y_label = "gap (average-optimal gain: 1, optimum: 0)"
    axis = Axis("communication round k")
    return Lines(name, title, axis, y_label, series, fleets, levels)
