"""Draw plots with plotly for a browser, with the value of each seed on hover."""

from functools import singledispatch
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from perfedrl.report import plots
from perfedrl.report.plots import BLUE, GREEN, GREY, MARKERS, ORANGE

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MOST_SEEDS = 12
"""The largest number of seeds that a hover box lists; for more seeds it shows the range."""


def draw(plot: plots.Plot) -> go.Figure:
    """Draw a plot with plotly."""
    figure = draw_traces(plot)
    figure.update_layout(template="plotly_white", font={"family": FONT, "size": 13}, hoverlabel={"align": "left"})
    return figure


@singledispatch
def draw_traces(plot: plots.Plot) -> go.Figure:
    """Draw the traces of a plot, by the function for its kind."""
    raise TypeError(f"expected a plot, got {type(plot).__name__}")


@draw_traces.register
def draw_lines(plot: plots.Lines) -> go.Figure:
    """Series over one axis, with levels."""
    figure = go.Figure()
    for series in plot.series:
        figure.add_traces(band(plot, series) if series.centre == "mean" else seeds(plot, series))
        figure.add_trace(line(plot, series))
    left, right = plot.axis.position(
        np.asarray([min(s.x.min() for s in plot.series), max(s.x.max() for s in plot.series)], float)
    )
    for level in plot.levels:
        # Many points, so that the line shows its hover box anywhere.
        x = np.linspace(left, right, 60)
        style = {"color": level.color, "dash": "dot", "width": 2}
        hover = f"{level.label}: {show(plot, level.value)}<extra></extra>"
        y = np.full(len(x), level.value)
        figure.add_scatter(x=x, y=y, mode="lines", name=level.label, line=style, hovertemplate=hover)
    figure.update_xaxes(title=plot.axis.label, zeroline=False)
    if plot.axis.ticks:
        figure.update_xaxes(
            tickvals=plot.axis.position(np.asarray(plot.axis.ticks)), ticktext=[f"{x:g}" for x in plot.axis.ticks]
        )
    if plot.y_scale == "log":
        values = np.concatenate([np.ravel(series.values) for series in plot.series])
        decades = np.ptp(np.log10(values[values > 0]))
        every = max(1, round(decades / 8))  # by default plotly also labels 2 and 5 within a decade
        figure.update_yaxes(title=plot.y_label, type="log", exponentformat="power", dtick=every)
    else:
        figure.update_yaxes(title=plot.y_label, rangemode="tozero", tickformat=".0%" if plot.percent else None)
    figure.update_layout(height=440, margin={"l": 70, "r": 20, "t": 20, "b": 60}, hovermode="closest")
    figure.update_layout(legend={"orientation": "h", "y": -0.22, "x": 0, "traceorder": "normal"})
    return figure


def line(plot: plots.Lines, series: plots.Series) -> go.Scatter:
    """The mean or median line; its hover box lists the seeds."""
    texts = [hover_text(plot, series, i) for i in range(len(series.x))]
    return go.Scatter(
        x=plot.axis.position(series.x),
        y=series.middle,
        mode="lines" if series.dashed else "lines+markers",
        name=series.label,
        line={"color": series.color, "dash": "dash" if series.dashed else "solid", "width": 2.5},
        marker={"symbol": MARKERS[series.color], "size": 7},
        customdata=texts,
        hovertemplate="%{customdata}<extra></extra>",
    )


def hover_text(plot: plots.Lines, series: plots.Series, i: int) -> str:
    """The text of a hover box: mean or median, standard deviation, and seeds or their range."""
    values = series.values[:, i]
    lines = [f"<b>{series.label}</b>", f"{plain(plot.axis.label)}: {series.x[i]:g}"]
    middle = show(plot, float(series.middle[i]))
    exact = len(values) != len(plot.seeds)
    lines.append(f"{plain(plot.y_label)}: {middle}" if exact else f"{series.centre} of {len(values)} seeds: {middle}")
    if len(values) > 1:
        lines.append(f"standard deviation: {show(plot, float(series.deviation[i]))}")
    if 1 < len(values) <= MOST_SEEDS:
        lines += [f"seed {s}: {show(plot, float(x))}" for s, x in zip(plot.seeds, values, strict=True)]
    elif len(values) > MOST_SEEDS:
        lines.append(f"from {show(plot, float(values.min()))} to {show(plot, float(values.max()))}")
    return "<br>".join(lines)


def band(plot: plots.Lines, series: plots.Series) -> list[go.Scatter]:
    """A band of one standard deviation to both sides."""
    x, (low, high) = plot.axis.position(series.x), plots.band(plot, series)
    shared: dict[str, Any] = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    lower = go.Scatter(x=x, y=low, **shared)
    return [lower, go.Scatter(x=x, y=high, fill="tonexty", fillcolor=faint(series.color), **shared)]


