"""Tables of the theory for the terminal, and their content for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import Any

import numpy as np

from perfedrl import theory
from perfedrl.report.terminal_table import Column, TerminalTable
from perfedrl.studies.theory.analysis import Findings, FleetMeasurements
from perfedrl.theory import Constants, Plan
from perfedrl.theory.first_order_fixed_points import FixedPoint
from perfedrl.theory.realized_bounds import RealizedBound
from perfedrl.theory.witness import DIGITS, Agreement

MEANINGS = {
    "R_max": "largest reward",
    "gamma": "discount",
    "H": "horizon",
    "G": "score",
    "M": "derivative of the score",
    "Lambda": "Lipschitz constant of that derivative",
    "alpha": "adaptation step size",
    "R_bar": "return",
    "G_J": "policy gradient of a trajectory",
    "L_J": "Hessian term of a trajectory",
    "M_bar": "its part that is not of rank one",
    "Lambda_bar": "Lipschitz constant of that part",
    "rho_J": "Lipschitz constant of the Hessian",
    "G_F": "meta-gradient, and every estimate of it",
    "L_F": "Lipschitz constant of the meta-gradient",
}
"""The quantity that each constant bounds."""

MOST_SHOWN = 5
"""The largest number of fixed points in the table."""


def constants(c: Constants) -> TerminalTable:
    """The constants of Eq. (4) and Lemma 2."""
    table = TerminalTable("constant", right("value"), "bounds", title="constants (worst case)")
    for name, meaning in MEANINGS.items():
        table.add_row(name, short(getattr(c, name)), meaning)
    return table


def bounds(found: Findings) -> TerminalTable:
    """The bounds at the config's settings."""
    table = TerminalTable("bound", right("value"), "from", title="bounds at the config's settings")
    for what, value, where in bound_rows(found):
        table.add_row(what, short(value), where)
    return table


def bound_rows(found: Findings) -> list[tuple[str, float, str]]:
    """Name, value and source of each bound."""
    p, s, c = found.problem, found.settings, found.problem.constants
    exact = s.variant == "exact"
    rows = [
        ("bias of the estimate, crude", p.bias(s.m_in, "crude"), "Lemma 3(ii)" if exact else "Corollary 2"),
        ("bias of the estimate, sharp", p.bias(s.m_in, "sharp"), "Prop. 1" if exact else "Prop. 1's argument"),
        (
            "mean squared error of the estimate",
            p.second_moment(s.m_in, s.m_h, s.m_out),
            "Lemma 3(iii)" if exact else "Corollary 2",
        ),
        ("distance moved in a round", theory.drift(c, s.beta, s.tau), "Lemma 4"),
        ("gradient dissimilarity", theory.dissimilarity(c), "Remark 1"),
        ("|grad J_i after adaptation| / |grad F_i|", theory.certificate(c, 1.0), "Remark 2"),
        ("|grad F| at a first-order fixed point", theory.residual(c), "Prop. 2"),
        ("|grad F - grad f|", theory.small_adaptation(c).gradient, "Prop. 3"),
        ("|F - f|", theory.small_adaptation(c).value, "Prop. 3"),
        ("largest beta that the theory allows", theory.ceiling(c), "Lemma 5"),
    ]
    if found.bound:
        terms = {**asdict(found.bound), "total": found.bound.total}
        rows += [(f"mean |grad F|^2: {name}", value, "Theorem 1") for name, value in terms.items()]
    return rows


def regime(found: Findings) -> TerminalTable:
    """The regime of alpha and the ends of the regimes."""
    r = found.regime
    table = TerminalTable(
        "alpha", right("value"), "what ends there", title=f"regime of alpha = {short(r.alpha)}: {r.name}"
    )
    if r.vanishing:
        table.add_row("vanishing (R1)", short(r.vanishing), "grad F near grad f; first-order admissible")
    table.add_row("1 / (2 L_J) (R2)", short(r.moderate), "moderate: Remark 2 with a factor of 2")
    table.add_row("alpha-dagger", short(r.dagger), "above it the third-order term of L_F exceeds L_J")
    table.caption = r.meaning
    return table


def plans(named: dict[str, Plan]) -> TerminalTable:
    """Plans in columns: settings, margins of the conditions, and costs."""
    made = list(named.values())
    title = f"plans for mean |grad F|^2 <= {made[0].epsilon:g}; costs per agent"
    table = TerminalTable("", *(right(name) for name in named), title=title)
    for name, cell in (
        ("rounds K", lambda x: count(x.K)),
        ("local steps tau", lambda x: count(x.tau)),
        ("beta", lambda x: short(x.beta)),
        ("m_in", lambda x: count(x.m_in)),
        ("m_h", lambda x: count(x.m_h)),
        ("m_out", lambda x: count(x.m_out)),
    ):
        table.add_row(name, *map(cell, made))
    table.add_section()
    for i, condition in enumerate(made[0].conditions):
        table.add_row(f"{condition.name}: margin", *(f"{max(0.0, x.conditions[i].margin):.2%}" for x in made))
    table.add_row("binding", *(", ".join(name.split()[0] for name in x.binding) or "none" for x in made))
    table.add_row("Theorem 1", *(short(x.bound.total) for x in made))
    table.add_section()
    table.add_row("trajectories", *(count(x.trajectories) for x in made))
    table.add_row("environment steps", *(count(x.steps) for x in made))
    table.add_row("bytes", *(count(x.bytes) for x in made))
    return table


