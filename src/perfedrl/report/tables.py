"""Tables for the terminal: runs, fleets, agents, assessments, registries."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.markup import escape

from perfedrl.experiments.assessment import Assessment
from perfedrl.experiments.evaluate import AgentReturn, StepLosses, losses_of_run, step_losses
from perfedrl.experiments.inspection import Inspection
from perfedrl.experiments.personalize import Personalized
from perfedrl.experiments.run_list import FinishedRun
from perfedrl.experiments.stats import Interval, how_many, outcome_interval, over_agents
from perfedrl.experiments.store import Run, made_or_read
from perfedrl.memory import readable
from perfedrl.registry import Registry
from perfedrl.report.terminal_table import Column, TerminalTable
from perfedrl.simulation.failures import sentences

MOST_NAMED = 4
"""The largest number of agents that a sentence names."""

MOST_LINES = 8
"""The largest number of agents whose failures are listed."""

LABELS = {"success": "success rate", "distance": "final distance"}


def summary(run: Run) -> TerminalTable:
    """Outcomes at a run's last evaluation, of training agents and of held-out agents, and who lost by their step."""
    table = TerminalTable(
        "", "before adaptation", "after adaptation", title=run.folder.name, caption=losses(losses_of_run(run))
    )
    for row in final_outcomes(run):
        table.add_row(*row)
    return table


def final_outcomes(run: Run) -> list[tuple[str, ...]]:
    """The rows of `summary`: returns and the tasks' other outcomes, of training agents and of held-out agents."""
    history = run.history
    returns = {f"{when}.return": getattr(history, when) for when in ("before", "after")}
    if history.held_out_after.shape[-1]:
        returns |= {f"held_out_{when}.return": getattr(history, f"held_out_{when}") for when in ("before", "after")}
    measured = returns | dict(history.outcomes)

    def last(key: str) -> str:
        return interval(outcome_interval(key.partition(".")[2], over_agents(measured[key][:, -1])))

    recorded = [(f"{key[9:]}, last round", "", last(key)) for key in measured if key.startswith("training.")]
    return recorded + [
        (
            f"{LABELS.get(name, name)}, {how_many(measured[f'{prefix}after.{name}'][:, -1], part)}",
            *(last(f"{prefix}{when}.{name}") for when in ("before", "after")),
        )
        for name in dict.fromkeys(key.partition(".")[2] for key in measured)
        for prefix, part in (("", "training agents"), ("held_out_", "held-out agents"))
        if f"{prefix}after.{name}" in measured
    ]


def losses(found: StepLosses, steps: int = 1) -> str:
    """The agents that lose by their step, or by several steps, in words."""
    count, taken = len(found.lost), "step" if steps == 1 else f"{steps} steps"
    if not found.agents:
        return ""
    if not count:
        return f"none of {found.agents} agents lost by its {taken}"
    named = ", ".join(f"agent {x.agent} ({number(x.before)} -> {number(x.after)})" for x in found.lost[:MOST_NAMED])
    more = ", ..." if count > MOST_NAMED else ""
    return f"{count} of {found.agents} agents lost by {'its' if count == 1 else 'their'} {taken}: {named}{more}"


def cost(run: Run) -> str:
    """Trajectories and bytes that a run cost each agent, its wall time and its device."""
    history, about = run.history, run.provenance
    return (
        f"cost per agent: {history.trajectories[-1]} trajectories, {history.bytes[-1]} bytes sent and received; "
        f"{about['seconds']:.1f} s on {about['device']}"
    )


def failures(provenance: Mapping[str, Any]) -> list[str]:
    """What failed while a run's agents were played, one sentence per agent, at most eight; empty if nothing failed."""
    found = sentences(provenance.get("failures", {}))
    more = len(found) - MOST_LINES
    return found if more <= 0 else [*found[:MOST_LINES], f"and {more} more agents; provenance.json has the counts"]


def cost_and_folder(run: Run) -> str:
    """The cost of a run, whether it was trained or read from disk, and its folder."""
    kept = f"{run.kept}\n" if run.kept else ""
    return f"{cost(run)}\n{kept}{run.origin}; {'it is' if run.from_disk else 'saved'} in {run.folder}"


def origins(runs: Sequence[Run]) -> str:
    """How many of some runs were trained and how many were read from disk, and when those were trained."""
    dates = sorted(run.provenance["finished"][:10] for run in runs if run.from_disk)
    return made_or_read("runs", len(runs) - len(dates), dates)


def fleet(name: str, found: Inspection) -> TerminalTable:
    """The parameters of each agent, and those that all agents share as the caption."""
    own = list(found.own[0])
    shared = ", ".join(f"{key} = {value}" for key, value in found.shared.items())
    table = TerminalTable("agent", "part", *own, title=f"{name}: {len(found.own)} agents", caption=f"all: {shared}")
    for i, facts in enumerate(found.own):
        table.add_row(str(i), "training" if i < found.agents else "held out", *(escape(facts[key]) for key in own))
    return table