def seeds(plot: plots.Lines, series: plots.Series) -> list[go.Scatter]:
    """A point per seed."""
    x = plot.axis.position(series.x)
    return [
        go.Scatter(
            x=x,
            y=values,
            mode="markers",
            marker={"color": series.color, "opacity": 0.35, "size": 7},
            name=f"seed {seed}",
            showlegend=False,
            hovertemplate=f"seed {seed}: %{{y:.3f}}<extra></extra>",
        )
        for seed, values in zip(plot.seeds, series.values, strict=True)
    ]


@draw_traces.register
def draw_pairs(plot: plots.Pairs) -> go.Figure:
    """Bounds and realized values, one pair per line."""
    figure = go.Figure()
    labels = [pair.label for pair in plot.pairs]
    for pair in plot.pairs:
        style = {"color": faint(GREY), "width": 2}
        x, y = [pair.realized, pair.bound], [pair.label] * 2
        figure.add_scatter(x=x, y=y, mode="lines", line=style, hoverinfo="skip", showlegend=False)
    for name, color in (("bound", GREY), ("realized", BLUE)):
        figure.add_scatter(
            x=[getattr(pair, name) for pair in plot.pairs],
            y=labels,
            mode="markers",
            name=name,
            marker={"color": color, "symbol": MARKERS[color], "size": 8},
            hovertemplate=f"%{{y}}<br>{name}: %{{x:.3g}}<extra></extra>",
        )
    figure.update_xaxes(title=plot.x_label, type="log", exponentformat="power")
    arrange(figure, 120 + 28 * len(labels), top=20, bottom=60)
    return figure.update_layout(legend={"orientation": "h", "y": -0.15, "x": 0})


@draw_traces.register
def draw_strips(plot: plots.Strips) -> go.Figure:
    """Rows of points with their medians."""
    figure = go.Figure()
    for strip in plot.strips:
        figure.add_scatter(
            x=strip.values,
            y=[strip.label] * len(strip.values),
            mode="markers",
            marker={"color": strip.color, "opacity": 0.45, "size": 8},
            customdata=plot.seeds,
            hovertemplate="%{y}<br>seed %{customdata}: %{x:.3f}<extra></extra>",
            showlegend=False,
        )
        figure.add_scatter(
            x=[strip.middle],
            y=[strip.label],
            mode="markers",
            marker={"symbol": "line-ns-open", "size": 18, "color": "black", "line": {"width": 3}},
            hovertemplate="%{y}<br>median: %{x:.3f}<extra></extra>",
            showlegend=False,
        )
    for level in plot.levels:
        figure.add_vline(level.value, line={"color": level.color, "dash": "dot"}, annotation_text=level.label)
    figure.update_xaxes(title=plot.x_label, rangemode="tozero")
    return arrange(figure, 120 + 30 * len(plot.strips), top=40, bottom=60)


@draw_traces.register
def draw_ranges(plot: plots.Ranges) -> go.Figure:
    """Values with intervals, one per line."""
    figure = go.Figure()
    for line in plot.ranges:
        figure.add_scatter(
            x=[line.value],
            y=[line.label],
            mode="markers",
            marker={"color": line.color, "size": 8},
            error_x={"array": [line.high - line.value], "arrayminus": [line.value - line.low], "symmetric": False},
            customdata=[[line.low, line.high]],
            hovertemplate="%{y}<br>%{x:.3f} (%{customdata[0]:.3f} to %{customdata[1]:.3f})<extra></extra>",
            showlegend=False,
        )
    figure.update_xaxes(title=plot.x_label)  # the page has the note as a paragraph
    return arrange(figure, 120 + 24 * len(plot.ranges), top=40, bottom=60)


@draw_traces.register
def draw_heat_map(plot: plots.HeatMap) -> go.Figure:
    """A table of colours."""
    short = [label.partition(":")[0] for label in plot.labels]
    figure = go.Figure(
        go.Heatmap(
            z=plot.values,
            y=list(range(len(short))),
            x=list(range(len(short))),
            zmin=0,
            zmax=1,
            colorscale="Blues",
            colorbar={"tickformat": ".0%"},
            customdata=[[f"{row}, {column}" for column in plot.labels] for row in plot.labels],
            hovertemplate="%{customdata}<br>%{z:.0%}<extra></extra>",
        )
    )
    first = -0.5
    for size in plot.groups:
        ends = {"x0": first, "y0": first, "x1": first + size, "y1": first + size}
        figure.add_shape(type="rect", line={"color": ORANGE, "width": 3}, **ends)
        first += size
    figure.update_xaxes(title=plot.column_label, tickvals=list(range(len(short))), ticktext=short)
    figure.update_yaxes(title=plot.row_label, tickvals=list(range(len(short))), ticktext=plot.labels)
    return arrange(figure, 200 + 34 * len(short), top=20, bottom=60)


def arrange(figure: go.Figure, height: int, top: int, bottom: int) -> go.Figure:
    """Arrange the rows of a figure from the top, and set its height and margins in pixels."""
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(height=max(320, height), margin={"l": 20, "r": 20, "t": top, "b": bottom})
    return figure


