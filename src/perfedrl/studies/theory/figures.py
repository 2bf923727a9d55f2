"""Figures of the theory: each bound with the quantity that it bounds."""

from collections.abc import Sequence

import numpy as np

from perfedrl.report.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    Axis,
    BoundPair,
    Level,
    Lines,
    Pairs,
    Plot,
    Series,
    exact_series,
)
from perfedrl.studies.theory.study import ACCURACY, SEEDS, SLOPE_FROM, Curve, TheoryMeasurements
from perfedrl.theory.estimate import Batches
from perfedrl.theory.realized_bounds import RealizedBound

BATCH_LABELS = {"m_in": ("inner batch", BLUE), "m_h": ("curvature batch", ORANGE), "m_out": ("outer batch", GREEN)}


def figures(found: TheoryMeasurements) -> list[Plot]:
    """All figures, in the order of the paper."""
    return [
        pairs("theory-realized", "Bounds and realized values, gridworld, α = 2", found.realized),
        bias(found),
        second_moment(found),
        drift(found),
        convergence(found),
        residual(found),
        objectives(found),
        small_adaptation(found),
        rounds(found),
        trajectories(found),
    ]


def pairs(name: str, title: str, rows: Sequence[RealizedBound]) -> Pairs:
    """Bounds and realized values; values of zero are left out."""
    shown = tuple(BoundPair(f"{row.what}  [{row.where}]", row.bound, row.realized) for row in rows if row.realized > 0)
    return Pairs(name, title, "value (each in its own unit)", shown)


def bias(found: TheoryMeasurements) -> Lines:
    """Prop. 1: the exact bias by inner batch, with its two bounds."""
    c = found.bias
    fitted = {name: c[name].above(SLOPE_FROM).slope for name in ("nothing", "inner")}
    series = (
        line(f"Lemma 3's bound, slope {c['crude'].slope:.2f}", c["crude"], GREY, dashed=True),
        line(f"Prop. 1 at the true variance, slope {c['sharp'].slope:.2f}", c["sharp"], PINK, dashed=True),
        line(f"bias, slope {fitted['nothing']:.2f}", c["nothing"], BLUE),
        line(f"curvature from the inner batch, slope {fitted['inner']:.2f}", c["inner"], GREEN),
        line("curvature from the outer batch, levels off", c["outer"], ORANGE),
    )
    title = "Bias of the estimate (three-armed bandit, α = 2, exact)"
    return log_log(
        "theory-bias", title, axis("batch size m (trajectories)", c["nothing"].x), "norm of the bias", series
    )


def second_moment(found: TheoryMeasurements) -> Lines:
    """Lemma 3(iii): the exact mean squared error by the size of each batch."""
    c = found.second_moment
    bounds = (line(f"{label}, bound", c[f"{b}, bound"], color, True) for b, (label, color) in BATCH_LABELS.items())
    measured = (line(label, c[b], color) for b, (label, color) in BATCH_LABELS.items())
    title = "Error by one batch, the others 64 (three-armed bandit, α = 2, exact)"
    at = axis("batch size (trajectories)", c[Batches._fields[0]].x)
    return log_log("theory-second-moment", title, at, "mean squared error", (*measured, *bounds))


def residual(found: TheoryMeasurements) -> Lines:
    """Prop. 2: the meta-gradient at first-order fixed points by alpha."""
    c = found.residual
    series = (
        line("Prop. 2's bound α L_J G_J", c["bound"], GREY, dashed=True),
        line("the paper's witness (repelling)", c["witness"], BLUE),
        line("rewards 1 − r (attracting)", c["attracting"], ORANGE),
    )
    at = Axis("adaptation step size α", "log", ticks=(1e-4, 1e-3, 1e-2, 1e-1, 1.0))
    return log_log("theory-residual", "Meta-gradient at first-order fixed points", at, "|∇F(θ*)|", series)


def drift(found: TheoryMeasurements) -> Lines:
    """Lemma 4: client drift by local step."""
    c = found.drift
    series = (
        line("Lemma 4's bound β t G_F", c["bound"], GREY, dashed=True),
        line("longest way from the round's start", c["way"], BLUE),
        line("root mean squared distance from the average", c["apart"], GREEN),
    )
    title = "Client drift, largest of 10 rounds (gridworld, α = 2, β = 0.3)"
    at = Axis("local step t", ticks=(1.0, 5.0, 10.0, 15.0, 20.0))
    return log_log("theory-drift", title, at, "distance", series)


