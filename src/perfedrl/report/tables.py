"""Tables for the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Column, Table

from perfedrl.experiments.assessment import Assessment
from perfedrl.experiments.evaluate import AgentReturn
from perfedrl.experiments.inspection import Inspection
from perfedrl.experiments.personalize import Personalized
from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.experiments.store import Run
from perfedrl.registry import Registry
from perfedrl.studies import Claim
from perfedrl.studies.demonstration import Row

DEMO_HEADER = ("trajectories", "return, personalized", "success", "return, from scratch", "success")
CLAIMS_HEADER = ("", "claim", "paper", "measured", "95 % interval", "met")
LABELS = {"success": "success rate", "distance": "final distance"}


def summary(run: Run) -> Table:
    """A run's returns at its last evaluation, training and held-out agents apart."""
    table = Table("", "before adaptation", "after adaptation", title=run.folder.name)
    for row in final_outcomes(run):
        table.add_row(*row)
    return table


def over_agents(values: Any) -> Any:
    """The mean over the agents that said something: over a network some may be away, or keep it to themselves."""
    said = ~np.isnan(values)
    return np.where(said, values, 0).sum(axis=-1) / np.where(said.any(axis=-1), said.sum(axis=-1), np.nan)


def final_outcomes(run: Run) -> list[tuple[str, ...]]:
    """The rows of `summary`: returns, and what else the tasks say, training and held-out agents apart."""
    history = run.history
    returns = {f"{when}.return": getattr(history, when) for when in ("before", "after")}
    if history.held_out_after.shape[-1]:
        returns |= {f"held_out_{when}.return": getattr(history, f"held_out_{when}") for when in ("before", "after")}
    measured = returns | dict(history.outcomes)
    last = lambda x: interval(mean_interval(over_agents(x[:, -1])))  # noqa: E731
    recorded = [(f"{key[9:]}, last round", "", last(x)) for key, x in measured.items() if key.startswith("training.")]
    return recorded + [
        (
            f"{LABELS.get(name, name)}, {part}",
            *(last(measured[f"{prefix}{when}.{name}"]) for when in ("before", "after")),
        )
        for name in dict.fromkeys(key.partition(".")[2] for key in measured)
        for prefix, part in (("", "training agents"), ("held_out_", "held-out agents"))
        if f"{prefix}after.{name}" in measured
    ]


def cost(run: Run) -> str:
    """What a run cost each agent, and how long it took where."""
    history, about = run.history, run.provenance
    return (
        f"cost per agent: {history.trajectories[-1]} trajectories, {history.bytes[-1]} bytes sent and received; "
        f"{about['seconds']:.1f} s on {about['device']}"
    )


def fleet(name: str, found: Inspection) -> Table:
    """What agents share, and agent by agent what is its own."""
    own = list(found.own[0])
    shared = ", ".join(f"{key} = {value}" for key, value in found.shared.items())
    table = Table("agent", "part", *own, title=f"{name}: {len(found.own)} agents", caption=f"all: {shared}")
    for i, facts in enumerate(found.own):
        table.add_row(str(i), "training" if i < found.agents else "held out", *(escape(facts[key]) for key in own))
    return table


def fleet_cost(found: Inspection) -> str:
    """What a round costs an agent."""
    return (
        f"the policy has {found.parameters} parameters; a round costs each agent {found.trajectories} trajectories "
        f"and {found.bytes} bytes"
    )


def runs(finished: Iterable[Run]) -> Table:
    """Finished runs, one a row."""
    date = Column("finished", no_wrap=True)
    table = Table(Column("run", no_wrap=True), "rounds", "seeds", "return after", "seconds", date)
    for run in finished:
        counts = str(run.config.rounds), str(len(run.config.seeds))
        after = f"{over_agents(run.history.after[:, -1]).mean():.3f}"
        table.add_row(
            run.folder.name, *counts, after, f"{run.provenance['seconds']:.1f}", run.provenance["finished"][:10]
        )
    return table


def agents(name: str, rows: Sequence[AgentReturn]) -> Table:
    """Every agent's return before and after its adaptation step, beside its optimum."""
    table = Table("agent", "part", "before", "after", "optimum", title=f"{name}: expected return, 95 % intervals")
    for row in rows:
        best = "not known" if row.optimum is None else f"{row.optimum:.3f}"
        table.add_row(str(row.agent), row.part, interval(row.before), interval(row.after), best)
    return table