@draw_traces.register
def draw_dots(plot: plots.Dots) -> go.Figure:
    """Labelled lines with one panel per quantity."""
    figure = make_subplots(1, len(plot.panels), shared_yaxes=True, horizontal_spacing=0.03)
    for column, panel in enumerate(plot.panels, start=1):
        for i, marks in enumerate(panel.marks):
            offset = 0.22 * (i - (len(panel.marks) - 1) / 2)
            figure.add_trace(dots(plot, marks, offset, legend=column == 1), row=1, col=column)
        if panel.compare is not None:
            figure.add_vline(panel.compare, line={"color": GREY, "dash": "dot", "width": 1}, row=1, col=column)
        figure.update_xaxes(title=panel.x_label, type=panel.scale, exponentformat="power", row=1, col=column)
        if panel.scale == "linear":
            figure.update_xaxes(rangemode="tozero", row=1, col=column)
    at = list(range(len(plot.labels)))
    figure.update_yaxes(tickvals=at, ticktext=plot.labels, range=[len(at) - 0.5, -0.5], zeroline=False)
    figure.update_yaxes(automargin=True, row=1, col=1)
    figure.update_layout(height=max(320, 160 + 28 * len(at)), margin={"l": 20, "r": 20, "t": 20, "b": 60})
    figure.update_layout(legend={"orientation": "h", "y": -0.12, "x": 0})
    return figure


def dots(plot: plots.Dots, marks: plots.Marks, offset: float, legend: bool) -> go.Scatter:
    """The marks of one series; upper limits are hollow and point left."""
    signs = ["≤ " if limit else "" for limit in marks.limit]
    symbols = ["triangle-left-open" if limit else MARKERS[marks.color] for limit in marks.limit]
    return go.Scatter(
        x=marks.values,
        y=np.arange(len(marks.values)) + offset,
        mode="markers",
        name=marks.label,
        showlegend=legend,
        marker={"color": marks.color, "symbol": symbols, "size": 8},
        customdata=list(zip(plot.labels, signs, strict=True)),
        hovertemplate=f"%{{customdata[0]}}<br>{marks.label}: %{{customdata[1]}}%{{x:.3g}}<extra></extra>",
    )


@draw_traces.register
def draw_rollouts(plot: plots.Rollouts) -> go.Figure:
    """Panels of episodes side by side."""
    titles = [panel.caption.replace("\n", "<br>") for panel in plot.panels]
    figure = make_subplots(1, len(plot.panels), subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.03)
    for column, panel in enumerate(plot.panels, start=1):
        for trace in episodes(panel):
            figure.add_trace(trace, row=1, col=column)
        anchor = "y" if column == 1 else f"y{column}"
        edge = plot.edge
        figure.update_xaxes(range=[-edge, edge], scaleanchor=anchor, constrain="domain", row=1, col=column)
        figure.update_yaxes(range=[-edge, edge], constrain="domain", row=1, col=column)
    figure.update_annotations(font_size=13)
    figure.update_layout(height=430, margin={"l": 40, "r": 20, "t": 60, "b": 40}, showlegend=False)
    return figure


def episodes(panel: plots.Panel) -> list[go.Scatter]:
    """The goal region, the goal, and each episode up to its first step in the goal region."""
    angle = np.linspace(0, 2 * np.pi, 60)
    circle = panel.goal + panel.radius * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    region = {"mode": "lines", "line": {"width": 0}, "fill": "toself", "fillcolor": faint(GREEN), "hoverinfo": "skip"}
    traces = [go.Scatter(x=circle[:, 0], y=circle[:, 1], **region)]
    for e, reach in enumerate(panel.first_reach):
        path, missed = panel.path(e), reach == panel.paths.shape[1]
        label = f"episode {e}: " + ("never reaches the goal" if missed else f"at the goal after {reach} steps")
        traces.append(
            go.Scatter(
                x=path[:, 0],
                y=path[:, 1],
                mode="lines+markers",
                line={"color": GREY if missed else BLUE, "dash": "dot" if missed else "solid", "width": 1.5},
                marker={"size": [6] + [2] * (len(path) - 1), "color": "black"},
                hovertemplate=f"{label}<br>step %{{pointNumber}}: (%{{x:.2f}}, %{{y:.2f}})<extra></extra>",
            )
        )
    star = {"symbol": "star", "size": 14, "color": GREEN}
    goal = f"goal ({panel.goal[0]:.2f}, {panel.goal[1]:.2f})<extra></extra>"
    traces.append(go.Scatter(x=panel.goal[:1], y=panel.goal[1:], mode="markers", marker=star, hovertemplate=goal))
    return traces


def show(plot: plots.Lines, value: float) -> str:
    """A value as text: a percentage, or three digits."""
    if plot.percent:
        return f"{value:.1%}"
    return f"{value:.3g}" if plot.y_scale == "log" else f"{value:.3f}"


def plain(label: str) -> str:
    """A label with an upper-case first letter."""
    return label[0].upper() + label[1:]


def faint(color: str) -> str:
    """A colour with low opacity."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"
