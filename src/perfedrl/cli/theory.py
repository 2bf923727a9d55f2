"""The command `theory`: guarantees and plans for a config, and measurements on its fleet."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from perfedrl import compilation
from perfedrl.cli.console import JsonFile, Trust, as_json, out, print_written, status_line
from perfedrl.errors import UserError
from perfedrl.experiments.config import load_config
from perfedrl.experiments.files import check_file, write_atomically
from perfedrl.studies.theory import analysis, tables
from perfedrl.theory import Given, residual, witness
from perfedrl.theory.realized_bounds import MEASURED_ROUNDS, ROUNDS

WITNESS = "witness"


class BiasBound(StrEnum):
    """The bound on the bias that the cheapest plan relies on."""

    best = "best"
    crude = "crude"
    sharp = "sharp"


def fixed(kind: type, help: str) -> Any:
    """An option that fixes a part of the plan."""
    return Annotated[kind | None, typer.Option(help=help, rich_help_panel="Fixed parts of the plan")]


def known(help: str) -> Any:
    """An option for a property of the fleet that cannot be computed."""
    return Annotated[float | None, typer.Option(help=help, rich_help_panel="What is known of the fleet")]


def theory(
    config: Annotated[str, typer.Argument(help="A TOML file, or 'witness' for the two bandits of Prop. 2.")],
    epsilon: Annotated[float | None, typer.Option(help="Plan for a mean squared meta-gradient of this.")] = None,
    rounds: fixed(int, "Largest number of rounds.") = None,
    tau: fixed(int, "Local steps.") = None,
    beta: fixed(float, "Local step size.") = None,
    m_in: fixed(int, "Inner batch.") = None,
    m_h: fixed(int, "Curvature batch.") = None,
    m_out: fixed(int, "Outer batch.") = None,
    bias: Annotated[BiasBound, typer.Option(help="The bound on the bias that the plan relies on.")] = BiasBound.best,
    gap: known("Largest possible increase of F from its start (Delta); by default an upper bound.") = None,
    radius: known("For networks: the norm of parameters up to which the constants hold.") = None,
    reward_bound: known("The largest |reward|, where tasks do not declare it.") = None,
    measure: Annotated[bool, typer.Option(help="Also run the fleet and measure the bounded quantities.")] = True,
    trust: Trust = False,
    json_file: JsonFile = None,
) -> None:
    """Show what the theory guarantees for a config: constants, bounds, regime, plans; and measured values.

    With --epsilon it plans: Corollary 1's choice with both bounds on the bias, and the cheapest plan that satisfies the
    same conditions, with its cost. Options such as --tau 1 or --rounds 100000 fix parts of the plan.

    Examples: perfedrl theory configs/gridworld.toml --epsilon 0.1; perfedrl theory witness
    """
    if json_file:
        check_file(json_file)
    given = Given(rounds, tau, beta, m_in, m_h, m_out)
    if config == WITNESS:
        if given != Given() or not (epsilon is gap is radius is reward_bound is None):
            raise UserError("the witness is fixed: of the options only --json goes with it")
        content = show_witness()
    else:
        if epsilon is None and given != Given():
            raise UserError("--rounds, --tau, --beta and the batches are parts of a plan: give --epsilon too")
        checked = load_config(Path(config), trust=trust)
        found = analysis.of_config(checked, epsilon, given, bias.value, gap, radius, reward_bound)
        show(found, epsilon, radius)
        measured = show_measured(found) if measure else None
        content = tables.as_content(found, measured)
    if json_file:
        write_atomically(json_file, as_json(content))
        print_written([json_file])


def show(found: analysis.Findings, epsilon: float | None, radius: float | None) -> None:
    """Print what is known before anything runs."""
    p = found.problem
    out.print(tables.constants(p.constants))
    if radius is not None:
        note(f"they hold while all parameters, also adapted ones, stay within a distance of {radius:g} from 0")
    out.print(tables.bounds(found))
    if found.silent:
        note(f"Theorem 1 says nothing of this run: {found.silent}")
    out.print(tables.regime(found))
    if found.plans:
        out.print(tables.plans(found.plans))
        note(f"for {p.agents} agents, {p.parameters} parameters, and F at most {p.gap:.4g} above its start")
        if found.first_square is not None:
            start = f"|grad F|^2 is {found.first_square:.4g} at the start"
            met = epsilon is not None and epsilon >= found.first_square
            note(f"{start}: the accuracy is met without training; ask for less than that" if met else start)
        if found.smaller:
            out.print(tables.smaller(found))
    else:
        note("for a plan, say how accurate: --epsilon 0.1")


def show_measured(found: analysis.Findings) -> analysis.FleetMeasurements | None:
    """Run and measure a tabular fleet, and print the measurements."""
    compilation.use_all_cores()
    compilation.enable_cache()
    with status_line("measuring") as progress:
        measured = analysis.measure(found, progress)
    if measured is None:
        note("what the bounds bound is measured on fleets with finitely many states only")
        return None
    out.print(tables.realized(measured.realized))
    rounds, seed = min(found.config.rounds, ROUNDS), found.config.seeds[0]
    note(f"along the first {rounds} rounds of seed {seed}, measured in {min(rounds, MEASURED_ROUNDS)} of them")
    smoothness = next(row.realized for row in measured.realized if row.symbol == "L_F")
    if smoothness:
        note(f"with the realized L_F the ceiling 1 / (6 L_F) on beta would be {1 / (6 * smoothness):.3g}; no guarantee")
    points = measured.fixed_points
    if points:
        out.print(tables.fixed_points(points, residual(found.problem.constants)))
        if len(points) > tables.MOST_SHOWN:
            note(f"the {tables.MOST_SHOWN} of {len(points)} with the largest residual; --json has all")
    elif points is None:
        note("fixed points of the first-order dynamics are searched where alpha > 0 and parameters are few")
    else:
        note("no fixed point of the first-order dynamics was found: its direction need not have a zero")
    return measured


def show_witness() -> dict:
    """Print the witness to the paper's digits, and a zero of D at each alpha that the paper lists."""
    compilation.enable_cache()
    with status_line("solving"):
        agreed = witness.agreements()
        zeros = {alpha: witness.continued(*witness.paper_witness(), alpha) for alpha in witness.ALPHAS}
        turned = {alpha: witness.continued(*witness.attracting_witness(), alpha) for alpha in witness.ALPHAS}
    out.print(tables.witness(agreed))
    out.print(tables.zeros(zeros))
    note(
        "The witness's fixed points repel: small first-order steps lead away from them. With every reward r turned into"
    )
    note("1 - r they attract, and the limit of |grad F| / alpha is the same:")
    out.print(tables.zeros(turned))
    points = {"witness": zeros, "rewards 1 - r": turned}
    return {
        "agreements": [{**a._asdict(), "agrees": a.agrees} for a in agreed],
        **{name: [{"alpha": a, **tables.point_content(p)} for a, p in at.items()] for name, at in points.items()},
    }


def note(text: str) -> None:
    """Print a line of plain text."""
    out.print(text, highlight=False, markup=False, soft_wrap=True)
