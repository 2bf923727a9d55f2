"""The paper's figures as functions of saved runs: PNG and PDF, with the plotted numbers beside them as CSV."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from perfedrl.experiments.paper import ALPHAS, VARIANTS, Runs, final
from perfedrl.experiments.store import write_atomically

# The Okabe-Ito colours, told apart in all common forms of colour blindness, each with its own marker and dashes.
STYLE: dict[str, dict[str, Any]] = {
    "exact": {"color": "#0072B2", "marker": "o", "label": "Per-FedAvg-PG, exact"},
    "first-order": {"color": "#E69F00", "marker": "s", "label": "Per-FedAvg-PG, first-order"},
    "fedavg-pg": {"color": "#009E73", "marker": "^", "label": "FedAvg-PG"},
}
GREY = "#555555"

Row = tuple[str, float, float, float]
"""A plotted point: series, x, mean over seeds, standard deviation over seeds."""


def personalization(runs: Runs, axes: Axes) -> list[Row]:
    """Figure "Tabular gridworld", left: F against trajectories per agent."""
    rows = []
    for variant in VARIANTS:
        history = runs[variant, 2.0].history
        rows += band(axes, variant, history.trajectories, history.after.mean(axis=-1), STYLE[variant])
    exact = runs["exact", 2.0].history
    before = {"color": STYLE["exact"]["color"], "linestyle": "--", "label": "exact, before adaptation"}
    rows += band(axes, "exact before adaptation", exact.trajectories, exact.before.mean(axis=-1), before)
    uniform = float(exact.before[:, 0].mean())
    axes.axhline(uniform, color=GREY, linestyle=":", label="uniform policy")
    axes.set_xlabel("trajectories per agent")
    axes.set_ylabel("expected return, mean over agents")
    return [*rows, ("uniform policy", float("nan"), uniform, 0.0)]


def step_size(runs: Runs, axes: Axes) -> list[Row]:
    """Figure "Tabular gridworld", right: final F against the adaptation step size."""
    rows = []
    for variant in VARIANTS:
        values = np.stack([final(runs[variant, alpha].history.after) for alpha in ALPHAS], axis=1)
        rows += band(axes, variant, np.asarray(ALPHAS), values, STYLE[variant])
    axes.set_xlabel("adaptation step size α")
    axes.set_ylabel("return after adaptation, F")
    return rows


def learning_curves(runs: Runs, axes: Axes) -> list[Row]:
    """Figure "Learning curves": F against communication rounds."""
    rows = []
    for variant in VARIANTS:
        history = runs[variant, 2.0].history
        rows += band(axes, variant, history.rounds, history.after.mean(axis=-1), STYLE[variant])
    axes.set_xlabel("communication round k")
    axes.set_ylabel("return after adaptation, F")
    return rows


FIGURES: Mapping[str, Callable[[Runs, Axes], list[Row]]] = MappingProxyType(
    {"e1": personalization, "e3": step_size, "e6": learning_curves}
)


def draw(experiment: str, title: str, runs: Runs, folder: str | Path) -> list[Path]:
    """Draw an experiment's figure from its runs; return the files written: PNG, PDF and CSV."""
    return save(*figure_of(experiment, title, runs), Path(folder) / experiment)


def figure_of(experiment: str, title: str, runs: Runs) -> tuple[Figure, list[Row]]:
    """An experiment's figure and the points in it."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = FIGURES[experiment](runs, axes)
    seeds = len(next(iter(runs.values())).history.seeds)
    axes.set_title(f"{title}: mean ± 1 s.d. of {seeds} seeds" if seeds > 1 else f"{title}: one seed", fontsize=10)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # Outside the axes the legend cannot cover data.
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure, rows


def band(axes: Axes, series: str, x: np.ndarray, values: np.ndarray, style: Mapping[str, Any]) -> list[Row]:
    """A mean line over seeds with a band of one standard deviation."""
    mean, deviation = values.mean(axis=0), values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(x))
    every = max(1, len(x) // 8)
    axes.plot(x, mean, markevery=every, markersize=5, linewidth=1.6, **style)
    axes.fill_between(x, mean - deviation, mean + deviation, color=style["color"], alpha=0.18, linewidth=0)
    return [(series, float(a), float(b), float(c)) for a, b, c in zip(x, mean, deviation, strict=True)]


def save(figure: Figure, rows: Iterable[Sequence], stem: Path) -> list[Path]:
    """Write a figure as PNG and PDF and its numbers as CSV; the same numbers give the same bytes."""
    written = []
    for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix[1:], dpi=160, metadata=metadata)
        written.append((stem.with_suffix(suffix), buffer.getvalue()))
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("series", "x", "mean", "sd"))
    writer.writerows(rows)
    written.append((stem.with_suffix(".csv"), table.getvalue().encode()))
    for path, content in written:
        write_atomically(path, content)
    return [path for path, _ in written]