def convergence(found: TheoryMeasurements) -> Lines:
    """Theorem 1 along runs with the planner's settings."""
    c = found.convergence
    series = []
    for name, color in (("tau = 1", BLUE), ("tau = 4", ORANGE)):
        label = name.replace("tau", "τ")
        series.append(line(f"measured, {label}", c[name], color))
        series.append(line(f"Theorem 1, {label}", c[f"{name}, bound"], color, dashed=True))
    at = Axis("communication round k", "log", ticks=(1.0, 10.0, 100.0, 1e3, 1e4))
    seeds = tuple(range(SEEDS))
    title = "Runs by the planner for ε = 0.1"
    levels, y_label = (Level("the accuracy asked for", ACCURACY),), "mean |∇F|² up to round k"
    return Lines("theory-convergence", title, at, y_label, tuple(series), seeds, levels, y_scale="log")


def objectives(found: TheoryMeasurements) -> Lines:
    """F and f by alpha, at the uniform policy and at trained parameters."""
    c = found.objectives
    series = []
    for name, label, color in (("trained", "trained for α = 2", BLUE), ("uniform", "uniform policy", GREEN)):
        before = Curve(c[name].x, np.full(len(c[name].x), c[name].y[0]))
        series.append(line(f"F, {label}", c[name], color))
        series.append(line(f"f, {label}", before, color, dashed=True))
    at = Axis("adaptation step size α")
    title = "Return before (f) and after (F) adaptation, gridworld"
    return Lines("theory-objectives", title, at, "expected return, mean over agents", tuple(series), ())


def small_adaptation(found: TheoryMeasurements) -> Lines:
    """Prop. 3: the distance of F from f by alpha."""
    c = found.small_adaptation
    series = (
        line("|F − f|", c["value"], BLUE),
        line("|∇F − ∇f|", c["gradient"], ORANGE),
        line("bound α G_J²", c["value, bound"], BLUE, dashed=True),
        line("bound 2 α L_J G_J", c["gradient, bound"], ORANGE, dashed=True),
    )
    at = axis("adaptation step size α", c["value"].x)
    return log_log("theory-small-alpha", "F tends to f (gridworld, trained)", at, "distance", series)


def rounds(found: TheoryMeasurements) -> Lines:
    """Planned rounds by accuracy."""
    return by_accuracy("theory-rounds", "Rounds that the theory asks for (two bandits)", "rounds K", found.rounds)


def trajectories(found: TheoryMeasurements) -> Lines:
    """Planned trajectories by accuracy."""
    title = "Trajectories that the theory asks for (two bandits)"
    return by_accuracy("theory-trajectories", title, "trajectories per agent", found.trajectories)


def by_accuracy(name: str, title: str, y_label: str, curves: dict[str, Curve]) -> Lines:
    """A quantity of three plans by accuracy, with fitted slopes."""
    labels = {"crude": ("Corollary 1, crude bias", BLUE, False), "sharp": ("Corollary 1, sharp bias", ORANGE, True)}
    labels["cheapest"] = ("cheapest plan", GREEN, False)
    series = tuple(
        line(f"{label}, slope {curves[key].slope:.2f}", curves[key], color, dashed)
        for key, (label, color, dashed) in labels.items()
    )
    return log_log(name, title, axis("accuracy ε", curves["crude"].x), y_label, series)


def log_log(name: str, title: str, at: Axis, y_label: str, series: Sequence[Series]) -> Lines:
    """A figure of exact lines with a logarithmic y axis."""
    return Lines(name, title, at, y_label, tuple(series), (), y_scale="log")


def line(label: str, curve: Curve, color: str, dashed: bool = False) -> Series:
    """A curve as a line of a figure."""
    return exact_series(label, curve.x, curve.y, color, dashed)


def axis(label: str, at: np.ndarray) -> Axis:
    """A logarithmic axis with a tick at every point."""
    return Axis(label, "log", ticks=tuple(float(x) for x in at))
