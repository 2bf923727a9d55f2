"""A strip of moments of one episode, as the environment draws them: frames of its own, or lines in the plane."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from perfedrl.report.plots import BLUE, GREEN, GREY
from perfedrl.types import Params, Trajectory

MOMENTS, COLUMNS = 8, 4
DOT = 0.02


def can_draw(task: Any, episode: Trajectory) -> bool:
    """Whether there is a way to draw the agent's episodes."""
    return task.frames is not None or task.sketch is not None or in_the_plane(task, episode)


def in_the_plane(task: Any, episode: Trajectory) -> bool:
    return task.goal is not None and task.box is not None and np.shape(episode.obs)[1:] == (2,)


def draw_episode(task: Any, policy: Any, params: Params, episode: Trajectory, title: str) -> Figure:
    """An episode as a picture: moments at even distances, or the path of a point in the plane."""
    steps = int(episode.mask.sum())
    if in_the_plane(task, episode):
        return draw_path(task, np.asarray(episode.obs)[:steps], title)
    if task.frames is not None:
        frames = task.frames(policy, params)
        at = moments(len(frames))
        return draw_moments([frames[i] for i in at], at, title)
    at = moments(steps)
    return draw_moments([task.sketch(episode.obs[i]) for i in at], at, title)


def moments(steps: int) -> list[int]:
    """The steps to show: the first, the last, and some between."""
    return sorted({int(i) for i in np.linspace(0, steps - 1, min(MOMENTS, steps)).round()})


def draw_moments(drawings: Sequence[Any], at: Sequence[int], title: str) -> Figure:
    rows = -(-len(drawings) // COLUMNS)
    figure = Figure(figsize=(9, 2.1 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    every = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    lines = not isinstance(drawings[0], np.ndarray)
    corners = np.concatenate([line for drawing in drawings for line in drawing]) if lines else np.zeros((1, 2))
    for axes in every:
        axes.set_axis_off()
    for axes, drawing, step in zip(every, drawings, at, strict=False):
        axes.set_title(f"step {step}", fontsize=8)
        if not lines:
            axes.imshow(drawing)
            continue
        # What comes first is the ground, if there is more; what comes last hangs or stands on a joint.
        for i, line in enumerate(drawing, start=int(len(drawing) == 1)):
            axes.plot(*np.asarray(line).T, color=(GREY, BLUE, GREEN)[min(i, 2)], linewidth=1 if i == 0 else 2.5)
        axes.plot(*np.asarray(drawing[-1])[0], "o", color=GREY, markersize=4)
        margin = 0.1 * (np.ptp(corners, axis=0).max() + DOT)
        axes.set_xlim(corners[:, 0].min() - margin, corners[:, 0].max() + margin)
        axes.set_ylim(corners[:, 1].min() - margin, corners[:, 1].max() + margin)
        axes.set_aspect("equal")
    return figure


def draw_path(task: Any, path: np.ndarray, title: str) -> Figure:
    figure = Figure(figsize=(4.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*path.T, color=BLUE, marker=".", linewidth=1, label="path")
    axes.plot(*path[0], "o", color=GREY, label="start")
    axes.plot(*np.asarray(task.goal), "*", color=GREEN, markersize=12, label="goal")
    edge = 1.05 * max(float(task.box), float(np.abs(path).max()))
    axes.set(xlim=(-edge, edge), ylim=(-edge, edge), xlabel="x", ylabel="y", title=title)
    axes.title.set_fontsize(10)
    axes.set_aspect("equal")
    axes.legend(fontsize=8, loc="best")
    return figure