def assessment(name: str, found: Assessment) -> Table:
    """What agents get step by step, on average and the worst of them."""
    title = f"{name}, {found.part} agents, {found.start}: 95 % bootstrap intervals over seeds"
    table = Table("", Column("steps", justify="right"), "mean over agents", "worst agent", title=title)
    short = lambda x: f"{x.mean:.4g} ({x.low:.4g} .. {x.high:.4g})"  # noqa: E731
    rows = found.rows
    for outcome in sorted(found.outcomes, key=lambda x: (x != "return", x)):
        for row in rows:
            label = LABELS.get(outcome, outcome) if row.steps == 0 else ""
            table.add_row(label, str(row.steps), short(row.mean[outcome]), short(row.worst[outcome]))
        table.add_section()
    return table


def assessment_cost(found: Assessment) -> str:
    """What the initialization cost, what a new agent receives, and what a step costs it."""
    sampled = f"takes {found.trajectories} trajectories" if found.trajectories else "is exact and samples nothing"
    return (
        f"training cost each agent {found.trained} trajectories and {found.exchanged} bytes; "
        f"a new agent receives {found.received} bytes, and each of its steps {sampled}"
    )


def personalized(own: Personalized) -> Table:
    """What an agent's own policy is worth to it, beside the initialization."""
    table = Table("", "before", "after", title=f"{own.agent}: means of fresh episodes, 95 % intervals")
    for name in ("return", *sorted(set(own.before) - {"return"})):
        table.add_row(LABELS.get(name, name), interval(own.before[name]), interval(own.after[name]))
    return table


def personal_cost(own: Personalized) -> str:
    """What personalizing cost the agent."""
    each = f"{own.steps} steps of {own.trajectories} trajectories" if own.steps > 1 else "one step"
    return f"cost: {own.cost} trajectories of the agent ({each}, alpha = {own.alpha:g}), from seed {own.seed}"


def demo(rows: Sequence[Row], seeds: int) -> Table:
    """The demonstration's result: personalized beside from scratch, at the same cost."""
    title = f"three unseen agents, mean of {seeds} seed{'s' if seeds > 1 else ''}"
    table = Table(*(Column(name, justify="right") for name in DEMO_HEADER), title=title)
    for row in rows:
        table.add_row(*demo_cells(row))
    return table


def demo_cells(row: Row) -> tuple[str, ...]:
    numbers = row.personalized_return, row.personalized_success, row.scratch_return, row.scratch_success
    shown = [f"{x.mean:.0%}" if i % 2 else f"{x.mean:.2f}" for i, x in enumerate(numbers)]
    return str(row.trajectories) if row.trajectories else "none", *shown


def claims(checked: Sequence[Claim], runs: Sequence[Run]) -> Table:
    """The paper's numbers beside ours, and how many seeds were trained, if any."""
    caption = f"{sum(claim.met for claim in checked)} of {len(checked)} claims met"
    table = Table(*CLAIMS_HEADER, title=seeds(runs) if runs else None, caption=caption)
    for claim in checked:
        *cells, met = claim_cells(claim)
        table.add_row(*cells, met if claim.met else f"[red]{met}[/]")
    return table


def seeds(runs: Sequence[Run]) -> str:
    """How many seeds some runs have."""
    return " or ".join(map(str, sorted({len(run.config.seeds) for run in runs}))) + " seeds"


def claim_cells(c: Claim) -> tuple[str, ...]:
    """A claim as a row."""
    measured = number(c.measured), span(c.low, c.high)
    return c.experiment, c.claim, "–" if np.isnan(c.paper) else f"{c.paper:g}", *measured, "yes" if c.met else "no"


def parts(registry: Registry) -> Table:
    """The entries of a registry, with their parameters and the first line of what they say of themselves."""
    table = Table("name", "parameters (and defaults)", "what")
    for name, factory in registry.items():
        about = escape((factory.__doc__ or "").strip().partition("\n")[0])
        taken = [key + default(p) for key, p in registry.parameters(name).items() if key not in ("fleet", "agent")]
        table.add_row(name, escape(", ".join(taken)), about)
    return table


def titles(named: Mapping[str, Any]) -> Table:
    """Things with a title, by name."""
    table = Table("name", "what")
    for name, item in named.items():
        table.add_row(name, item.title)
    return table


def interval(x: Interval) -> str:
    """A mean with its interval."""
    return f"{x.mean:.3f} ({span(x.low, x.high)})"


def default(parameter: Any) -> str:
    return "" if parameter.default is parameter.empty else f"={parameter.default}"


def number(value: float) -> str:
    """A number with three decimals, whole where it is large, with a power of ten where decimals show nothing."""
    if 0 < abs(value) < 5e-4:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def span(low: float, high: float) -> str:
    """An interval; a number without one has none to show."""
    if low == high:
        return "–"
    return f"{number(low)} .. {number(high)}" if np.isfinite([low, high]).all() else "unbounded"
