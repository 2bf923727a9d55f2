"""Draw plots with matplotlib and save them as PNG and PDF, with the plotted numbers as CSV."""

import csv
import io
import textwrap
from collections.abc import Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Rectangle
from matplotlib.ticker import PercentFormatter

from perfedrl.experiments.files import write_atomically
from perfedrl.report import plots
from perfedrl.report.plots import BLUE, GREEN, GREY, MARKERS, ORANGE

MATPLOTLIB = {"circle": "o", "square": "s", "triangle-up": "^", "diamond": "D", "x": "x", "triangle-down": "v"}


@singledispatch
def draw(plot: plots.Plot) -> Figure:
    """Draw a plot with matplotlib, by the function for its kind."""
    raise TypeError(f"expected a plot, got {type(plot).__name__}")


@draw.register
def draw_lines(plot: plots.Lines) -> Figure:
    """Series over one axis, with levels and a legend below."""
    figure, axes = one_axes(6.4, 4.4)
    for series in plot.series:
        draw_series(axes, plot, series)
    for level in plot.levels:
        axes.axhline(level.value, color=level.color, linestyle=":", label=level.label)
    axes.set_title(plots.caption(plot), fontsize=10)
    axes.set_xlabel(plot.axis.label)
    axes.set_ylabel(plot.y_label)
    if plot.y_scale == "log":
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]) if lowest(plot) < 0 else 0)
    axes.margins(x=0.02)
    if plot.axis.ticks:
        axes.set_xticks(plot.axis.position(np.asarray(plot.axis.ticks)), [f"{x:g}" for x in plot.axis.ticks])
    if plot.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1.02)  # so that a marker at 1 is not cut
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # Outside the axes the legend does not cover data.
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def draw_series(axes: Axes, plot: plots.Lines, series: plots.Series) -> None:
    """One series: its line with a band, or its median with a point per seed."""
    x, middle = plot.axis.position(series.x), series.middle
    style: dict[str, Any] = {"color": series.color, "linestyle": "--" if series.dashed else "-", "linewidth": 1.6}
    marker: dict[str, Any] = {} if series.dashed else {"marker": MATPLOTLIB[MARKERS[series.color]], "markersize": 5}
    axes.plot(x, middle, markevery=max(1, len(x) // 8), label=series.label, **style, **marker)
    if series.centre == "median":
        for values in series.values:
            axes.plot(x, values, "o", color=series.color, alpha=0.3, markersize=4, markeredgewidth=0)
        return
    low, high = plots.band(plot, series)
    axes.fill_between(x, low, high, color=series.color, alpha=0.18, linewidth=0)


@draw.register
def draw_pairs(plot: plots.Pairs) -> Figure:
    """Bounds and realized values, one pair per line."""
    figure, axes = one_axes(7.2, 1.1 + 0.3 * len(plot.pairs))
    at = np.arange(len(plot.pairs))
    bound, realized = np.asarray([(pair.bound, pair.realized) for pair in plot.pairs]).T
    axes.hlines(at, np.minimum(bound, realized), np.maximum(bound, realized), color=GREY, alpha=0.4, linewidth=1)
    axes.plot(bound, at, "x", color=GREY, label="bound", markersize=6)
    axes.plot(realized, at, "o", color=BLUE, label="realized", markersize=5)
    axes.set_xscale("log")
    label_rows(axes, [pair.label for pair in plot.pairs], plot.x_label)
    axes.set_title(plot.title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


@draw.register
def draw_strips(plot: plots.Strips) -> Figure:
    """Rows of points with their medians."""
    figure, axes = one_axes(7.2, 1.4 + 0.32 * len(plot.strips))
    for y, strip in enumerate(plot.strips):
        axes.plot(strip.values, np.full(len(strip.values), y), "o", color=strip.color, alpha=0.4, markersize=5, mew=0)
        axes.plot(strip.middle, y, "|", color="black", markersize=13, markeredgewidth=2)
    for level in plot.levels:
        axes.axvline(level.value, color=level.color, linestyle=":", label=level.label)
    axes.set_xlim(left=min(0.0, *(float(strip.values.min()) for strip in plot.strips)))
    label_rows(axes, [strip.label for strip in plot.strips], plot.x_label)
    figure.suptitle(plots.caption(plot), fontsize=10)
    if plot.levels:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


@draw.register
def draw_ranges(plot: plots.Ranges) -> Figure:
    """Values with intervals, one per line."""
    figure, axes = one_axes(7.2, 1.5 + 0.26 * len(plot.ranges))
    for y, line in enumerate(plot.ranges):
        axes.plot([line.low, line.high], [y, y], color=line.color, linewidth=2.4, alpha=0.5, solid_capstyle="butt")
        axes.plot(line.value, y, "o", color=line.color, markersize=5)
    label_rows(axes, [line.label for line in plot.ranges], plot.x_label)
    figure.suptitle(plot.title, fontsize=10)
    if plot.note:
        figure.supxlabel(textwrap.fill(plot.note, 100), fontsize=8, color=GREY)
    return figure


@draw.register
def draw_heat_map(plot: plots.HeatMap) -> Figure:
    """A table of colours with the numbers in it."""
    n = len(plot.labels)
    figure, axes = one_axes(3.2 + 0.42 * n, 2.0 + 0.38 * n)
    picture = axes.imshow(plot.values, cmap="Blues", vmin=0, vmax=1)
    for (i, j), x in np.ndenumerate(plot.values):
        axes.text(j, i, f"{x:.0%}", ha="center", va="center", fontsize=7, color="white" if x > 0.5 else "black")
    first = -0.5
    for size in plot.groups:
        axes.add_patch(Rectangle((first, first), size, size, fill=False, edgecolor=ORANGE, linewidth=2))
        first += size
    axes.set_yticks(range(n), plot.labels, fontsize=8)
    axes.set_xticks(range(n), [label.partition(":")[0] for label in plot.labels], fontsize=8)
    axes.set_ylabel(plot.row_label)
    axes.set_xlabel(plot.column_label)
    figure.colorbar(picture, ax=axes, format=PercentFormatter(1.0), shrink=0.8)
    figure.suptitle(textwrap.fill(plot.title, 60), fontsize=10)
    return figure


def one_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure of a size in inches, and its only axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def label_rows(axes: Axes, labels: Sequence[str], x_label: str) -> None:
    """Label the rows 0, 1, ... of a figure from the top, and the axis of their values."""
    axes.set_yticks(np.arange(len(labels)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.25, linewidth=0.6, axis="x")
    axes.spines[["top", "right"]].set_visible(False)


@draw.register
def draw_dots(plot: plots.Dots) -> Figure:
    """Labelled lines with one panel per quantity."""
    # Space between panels, so that the last tick label of one does not touch the first of the next.
    layout = ConstrainedLayoutEngine(wspace=0.06)
    figure = Figure(figsize=(3.6 + 2.6 * len(plot.panels), 1.5 + 0.3 * len(plot.labels)), layout=layout)
    FigureCanvasAgg(figure)
    all_axes = np.ravel(figure.subplots(1, len(plot.panels), sharey=True))
    for axes, panel in zip(all_axes, plot.panels, strict=True):
        draw_marks(axes, panel)
    all_axes[0].set_yticks(np.arange(len(plot.labels)), plot.labels, fontsize=8)
    all_axes[0].set_ylim(len(plot.labels) - 0.5, -0.5)
    handles, labels = all_axes[0].get_legend_handles_labels()
    if any(marks.limit.any() for panel in plot.panels for marks in panel.marks):
        handles.append(Line2D([], [], color=GREY, marker="<", markerfacecolor="white", linestyle=""))
        labels.append("upper limit (within noise)")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle(plot.title, fontsize=10)
    return figure


def draw_marks(axes: Axes, panel: plots.DotPanel) -> None:
    """The marks of one panel."""
    for i, marks in enumerate(panel.marks):
        # Series are offset vertically within a line, so that equal values do not hide each other.
        at = np.arange(len(marks.values)) + 0.22 * (i - (len(panel.marks) - 1) / 2)
        exact, limits = ~marks.limit, marks.limit
        style: dict[str, Any] = {"color": marks.color, "linestyle": "", "markersize": 4.5}
        marker = MATPLOTLIB[MARKERS[marks.color]]
        axes.plot(marks.values[exact], at[exact], marker=marker, label=marks.label, **style)
        axes.plot(marks.values[limits], at[limits], marker="<", markerfacecolor="white", **style)
    axes.set_xscale(panel.scale)
    if panel.scale == "linear":
        axes.set_xlim(left=0)
    if panel.compare is not None:
        axes.axvline(panel.compare, color=GREY, linestyle=":", linewidth=1)
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


@draw.register
def draw_rollouts(plot: plots.Rollouts) -> Figure:
    """Panels of episodes side by side."""
    figure = Figure(figsize=(3.2 * len(plot.panels), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = np.ravel(figure.subplots(1, len(plot.panels), sharey=True))
    for axes, panel in zip(all_axes, plot.panels, strict=True):
        draw_panel(axes, panel, plot.edge)
    all_axes[0].set_ylabel("y")
    figure.suptitle(plot.title, fontsize=10)
    return figure


def draw_panel(axes: Axes, panel: plots.Panel, edge: float) -> None:
    """Episodes around one goal; those that miss it are dotted."""
    axes.add_patch(Circle(tuple(panel.goal), panel.radius, color=GREEN, alpha=0.2, linewidth=0))
    for e, reach in enumerate(panel.first_reach):
        path = panel.path(e)
        missed = reach == panel.paths.shape[1]
        axes.plot(*path.T, color=GREY if missed else BLUE, linestyle=":" if missed else "-", linewidth=1)
        axes.plot(*path[0], "o", color="black", markersize=3)
    axes.plot(*panel.goal, "*", color=GREEN, markersize=12)
    axes.set(xlim=(-edge, edge), ylim=(-edge, edge), aspect="equal", xlabel="x")
    axes.set_title(panel.caption, fontsize=9)


def lowest(plot: plots.Lines) -> float:
    """The smallest value of a plot."""
    return min([float(s.values.min()) for s in plot.series] + [level.value for level in plot.levels])


def save(plot: plots.Plot, folder: str | Path) -> list[Path]:
    """Write a plot as PNG and PDF and its numbers as CSV; equal numbers give equal bytes."""
    figure, stem = draw(plot), str(Path(folder) / plot.name)
    written = []
    for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None})):
        written.append((Path(stem + suffix), image(figure, suffix, metadata)))
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    header, body = plots.rows(plot)
    writer.writerow(header)
    writer.writerows(body)
    written.append((Path(stem + ".csv"), table.getvalue().encode()))
    for path, content in written:
        write_atomically(path, content)
    return [path for path, _ in written]


def image(figure: Figure, suffix: str = ".png", metadata: dict | None = None) -> bytes:
    """The bytes of an image file of a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:], dpi=160, metadata=metadata or {"Software": None})
    return buffer.getvalue()
