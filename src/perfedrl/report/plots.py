"""Figures as data: `static.py` draws them as image files, `interactive.py` for a browser."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Real

from perfedrl.envs.navigation import first_reach
from perfedrl.types import Array

# The Okabe-Ito colours, distinguishable with all common forms of colour blindness.
BLUE, ORANGE, GREEN, PINK, GREY, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#555555", "#56B4E9"
MARKERS = {BLUE: "circle", ORANGE: "square", GREEN: "triangle-up", PINK: "diamond", GREY: "x", SKY: "triangle-down"}


@dataclass(frozen=True)
class Series:
    """A line over x: the mean over seeds with a band of one standard deviation, or the median with a point per seed."""

    label: str
    x: Real[np.ndarray, " x"]
    values: Real[np.ndarray, "seed x"]
    color: str
    dashed: bool = False
    centre: Literal["mean", "median"] = "mean"

    @property
    def middle(self) -> Float[np.ndarray, " x"]:
        """The mean or median over seeds."""
        return self.values.mean(axis=0) if self.centre == "mean" else np.median(self.values, axis=0)

    @property
    def deviation(self) -> Float[np.ndarray, " x"]:
        """The standard deviation over seeds; zero for one seed."""
        return self.values.std(axis=0, ddof=1) if len(self.values) > 1 else np.zeros(len(self.x))


def exact_series(label: str, x: np.ndarray, y: np.ndarray, color: str, dashed: bool = False) -> Series:
    """A line of exact numbers, which have no seeds."""
    return Series(label, np.asarray(x, float), np.atleast_2d(y), color, dashed)


@dataclass(frozen=True)
class Level:
    """A horizontal line."""

    label: str
    value: float
    color: str = GREY


@dataclass(frozen=True)
class Axis:
    """The horizontal axis. A logarithmic axis with `linear_to` > 0 is linear near 0, so that it can show 0."""

    label: str
    scale: Literal["linear", "log"] = "linear"
    linear_to: float = 0.0
    ticks: tuple[float, ...] = ()

    def position(self, x: Real[np.ndarray, " x"]) -> Float[np.ndarray, " x"]:
        """The position of x on the axis."""
        x = np.asarray(x, dtype=float)
        if self.scale == "linear":
            return x
        return np.arcsinh(x / self.linear_to) if self.linear_to else np.log10(x)

    @staticmethod
    def budgets(label: str, at: Iterable[Any]) -> "Axis":
        """A logarithmic axis of trajectories that also shows 0."""
        return Axis(label, "log", linear_to=20.0, ticks=tuple(float(x) for x in at))


@dataclass(frozen=True)
class Lines:
    """Series over one x axis, all with the same seeds; no seeds means exact numbers."""

    name: str
    title: str
    axis: Axis
    y_label: str
    series: tuple[Series, ...]
    seeds: tuple[int, ...]
    levels: tuple[Level, ...] = ()
    percent: bool = False
    y_scale: Literal["linear", "log"] = "linear"


@dataclass(frozen=True)
class Panel:
    """Episodes in the plane with one goal."""

    title: str
    paths: Float[Array, "episode T 2"]
    goal: Float[Array, " 2"]
    radius: Any

    @property
    def first_reach(self) -> Any:
        """The step at which each episode first is in the goal region, or the episode's length."""
        return first_reach(np.asarray(self.paths), np.asarray(self.goal), self.radius)

    @property
    def reached(self) -> int:
        return int((self.first_reach < self.paths.shape[1]).sum())

    @property
    def caption(self) -> str:
        return f"{self.title}\n{self.reached} of {len(self.paths)} reach the goal"

    def path(self, episode: int) -> Float[Array, "t 2"]:
        """An episode up to its first step in the goal region."""
        return self.paths[episode, : self.first_reach[episode] + 1]


