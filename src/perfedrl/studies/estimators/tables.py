"""Tables of an estimator comparison for the terminal, and their content for JSON."""

import math
from typing import Any

from perfedrl.report.terminal_table import Column, TerminalTable
from perfedrl.studies.estimators import CURVATURE, GRADIENT, EstimatorComparison, EstimatorRow, ValueWithError
from perfedrl.studies.theory.tables import right

TRUTH = {CURVATURE: "|grad^2 J v|", GRADIENT: "|grad J|"}


def stage(found: EstimatorComparison, stage: str) -> TerminalTable:
    """The estimators at one stage by increasing variance: curvature forms, then policy gradients."""
    shown = {quantity: found.at(stage, quantity) for quantity in (CURVATURE, GRADIENT)}
    lengths = ", ".join(f"{TRUTH[quantity]} = {short(rows[0].error.length)}" for quantity, rows in shown.items())
    title = f"{stage} of training (round {shown[CURVATURE][0].round}): {lengths}"
    names = (Column(name, no_wrap=True) for name in ("form", "baseline"))
    numbers = (right(x) for x in ("variance", "of paper's", "bias^2", "order", "error", "m", "us"))
    table = TerminalTable(*names, *numbers, keys=2, title=title)
    for rows in shown.values():
        # Rounding keeps equal estimates in the order of the registry.
        for row in sorted(rows, key=lambda row: float(f"{row.error.variance.value:.3e}")):
            table.add_row(*cells(row))
        table.add_section()
    return table


def cells(row: EstimatorRow) -> tuple[str, ...]:
    """A row as text; the bias of a form that should be unbiased is red."""
    e, found = row.estimator, row.error
    bias = f"{found.bias_squared.value:.2g}" if found.seen else f"< {found.bias_at_most:.2g}"
    if found.seen and e.unbiased:
        bias = f"[red]{bias}[/]"
    share = "1" if e.is_paper else with_error(row.ratio)
    order = e.order.partition(":")[0]
    cost = str(e.trajectories), f"{row.microseconds:.0f}"
    return e.form, e.baseline, short(found.variance.value), share, bias, order, short(found.relative), *cost


def with_error(x: ValueWithError) -> str:
    """A number and its standard error, to the digits that the error allows."""
    if not x.error > 0:
        return short(x.value)
    digits = max(0, -math.floor(math.log10(x.error)))
    return f"{x.value:.{digits}f} ± {x.error:.{digits}f}"


def short(value: float) -> str:
    """A number to three digits, "–" for nan."""
    return "–" if math.isnan(value) else f"{value:.3g}"


def notes(found: EstimatorComparison) -> list[str]:
    """Explanations of the columns."""
    truth = "exact" if found.reference is None else f"from {found.reference:,} trajectories, their noise allowed for"
    agents = f"{found.agents} agent{'s' if found.agents > 1 else ''}"
    orders = dict.fromkeys(row.estimator.order for row in found.rows if not row.estimator.unbiased)
    return [
        f"{found.replicates} estimates each for {agents} of seed {found.seed}; the truth is {truth}",
        "of paper's: variance over that of the paper's estimator, ± standard error; bias^2: < where within noise",
        "error: root mean squared error over the truth's length; above 1, leaving it out would be nearer to the truth",
        "m: trajectories of an estimate; us: its microseconds on this machine, simulating them included",
        *(f"order of bias {order}" for order in orders),
    ]


def recommendation(found: EstimatorComparison, stage: str) -> str:
    """The recommended form at a stage, in words."""
    best, equal, paper, closest = found.recommendation(stage)
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


def enough(row: EstimatorRow) -> int:
    """The number of trajectories at which an unbiased estimate has a relative error of 1."""
    return math.ceil(row.estimator.trajectories * row.error.relative**2)


def name(row: EstimatorRow) -> str:
    """The form and baseline of a row, as named in a config."""
    return f"'{row.estimator.form}' ({row.estimator.baseline})"


def as_content(found: EstimatorComparison) -> dict[str, Any]:
    """The comparison as plain values."""
    return {
        "config": found.config.name,
        "seed": found.seed,
        "m": found.m,
        "replicates": found.replicates,
        "agents": found.agents,
        "reference_trajectories": found.reference,
        "rows": [row_content(row) for row in found.rows],
        "verdicts": {
            stage: {
                "least_variance_without_bias": name_content(chosen.best),
                "the_same": [name_content(row) for row in chosen.equal],
                "ratio_to_paper": chosen.best.ratio._asdict(),
                "least_error": name_content(chosen.closest),
            }
            for stage, chosen in ((stage, found.recommendation(stage)) for stage in found.stages)
        },
    }


def row_content(row: EstimatorRow) -> dict[str, Any]:
    """A row as plain values."""
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


def name_content(row: EstimatorRow) -> dict[str, str]:
    """The form and baseline of a row as plain values."""
    return {"form": row.estimator.form, "baseline": row.estimator.baseline}
