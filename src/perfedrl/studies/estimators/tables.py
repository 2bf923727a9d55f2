"""Estimators side by side, as tables for the terminal and as JSON."""

import math
from typing import Any

from rich.table import Column, Table

from perfedrl.studies.estimators import CURVATURE, GRADIENT, Measured, Row, Study
from perfedrl.studies.theory.tables import right

TRUTH = {CURVATURE: "|grad^2 J v|", GRADIENT: "|grad J|"}


def stage(study: Study, stage: str) -> Table:
    """Every estimator at one stage, the least variance first: curvature forms, then policy gradients."""
    shown = {quantity: study.at(stage, quantity) for quantity in (CURVATURE, GRADIENT)}
    lengths = ", ".join(f"{TRUTH[quantity]} = {short(rows[0].error.length)}" for quantity, rows in shown.items())
    title = f"{stage} of training (round {shown[CURVATURE][0].round}): {lengths}"
    names = (Column(name, no_wrap=True) for name in ("form", "baseline"))
    numbers = (right(x) for x in ("variance", "of paper's", "bias^2", "order", "error", "m", "us"))
    table = Table(*names, *numbers, title=title)
    for rows in shown.values():
        # Forms that are one estimate keep the registry's order.
        for row in sorted(rows, key=lambda row: float(f"{row.error.variance.value:.3e}")):
            table.add_row(*cells(row))
        table.add_section()
    return table


def cells(row: Row) -> tuple[str, ...]:
    """A row as text; a bias that the form denies is red."""
    e, found = row.estimator, row.error
    bias = f"{found.bias_squared.value:.2g}" if found.seen else f"< {found.bias_at_most:.2g}"
    if found.seen and e.unbiased:
        bias = f"[red]{bias}[/]"
    share = "1" if e.is_paper else with_error(row.ratio)
    order = e.order.partition(":")[0]
    cost = str(e.trajectories), f"{row.microseconds:.0f}"
    return e.form, e.baseline, short(found.variance.value), share, bias, order, short(found.relative), *cost


def with_error(x: Measured) -> str:
    """A number to the digits that its standard error leaves, and the error."""
    if not x.error > 0:
        return short(x.value)
    digits = max(0, -math.floor(math.log10(x.error)))
    return f"{x.value:.{digits}f} ± {x.error:.{digits}f}"


def short(value: float) -> str:
    """Three digits; nothing where there is no value."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def notes(study: Study) -> list[str]:
    """What the columns mean."""
    truth = "exact" if study.reference is None else f"from {study.reference:,} trajectories, their noise allowed for"
    agents = f"{study.agents} agent{'s' if study.agents > 1 else ''}"
    orders = dict.fromkeys(row.estimator.order for row in study.rows if not row.estimator.unbiased)
    return [
        f"{study.replicates} estimates each for {agents} of seed {study.seed}; the truth is {truth}",
        "of paper's: variance over that of the paper's estimator, ± standard error; bias^2: < where within noise",
        "error: root mean squared error over the truth's length; above 1, leaving it out would be nearer to the truth",
        "m: trajectories of an estimate; us: its microseconds on this machine, simulating them included",
        *(f"order of bias {order}" for order in orders),
    ]


def verdict(study: Study, stage: str) -> str:
    """Which form to take, in words."""
    best, equal, paper, closest = study.verdict(stage)
    also = f" (the same estimate: {', '.join(row.estimator.form for row in equal)})" if equal else ""
    share = "the paper's own" if best is paper else f"{with_error(best.ratio)} of the paper's"
    text = f"{stage}: without bias {name(best)} varies least{also}, {share}"
    if not closest.estimator.unbiased and best.error.relative > 0:
        less = closest.error.relative / best.error.relative
        text += f"; with bias {name(closest)} has the least error, {less:.2f} of that"
    if best.error.relative > 1:
        needed = " and ".join(f"{name(row)} {enough(row):,}" for row in ([best] if best is paper else [best, paper]))
        text += f". For an error of 1 it takes about {needed} trajectories"
    return text


def enough(row: Row) -> int:
    """How many trajectories bring an unbiased estimate's error to 1, its variance falling with their number."""
    return math.ceil(row.estimator.trajectories * row.error.relative**2)


def name(row: Row) -> str:
    """A form and its baseline, as a config names them."""
    return f"'{row.estimator.form}' ({row.estimator.baseline})"


def as_content(study: Study) -> dict[str, Any]:
    """All of it as plain values."""
    return {
        "config": study.config.name,
        "seed": study.seed,
        "m": study.m,
        "replicates": study.replicates,
        "agents": study.agents,
        "reference_trajectories": study.reference,
        "rows": [row_content(row) for row in study.rows],
        "verdicts": {
            stage: {
                "least_variance_without_bias": name_content(found.best),
                "the_same": [name_content(row) for row in found.equal],
                "ratio_to_paper": found.best.ratio._asdict(),
                "least_error": name_content(found.closest),
            }
            for stage, found in ((stage, study.verdict(stage)) for stage in study.stages)
        },
    }


def row_content(row: Row) -> dict[str, Any]:
    e, found = row.estimator, row.error
    return {
        "stage": row.stage,
        "round": row.round,
        "quantity": e.quantity,
        **name_content(row),
        "stated_bias": e.order,
        "trajectories": e.trajectories,
        "microseconds": row.microseconds,
        "variance": found.variance._asdict(),
        "ratio_to_paper": row.ratio._asdict(),
        "bias_squared": {**found.bias_squared._asdict(), "seen": found.seen, "at_most": found.bias_at_most},
        "relative_error": found.relative,
        "truth_length": found.length,
    }


def name_content(row: Row) -> dict[str, str]:
    return {"form": row.estimator.form, "baseline": row.estimator.baseline}