def smaller(found: Findings) -> TerminalTable:
    """The cheapest plans at smaller adaptation step sizes, and their savings."""
    now = found.plans["cheapest"]
    header = (right(x) for x in ("value", "rounds K", "m_in", "trajectories", "cheaper by"))
    table = TerminalTable("alpha", *header, title="cheapest plans at smaller alpha")
    for name, plan in {"the config's": now, **found.smaller}.items():
        saved = "" if plan is now else f"{Decimal(now.trajectories) / plan.trajectories:.3g}".replace("E", "e")
        alpha = short(plan.problem.constants.alpha)
        table.add_row(name, alpha, count(plan.K), count(plan.m_in), count(plan.trajectories), saved)
    return table


def realized(rows: Sequence[RealizedBound]) -> TerminalTable:
    """Bounds and realized values."""
    header = "largest along a run", right("bound"), right("realized"), right("times looser"), "from"
    table = TerminalTable(*header, title="bounds and what the fleet realizes")
    for row in rows:
        table.add_row(row.what, short(row.bound), short(row.realized), f"{row.looseness:.3g}", row.where)
    return table


def fixed_points(points: Sequence[FixedPoint], bound: float) -> TerminalTable:
    """First-order fixed points: their residual, its bound, and the share of each agent."""
    title = "fixed points of the exact first-order dynamics (Prop. 2)"
    header = (right(x) for x in ("|grad F|", "share of bound", "|grad F| / alpha as alpha -> 0"))
    table = TerminalTable("point", "kind", *header, "|share| by agent", title=title)
    for i, point in enumerate(points[:MOST_SHOWN]):
        limit = "cannot be followed" if point.limit is None else short(point.limit.slope)
        shares = ", ".join(f"{np.linalg.norm(share):.3g}" for share in point.shares)
        kind = "attracting" if point.attracting else "not attracting"
        table.add_row(str(i), kind, short(point.residual), f"{point.residual / bound:.2g}", limit, shares)
    return table


def witness(agreed: Sequence[Agreement]) -> TerminalTable:
    """The paper's numbers of the witness and the computed ones."""
    table = TerminalTable("witness of Prop. 2", right("paper"), right("ours"), "agrees")
    for a in agreed:
        table.add_row(a.what, f"{a.paper:.{DIGITS}f}", f"{a.ours:.{DIGITS}f}", "yes" if a.agrees else "[red]no[/]")
    return table


def zeros(points: dict[float, FixedPoint]) -> TerminalTable:
    """A zero of D at each alpha that the paper lists."""
    header = ("alpha", "theta*", "|D(theta*)|", "grad F(theta*)", "|grad F| / alpha", "")
    table = TerminalTable(*(right(x) for x in header), title="zeros of D")
    for alpha, p in points.items():
        kind = "attracting" if p.attracting else "repelling"
        numbers = f"{p.theta[0]:.7f}", f"{p.direction:.1e}", f"{p.meta_gradient[0]:.7f}", f"{p.residual / alpha:.7f}"
        table.add_row(f"{alpha:g}", *numbers, kind)
    return table


def as_content(found: Findings, measured: FleetMeasurements | None) -> dict[str, Any]:
    """All tables as plain values."""
    c = found.problem.constants
    content: dict[str, Any] = {
        "constants": {name: getattr(c, name) for name in MEANINGS},
        "problem": {"agents": found.problem.agents, "parameters": found.problem.parameters, "gap": found.problem.gap},
        "settings": found.settings._asdict(),
        "squared_meta_gradient_at_the_start": found.first_square,
        "bounds": [{"bound": what, "value": value, "from": where} for what, value, where in bound_rows(found)],
        "theorem_1": None if found.bound is None else {**asdict(found.bound), "total": found.bound.total},
        "theorem_1_silent": found.silent or None,
        "regime": asdict(found.regime),
        "plans": {name: plan_content(plan) for name, plan in found.plans.items()},
        "smaller_alpha": {name: plan_content(plan) for name, plan in found.smaller.items()},
    }
    if measured:
        content["realized"] = [row._asdict() for row in measured.realized]
        points = measured.fixed_points
        content["fixed_points"] = None if points is None else [point_content(point) for point in points]
    return content


def plan_content(plan: Plan) -> dict[str, Any]:
    """A plan as plain values."""
    names = ("epsilon", "bias", "K", "tau", "beta", "m_in", "m_h", "m_out", "trajectories", "steps", "bytes")
    return {
        "alpha": plan.problem.constants.alpha,
        **{name: getattr(plan, name) for name in names},
        "binding": plan.binding,
        "conditions": [{**asdict(x), "margin": x.margin, "holds": x.holds} for x in plan.conditions],
        "theorem_1": {**asdict(plan.bound), "total": plan.bound.total},
    }


def point_content(point: FixedPoint) -> dict[str, Any]:
    """A fixed point as plain values."""
    limit = point.limit
    return {
        "theta": point.theta.tolist(),
        "direction": point.direction,
        "attracting": point.attracting,
        "residual": point.residual,
        "shares": point.shares.tolist(),
        "limit": None if limit is None else {"theta": limit.theta.tolist(), "slope": limit.slope},
    }


def right(name: str) -> Column:
    """A right-justified column."""
    return Column(name, justify="right")


def count(value: int) -> str:
    """A whole number; in scientific notation from 1e9 on."""
    return f"{value:,}" if value < 1e9 else f"{Decimal(value):.3g}".replace("E", "e")


def short(value: float) -> str:
    """A number to four digits."""
    return f"{value:.4g}"
