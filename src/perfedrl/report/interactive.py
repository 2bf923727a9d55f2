"""Plots for a browser, with the values of every seed on hover."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from perfedrl.report.plots import BLUE, GREEN, GREY, MARKERS, Lines, Pairs, Panel, Plot, Rollouts, Series

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MOST_SEEDS = 12
"""Seeds that a hover box lists one by one; of more it gives the smallest and the largest value."""


def draw(plot: Plot) -> go.Figure:
    """Draw a plot."""
    if isinstance(plot, Pairs):
        figure = draw_pairs(plot)
    else:
        figure = draw_rollouts(plot) if isinstance(plot, Rollouts) else draw_lines(plot)
    figure.update_layout(template="plotly_white", font={"family": FONT, "size": 13}, hoverlabel={"align": "left"})
    return figure


def draw_lines(plot: Lines) -> go.Figure:
    figure = go.Figure()
    for series in plot.series:
        figure.add_traces(band(plot, series) if series.centre == "mean" else seeds(plot, series))
        figure.add_trace(line(plot, series))
    left, right = plot.axis.position(
        np.asarray([min(s.x.min() for s in plot.series), max(s.x.max() for s in plot.series)], float)
    )
    for level in plot.levels:
        # A line of many points, so that it can be hovered over anywhere.
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
        every = max(1, round(decades / 8))  # left to itself the library labels 2 and 5 between them
        figure.update_yaxes(title=plot.y_label, type="log", exponentformat="power", dtick=every)
    else:
        figure.update_yaxes(title=plot.y_label, rangemode="tozero", tickformat=".0%" if plot.percent else None)
    figure.update_layout(height=440, margin={"l": 70, "r": 20, "t": 20, "b": 60}, hovermode="closest")
    figure.update_layout(legend={"orientation": "h", "y": -0.22, "x": 0, "traceorder": "normal"})
    return figure


def line(plot: Lines, series: Series) -> go.Scatter:
    """The middle line; its hover box holds every seed."""
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


def hover_text(plot: Lines, series: Series, i: int) -> str:
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


def band(plot: Lines, series: Series) -> list[go.Scatter]:
    """One standard deviation to both sides."""
    x, low, high = plot.axis.position(series.x), series.middle - series.deviation, series.middle + series.deviation
    if plot.percent:
        low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    shared: dict[str, Any] = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    lower = go.Scatter(x=x, y=low, **shared)
    return [lower, go.Scatter(x=x, y=high, fill="tonexty", fillcolor=faint(series.color), **shared)]


def seeds(plot: Lines, series: Series) -> list[go.Scatter]:
    """Every seed as a point."""
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


def draw_pairs(plot: Pairs) -> go.Figure:
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
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(height=max(320, 120 + 28 * len(labels)), margin={"l": 20, "r": 20, "t": 20, "b": 60})
    figure.update_layout(legend={"orientation": "h", "y": -0.15, "x": 0})
    return figure


def draw_rollouts(plot: Rollouts) -> go.Figure:
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


def episodes(panel: Panel) -> list[go.Scatter]:
    """The goal region, the goal, and every episode up to where it reaches it."""
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


def show(plot: Lines, value: float) -> str:
    if plot.percent:
        return f"{value:.1%}"
    return f"{value:.3g}" if plot.y_scale == "log" else f"{value:.3f}"


def plain(label: str) -> str:
    return label[0].upper() + label[1:]


def faint(color: str) -> str:
    """A colour that one sees through."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.18)"
