"""Pictures of one episode: frames or sketches from the environment at several steps, or a path in the plane."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from perfedrl.envs.base import environment_part
from perfedrl.report.plots import BLUE, GREEN, GREY
from perfedrl.types import Params, Trajectory

SHOWN_STEPS, COLUMNS = 8, 4
DOT = 0.02


def can_draw(task: Any, episode: Trajectory) -> bool:
    """Whether the task's episodes can be drawn."""
    return task.frames is not None or task.sketch is not None or in_the_plane(task, episode)


def in_the_plane(task: Any, episode: Trajectory) -> bool:
    """Whether an episode is a path in the plane with a goal."""
    located = task.goal is not None and task.box is not None
    return located and np.shape(environment_part(task, episode.obs))[1:] == (2,)


def draw_episode(task: Any, policy: Any, params: Params, episode: Trajectory, title: str) -> Figure:
    """Draw an episode: frames at evenly spaced steps, or the path of a point in the plane."""
    steps = int(episode.mask.sum())
    if in_the_plane(task, episode):
        return draw_path(task, np.asarray(environment_part(task, episode.obs))[:steps], title)
    if task.frames is not None:
        frames = task.frames(policy, params)
        at = shown_steps(len(frames))
        return draw_frames([frames[i] for i in at], at, title)
    at = shown_steps(steps)
    return draw_frames([task.sketch(episode.obs[i]) for i in at], at, title)


def shown_steps(steps: int) -> list[int]:
    """The steps to show: the first, the last, and evenly spaced ones in between."""
    return sorted({int(i) for i in np.linspace(0, steps - 1, min(SHOWN_STEPS, steps)).round()})


def draw_frames(drawings: Sequence[Any], at: Sequence[int], title: str) -> Figure:
    """Frames or sketches in a grid, with their steps as titles."""
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
        # The first line is the ground if there are several; the last line starts at a joint.
        for i, line in enumerate(drawing, start=int(len(drawing) == 1)):
            axes.plot(*np.asarray(line).T, color=(GREY, BLUE, GREEN)[min(i, 2)], linewidth=1 if i == 0 else 2.5)
        axes.plot(*np.asarray(drawing[-1])[0], "o", color=GREY, markersize=4)
        margin = 0.1 * (np.ptp(corners, axis=0).max() + DOT)
        axes.set_xlim(corners[:, 0].min() - margin, corners[:, 0].max() + margin)
        axes.set_ylim(corners[:, 1].min() - margin, corners[:, 1].max() + margin)
        axes.set_aspect("equal")
    return figure


def draw_path(task: Any, path: np.ndarray, title: str) -> Figure:
    """A path in the plane with its start and the goal."""
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
