"""The figure of the estimators: variance, bias and time of each, by stage of training."""

from collections.abc import Sequence

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, DotPanel, Dots, Marks
from perfedrl.studies.estimators import CURVATURE, GRADIENT, Row, Study

COLORS = {"start": BLUE, "middle": ORANGE, "end": GREEN}


def comparison(study: Study) -> Dots:
    """Every estimator on a line, the least variance over all stages first; forms that are one estimate share a line."""
    shown = [group for quantity in (CURVATURE, GRADIENT) for group in lines(study, quantity)]
    at = {stage: [first[stage] for first, *_ in shown] for stage in study.stages}
    labels = tuple(label(group) for group in shown)
    relative = lambda row: row.error.bias_squared.value if row.error.seen else row.error.bias_at_most  # noqa: E731
    variance = tuple(
        known(name(rows[0]), [row.ratio.value for row in rows], COLORS[stage]) for stage, rows in at.items()
    )
    bias = tuple(
        Marks(
            name(rows[0]),
            np.asarray([relative(row) / row.error.length**2 for row in rows]),
            COLORS[stage],
            np.asarray([not row.error.seen for row in rows]),
        )
        for stage, rows in at.items()
    )
    times = known("any stage", [row.microseconds for row in next(iter(at.values()))], GREY)
    panels = (
        DotPanel("variance / the paper's", variance, compare=1.0),
        DotPanel("bias² / |truth|²", bias, compare=1.0),
        DotPanel("time per estimate (µs)", (times,), scale="linear"),
    )
    title = f"Estimators from {study.m} trajectories, {study.config.name}: mean of {study.agents} agents"
    return Dots("estimators", title, labels, panels)


def lines(study: Study, quantity: str) -> list[list[dict[str, Row]]]:
    """The estimators of a quantity, each by stage, in groups that are equal at every stage."""
    first = study.at(study.stages[0], quantity)
    every = [{stage: study.at(stage, quantity)[i] for stage in study.stages} for i in range(len(first))]
    groups: list[list[dict[str, Row]]] = []
    for rows in every:
        for group in groups:
            if all(row.same(group[0][stage]) for stage, row in rows.items()):
                group.append(rows)
                break
        else:
            groups.append([rows])
    return sorted(groups, key=lambda group: np.mean([np.log(row.ratio.value or 1.0) for row in group[0].values()]))


def label(group: Sequence[dict[str, Row]]) -> str:
    """The names of what a line shows."""
    first, *others = (next(iter(rows.values())).estimator for rows in group)
    also = f" = {' = '.join(other.form for other in others)}" if others else ""
    biased = "" if first.unbiased else " (biased)"
    return f"{first.form}{also}, {first.baseline}{biased}"


def name(row: Row) -> str:
    return f"{row.stage} (round {row.round})"


def known(label: str, values: Sequence[float], color: str) -> Marks:
    """Marks none of which is a limit."""
    return Marks(label, np.asarray(values, float), color, np.zeros(len(values), bool))