def fleet_cost(found: Inspection) -> str:
    """The number of parameters, and the cost of a round for one agent."""
    return (
        f"the policy has {found.parameters} parameters; a round costs each agent {found.trajectories} trajectories "
        f"and {found.bytes} bytes; training takes about {readable(found.memory)} of memory"
    )


def new_agent(found: Inspection) -> str:
    """The settings of a new agent, with the values of the fleet's agents."""
    if not found.new_agent:
        return "a new agent cannot be made by settings, only in Python: pf.personalize(run, task=...)"
    return f"a new agent, personalize RUN --set NAME=VALUE, has {found.new_agent}"


def runs(finished: Iterable[FinishedRun]) -> TerminalTable:
    """Finished runs, one per row."""
    date = Column("finished", no_wrap=True)
    table = TerminalTable(Column("run", no_wrap=True), "rounds", "seeds", "return after", "seconds", date)
    for run in finished:
        counts = str(run.rounds), str(len(run.seeds))
        last = run.history.after[:, -1]
        few = how_many(last, "agents")
        after = f"{over_agents(last).mean():.3f}" + ("" if few == "agents" else f" ({few})")
        table.add_row(
            run.folder.name, *counts, after, f"{run.provenance['seconds']:.1f}", run.provenance["finished"][:10]
        )
    return table


def agents(name: str, rows: Sequence[AgentReturn]) -> TerminalTable:
    """Each agent's return before and after its adaptation step, and its optimum where one is known."""
    title = f"{name}: expected return, 95 % intervals"
    lost = losses(step_losses([row.before.mean for row in rows], [row.after.mean for row in rows]))
    known = ["optimum"] if any(row.optimum is not None for row in rows) else []
    table = TerminalTable("agent", "part", "before", "after", *known, title=title, caption=lost)
    for row in rows:
        best = "not known" if row.optimum is None else f"{row.optimum:.3f}"
        table.add_row(str(row.agent), row.part, interval(row.before), interval(row.after), *([best] if known else []))
    return table


def assessment(name: str, found: Assessment) -> TerminalTable:
    """Outcomes after each adaptation step: the mean over agents and the worst agent."""
    who = how_many(found.outcomes["return"], f"{found.part} agents")
    title = f"{name}, {who}, {found.start}: 95 % bootstrap intervals over seeds"
    table = TerminalTable("", Column("steps", justify="right"), "mean over agents", "worst agent", title=title)

    def short(x: Interval) -> str:
        return f"{x.mean:.4g} ({x.low:.4g} .. {x.high:.4g})" if np.isfinite(x).all() else interval(x)

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


def personalized(own: Personalized) -> TerminalTable:
    """An agent's outcomes before and after personalization."""
    table = TerminalTable("", "before", "after", title=f"{own.agent}: means of fresh episodes, 95 % intervals")
    for name in ("return", *sorted(set(own.before) - {"return"})):
        table.add_row(LABELS.get(name, name), interval(own.before[name]), interval(own.after[name]))
    return table


def personal_cost(own: Personalized) -> str:
    """The cost of a personalization for the agent."""
    each = f"{own.steps} steps of {own.trajectories} trajectories" if own.steps > 1 else "one step"
    count = len(own.earlier)
    before = f", after {count} earlier adaptation{'s' if count > 1 else ''}" if count else ""
    return f"cost: {own.cost} trajectories of the agent ({each}, alpha = {own.alpha:g}), from seed {own.seed}{before}"


def seed_counts(runs: Sequence[Run]) -> str:
    """The number of seeds of some runs, in words."""
    return " or ".join(map(str, sorted({len(run.config.seeds) for run in runs}))) + " seeds"


def parts(registry: Registry) -> TerminalTable:
    """The entries of a registry with their parameters and the first line of their docstrings."""
    table = TerminalTable("name", "parameters (and defaults)", "what")
    for name, factory in registry.items():
        taken = [key + default(p) for key, p in own_parameters(registry, name).items()]
        table.add_row(name, escape(", ".join(taken)), escape(first_sentence(factory)))
    return table


def own_parameters(registry: Registry, name: str) -> dict[str, Any]:
    """The parameters of an entry that a config can set."""
    return {key: p for key, p in registry.parameters(name).items() if key not in ("fleet", "agent")}


def first_sentence(documented: Any) -> str:
    """The first line of a docstring."""
    return (documented.__doc__ or "").strip().partition("\n")[0]


def titles(named: Mapping[str, Any]) -> TerminalTable:
    """Names and titles of named items."""
    table = TerminalTable("name", "what")
    for name, item in named.items():
        table.add_row(name, item.title)
    return table


def interval(x: Interval) -> str:
    """A mean with its interval as text."""
    if np.isnan(x.mean):
        return "not measured"
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
    """An interval as text, "–" where it is a single point; one seed has no interval."""
    if low == high:
        return "–"
    return f"{number(low)} .. {number(high)}" if np.isfinite([low, high]).all() else "no interval"