@dataclass(frozen=True)
class Rollouts:
    """Panels of episodes side by side, in the box [-box, box]^2."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    box: Any

    @property
    def edge(self) -> float:
        """Half the width of all panels: at least the box, more where episodes leave it."""
        return 1.03 * max(self.box, *(float(np.abs(panel.paths).max()) for panel in self.panels))


class BoundPair(NamedTuple):
    """A bound and the realized value."""

    label: str
    bound: float
    realized: float


@dataclass(frozen=True)
class Pairs:
    """Bounds and realized values, one pair per line, on a logarithmic axis."""

    name: str
    title: str
    x_label: str
    pairs: tuple[BoundPair, ...]


@dataclass(frozen=True)
class Strip:
    """One row of points, a value per seed."""

    label: str
    values: Real[np.ndarray, " seed"]
    color: str = BLUE

    @property
    def middle(self) -> float:
        return float(np.median(self.values))


@dataclass(frozen=True)
class Strips:
    """Rows of points, each with its median, on one horizontal axis that starts at 0."""

    name: str
    title: str
    x_label: str
    strips: tuple[Strip, ...]
    seeds: tuple[int, ...]
    levels: tuple[Level, ...] = ()


@dataclass(frozen=True)
class Marks:
    """A value on each line of a panel, nan for none; `limit` marks upper limits."""

    label: str
    values: Real[np.ndarray, " line"]
    color: str
    limit: Bool[np.ndarray, " line"]


@dataclass(frozen=True)
class DotPanel:
    """Marks on one axis, with an optional reference value `compare`."""

    x_label: str
    marks: tuple[Marks, ...]
    scale: Literal["linear", "log"] = "log"
    compare: float | None = None


@dataclass(frozen=True)
class Dots:
    """Labelled lines with one measured quantity per panel, panels side by side."""

    name: str
    title: str
    labels: tuple[str, ...]
    panels: tuple[DotPanel, ...]


class Range(NamedTuple):
    """A value with its interval."""

    label: str
    value: float
    low: float
    high: float
    color: str = BLUE


@dataclass(frozen=True)
class Ranges:
    """Values with their intervals, one per line, the first on top; `note` explains the intervals."""

    name: str
    title: str
    x_label: str
    ranges: tuple[Range, ...]
    note: str = ""


@dataclass(frozen=True)
class HeatMap:
    """A table of numbers from 0 to 1 as colours, with a line around each group of neighbouring rows and columns."""

    name: str
    title: str
    row_label: str
    column_label: str
    labels: tuple[str, ...]
    values: Float[np.ndarray, "row column"]
    groups: tuple[int, ...] = ()
    """The sizes of the groups, in order; empty for none."""


Plot = Lines | Rollouts | Pairs | Strips | Dots | Ranges | HeatMap


def caption(plot: Plot) -> str:
    """The title of a plot, and what its points, lines and bands are over the seeds."""
    if isinstance(plot, Strips):
        return f"{plot.title}: {len(plot.seeds)} seeds and their median"
    if not isinstance(plot, Lines) or not plot.seeds:
        return plot.title
    seeds = max(len(series.values) for series in plot.series)
    if seeds == 1:
        return f"{plot.title}: one seed"
    if plot.series[0].centre == "median":
        return f"{plot.title}: {seeds} seeds and their median"
    within = ", in [0, 1]" if plot.percent else ""
    return f"{plot.title}: mean ± 1 s.d. of {seeds} seeds{within}"


def band(plot: Lines, series: Series) -> tuple[Float[np.ndarray, " x"], Float[np.ndarray, " x"]]:
    """The band of one standard deviation around a mean, within 0 and 1 for shares; `caption` names it."""
    low, high = series.middle - series.deviation, series.middle + series.deviation
    return (np.clip(low, 0, 1), np.clip(high, 0, 1)) if plot.percent else (low, high)


def rows(plot: Plot) -> tuple[tuple[str, ...], list[tuple]]:
    """The numbers of a plot as the header and the rows of a table."""
    if isinstance(plot, Dots):
        return ("line", "panel", "series", "value", "upper limit"), [
            (label, panel.x_label, marks.label, float(value), "yes" if limit else "no")
            for panel in plot.panels
            for marks in panel.marks
            for label, value, limit in zip(plot.labels, marks.values, marks.limit, strict=True)
        ]
    if isinstance(plot, Ranges):
        return ("line", "value", "low", "high"), [tuple(r[:4]) for r in plot.ranges]
    if isinstance(plot, HeatMap):
        return (plot.row_label, plot.column_label, "value"), [
            (row, column, float(plot.values[i, j]))
            for i, row in enumerate(plot.labels)
            for j, column in enumerate(plot.labels)
        ]
    if isinstance(plot, Pairs):
        return ("quantity", "bound", "realized"), [tuple(pair) for pair in plot.pairs]
    if isinstance(plot, Strips):
        return ("strip", "seed", "value"), [
            (strip.label, seed, float(x))
            for strip in plot.strips
            for seed, x in zip(plot.seeds, strip.values, strict=True)
        ]
    if isinstance(plot, Rollouts):
        return ("panel", "episode", "step", "x", "y"), [
            (panel.title, e, t, float(x), float(y))
            for panel in plot.panels
            for e in range(len(panel.paths))
            for t, (x, y) in enumerate(panel.path(e))
        ]
    header = ("series", "x", "mean", "sd", "median", "seeds")
    table: list[tuple] = [
        (s.label, float(x), float(v.mean()), float(d), float(np.median(v)), len(v))
        for s in plot.series
        for x, v, d in zip(s.x, s.values.T, s.deviation, strict=True)
    ]
    return header, table + [(level.label, "", level.value, 0.0, level.value, "") for level in plot.levels]
