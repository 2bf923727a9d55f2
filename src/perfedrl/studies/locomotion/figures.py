"""Figures of the locomotion study: scores after one step over the decisions of training."""

from collections.abc import Sequence
from typing import NamedTuple

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, Axis, Level, Lines, Plot, Series
from perfedrl.studies.base import Runs
from perfedrl.studies.locomotion.study import (
    CONTEXT,
    DIRECTION,
    DIRECTION_CEILING,
    FEDPPO,
    MAML_SCORE,
    SAMPLED,
    VELOCITY,
    VELOCITY_CEILING,
    decisions,
    scores,
)

AXIS = Axis("million decisions of the fleet in training")


class LearningCurve(NamedTuple):
    """One line of a figure: a row of the study, and which of its scores are shown."""

    key: str
    label: str
    color: str
    when: str = "after"
    worst: bool = False
    """Whether the score of the worst agent is shown instead of the mean over agents."""


def locomotion(runs: Runs) -> list[Plot]:
    """Scores of cheetahs by direction and by velocity over the decisions of training."""
    return [direction(runs), velocity(runs)]


def lines(name: str, title: str, runs: Runs, curves: Sequence[LearningCurve], levels: tuple[Level, ...] = ()) -> Lines:
    """Curves of scores; those with fewer seeds than the first one say how many they have."""
    series = []
    for key, label, color, when, worst in curves:
        found = scores(runs[key], when)
        fewer = f" ({len(found)} seeds)" if len(found) != len(runs[curves[0].key].config.seeds) else ""
        values = found.min(axis=-1) if worst else found.mean(axis=-1)
        series.append(Series(label + fewer, decisions(runs[key]) / 1e6, values, color, dashed=worst))
    return Lines(name, title, AXIS, "score", tuple(series), tuple(runs[curves[0].key].config.seeds), levels)


def direction(runs: Runs) -> Lines:
    """Half-cheetahs forward and backward."""
    curves = (
        LearningCurve(DIRECTION, "after one step", BLUE),
        LearningCurve(DIRECTION, "after one step, worst agent", BLUE, worst=True),
        LearningCurve(DIRECTION, "before the step", PINK, "before"),
        LearningCurve(SAMPLED, "a quarter of the agents a round", ORANGE),
        LearningCurve(DIRECTION_CEILING, "sees the direction", GREY, "before"),
    )
    levels = (Level("MAML, after one step", MAML_SCORE, GREEN),)
    return lines("cheetahs-direction", "Half-cheetahs, forward and backward", runs, curves, levels)


def velocity(runs: Runs) -> Lines:
    """Half-cheetahs with velocities of their own, agents that never took part."""
    curves = (
        LearningCurve(VELOCITY, "all parameters, after one step", BLUE),
        LearningCurve(VELOCITY, "all parameters, worst agent", BLUE, worst=True),
        LearningCurve(CONTEXT, "context, after one step", GREEN),
        LearningCurve(CONTEXT, "context, worst agent", GREEN, worst=True),
        LearningCurve(FEDPPO, "FedPPO, after one step", ORANGE),
        LearningCurve(VELOCITY_CEILING, "sees the velocity", GREY, "before"),
    )
    return lines("cheetahs-velocity", "Half-cheetahs with unseen velocities", runs, curves)
