"""The figure of an estimator comparison: variance, bias and time of each estimator by stage of training."""

from collections.abc import Sequence

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, DotPanel, Dots, Marks
from perfedrl.studies.estimators import CURVATURE, GRADIENT, EstimatorComparison, EstimatorRow

COLORS = {"start": BLUE, "middle": ORANGE, "end": GREEN}


def comparison(found: EstimatorComparison) -> Dots:
    """One line per estimator, the least variance over all stages first; equal estimates share a line."""
    shown = [group for quantity in (CURVATURE, GRADIENT) for group in lines(found, quantity)]
    at = {stage: [first[stage] for first, *_ in shown] for stage in found.stages}
    labels = tuple(label(group) for group in shown)
    variance = tuple(
        known(name(rows[0]), [row.ratio.value for row in rows], COLORS[stage]) for stage, rows in at.items()
    )
    bias = tuple(
        Marks(
            name(rows[0]),
            np.asarray([shown_bias(row) / row.error.length**2 for row in rows]),
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
    title = f"Estimators from {found.m} trajectories, {found.config.name}: mean of {found.agents} agents"
    return Dots(f"estimators-{found.config.folder}", title, labels, panels)


def shown_bias(row: EstimatorRow) -> float:
    """The squared bias where it exceeds noise, its upper limit elsewhere."""
    return row.error.bias_squared.value if row.error.seen else row.error.bias_at_most


def lines(found: EstimatorComparison, quantity: str) -> list[list[dict[str, EstimatorRow]]]:
    """The estimators of a quantity by stage, grouped where they are equal at all stages."""
    first = found.at(found.stages[0], quantity)
    every = [{stage: found.at(stage, quantity)[i] for stage in found.stages} for i in range(len(first))]
    groups: list[list[dict[str, EstimatorRow]]] = []
    for rows in every:
        for group in groups:
            if all(row.same(group[0][stage]) for stage, row in rows.items()):
                group.append(rows)
                break
        else:
            groups.append([rows])
    return sorted(groups, key=lambda group: np.mean([np.log(row.ratio.value or 1.0) for row in group[0].values()]))


def label(group: Sequence[dict[str, EstimatorRow]]) -> str:
    """The label of a group: its forms, its baseline, and whether it is biased."""
    first, *others = (next(iter(rows.values())).estimator for rows in group)
    also = f" = {' = '.join(other.form for other in others)}" if others else ""
    biased = "" if first.unbiased else " (biased)"
    return f"{first.form}{also}, {first.baseline}{biased}"


def name(row: EstimatorRow) -> str:
    """The stage of a row with its round."""
    return f"{row.stage} (round {row.round})"


def known(label: str, values: Sequence[float], color: str) -> Marks:
    """Marks without upper limits."""
    return Marks(label, np.asarray(values, float), color, np.zeros(len(values), bool))
