"""Tables for the terminal: runs, fleets, agents, assessments, registries."""

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

LABELS = {"success": "success rate", "distance": "final distance"}


def summary(run: Run) -> Table:
    """Returns at a run's last evaluation, of training agents and of held-out agents."""
    table = Table("", "before adaptation", "after adaptation", title=run.folder.name)
    for row in final_outcomes(run):
        table.add_row(*row)
    return table


def over_agents(values: Any) -> Any:
    """The mean over the agents that reported a value; over a network some may be absent or report nothing."""
    said = ~np.isnan(values)
    return np.where(said, values, 0).sum(axis=-1) / np.where(said.any(axis=-1), said.sum(axis=-1), np.nan)


def final_outcomes(run: Run) -> list[tuple[str, ...]]:
    """The rows of `summary`: returns and the tasks' other outcomes, of training agents and of held-out agents."""
    history = run.history
    returns = {f"{when}.return": getattr(history, when) for when in ("before", "after")}
    if history.held_out_after.shape[-1]:
        returns |= {f"held_out_{when}.return": getattr(history, f"held_out_{when}") for when in ("before", "after")}
    measured = returns | dict(history.outcomes)

    def last(values: Any) -> str:
        return interval(mean_interval(over_agents(values[:, -1])))

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
    """Trajectories and bytes that a run cost each agent, its wall time and its device."""
    history, about = run.history, run.provenance
    return (
        f"cost per agent: {history.trajectories[-1]} trajectories, {history.bytes[-1]} bytes sent and received; "
        f"{about['seconds']:.1f} s on {about['device']}"
    )


def fleet(name: str, found: Inspection) -> Table:
    """The parameters of each agent, and those that all agents share as the caption."""
    own = list(found.own[0])
    shared = ", ".join(f"{key} = {value}" for key, value in found.shared.items())
    table = Table("agent", "part", *own, title=f"{name}: {len(found.own)} agents", caption=f"all: {shared}")
    for i, facts in enumerate(found.own):
        table.add_row(str(i), "training" if i < found.agents else "held out", *(escape(facts[key]) for key in own))
    return table


def fleet_cost(found: Inspection) -> str:
    """The number of parameters, and the cost of a round for one agent."""
    return (
        f"the policy has {found.parameters} parameters; a round costs each agent {found.trajectories} trajectories "
        f"and {found.bytes} bytes"
    )


def runs(finished: Iterable[Run]) -> Table:
    """Finished runs, one per row."""
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
    """Each agent's return before and after its adaptation step, and its optimum."""
    table = Table("agent", "part", "before", "after", "optimum", title=f"{name}: expected return, 95 % intervals")
    for row in rows:
        best = "not known" if row.optimum is None else f"{row.optimum:.3f}"
        table.add_row(str(row.agent), row.part, interval(row.before), interval(row.after), best)
    return table


def assessment(name: str, found: Assessment) -> Table:
    """Outcomes after each adaptation step: the mean over agents and the worst agent."""
    title = f"{name}, {found.part} agents, {found.start}: 95 % bootstrap intervals over seeds"
    table = Table("", Column("steps", justify="right"), "mean over agents", "worst agent", title=title)

    def short(x: Interval) -> str:
        return f"{x.mean:.4g} ({x.low:.4g} .. {x.high:.4g})"

    rows = found.rows
    for outcome in sorted(found.outcomes, key=lambda x: (x != "return", x)):
        for row in rows:
            label = LABELS.get(outcome, outcome) if row.steps == 0 else ""
            table.add_row(label, str(row.steps), short(row.mean[outcome]), short(row.worst[outcome]))
        table.add_section()
    return table


def assessment_cost(found: Assessment) -> str:
    """The cost of training, of sending the initialization to a new agent, and of one of its steps."""
    sampled = f"takes {found.trajectories} trajectories" if found.trajectories else "is exact and samples nothing"
    return (
        f"training cost each agent {found.trained} trajectories and {found.exchanged} bytes; "
        f"a new agent receives {found.received} bytes, and each of its steps {sampled}"
    )


def personalized(own: Personalized) -> Table:
    """An agent's outcomes before and after personalization."""
    table = Table("", "before", "after", title=f"{own.agent}: means of fresh episodes, 95 % intervals")
    for name in ("return", *sorted(set(own.before) - {"return"})):
        table.add_row(LABELS.get(name, name), interval(own.before[name]), interval(own.after[name]))
    return table


def personal_cost(own: Personalized) -> str:
    """The cost of a personalization for the agent."""
    each = f"{own.steps} steps of {own.trajectories} trajectories" if own.steps > 1 else "one step"
    return f"cost: {own.cost} trajectories of the agent ({each}, alpha = {own.alpha:g}), from seed {own.seed}"


def seed_counts(runs: Sequence[Run]) -> str:
    """The number of seeds of some runs, in words."""
    return " or ".join(map(str, sorted({len(run.config.seeds) for run in runs}))) + " seeds"


def parts(registry: Registry) -> Table:
    """The entries of a registry with their parameters and the first line of their docstrings."""
    table = Table("name", "parameters (and defaults)", "what")
    for name, factory in registry.items():
        about = escape((factory.__doc__ or "").strip().partition("\n")[0])
        taken = [key + default(p) for key, p in registry.parameters(name).items() if key not in ("fleet", "agent")]
        table.add_row(name, escape(", ".join(taken)), about)
    return table


def titles(named: Mapping[str, Any]) -> Table:
    """Names and titles of named items."""
    table = Table("name", "what")
    for name, item in named.items():
        table.add_row(name, item.title)
    return table


def interval(x: Interval) -> str:
    """A mean with its interval as text."""
    return f"{x.mean:.3f} ({span(x.low, x.high)})"


def default(parameter: Any) -> str:
    """A parameter's default as it stands in a signature."""
    return "" if parameter.default is parameter.empty else f"={parameter.default}"


def number(value: float) -> str:
    """A number with three decimals; without decimals from 100 on, in scientific notation below 5e-4."""
    if 0 < abs(value) < 5e-4:
        return f"{value:.1e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}"


def span(low: float, high: float) -> str:
    """An interval as text, "–" where it is a single point."""
    if low == high:
        return "–"
    return f"{number(low)} .. {number(high)}" if np.isfinite([low, high]).all() else "unbounded"
