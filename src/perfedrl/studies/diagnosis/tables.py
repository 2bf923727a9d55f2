"""Tables, figures and the page of a diagnosis."""

from typing import Any

import numpy as np

from perfedrl.experiments.stats import Interval
from perfedrl.report import page
from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, Axis, HeatMap, Level, Lines, Plot, Series
from perfedrl.report.terminal_table import TerminalTable
from perfedrl.studies.diagnosis.diagnosis import Diagnosis
from perfedrl.studies.diagnosis.recommendation import advice, answer, as_toml, config_tables

HEADER = ("what", "value", "95 % interval")
AGENTS = ("agent", "untrained", "one policy for all", "policy of its own", "gain", "one step")


def numbers(found: Diagnosis) -> list[tuple[str, str, str]]:
    """What the diagnosis measured, a row each."""
    verdict, returns = found.verdict, found.verdict.returns

    def row(what: str, x: Interval) -> tuple[str, str, str]:
        return what, f"{x.mean:.3g}", "exact" if returns.exact and x is verdict.gain else f"{x.low:.3g} .. {x.high:.3g}"

    def mean(what: str, x: np.ndarray) -> tuple[str, str, str]:
        return what, f"{x.mean():.3g}", ""

    rows = [
        mean("return of the untrained policy", returns.untrained),
        mean("return of one policy for all", returns.shared),
        mean("return of policies of their own", returns.own),
        row("gain of perfect personalization", verdict.gain),
    ]
    for m, gain in verdict.step_gains.items():
        rows.append(row(f"gain of one step from {m} trajectories", gain))
    for m, gain in verdict.tuning_gains.items():
        rows.append(row(f"gain of ten steps of fine-tuning from {m}", gain))
    for m, alone in verdict.alone_from.items():
        from_ = f"not within {int(returns.spent[-1])}" if alone is None else f"{alone}"
        rows.append((f"learning alone beats one step from {m} after", from_, ""))
    rows.append(("groups of agents that one policy each serves", str(len(verdict.groups)), ""))
    return rows


def agents(found: Diagnosis) -> list[tuple[str, ...]]:
    """The returns of each agent, the one that gains most first; one step is from the largest budget."""
    returns = found.verdict.returns
    columns = [x.mean(axis=0) for x in (returns.untrained, returns.shared, returns.own)]
    gain, stepped = columns[2] - columns[1], returns.adapted[:, -1].mean(axis=0)
    order = np.argsort(-gain)
    return [(found.labels[i], *(f"{x[i]:.3g}" for x in (*columns, gain, stepped))) for i in order]


def terminal(found: Diagnosis) -> list[TerminalTable]:
    """The tables for the terminal."""
    title = f"{found.name}: {found.chosen}, {found.seeds} seeds, {found.trajectories} trajectories per agent and policy"
    first, second = TerminalTable(*HEADER, title=title), TerminalTable(*AGENTS, title="returns by agent")
    for row in numbers(found):
        first.add_row(*row)
    for line in agents(found):
        second.add_row(*line)
    return [first, second]


def content(found: Diagnosis) -> dict[str, Any]:
    """What `--json` writes."""
    verdict, returns = found.verdict, found.verdict.returns
    return {
        "name": found.name,
        "needed": verdict.needed,
        "answer": answer(found),
        "recommendation": verdict.recommendation,
        "advice": advice(found),
        "config": config_tables(found),
        "exact": returns.exact,
        "worth_of_learning": verdict.scale,
        "gain": verdict.gain._asdict(),
        "step_gains": {str(m): gain._asdict() for m, gain in verdict.step_gains.items()},
        "tuning_gains": {str(m): gain._asdict() for m, gain in verdict.tuning_gains.items()},
        "alone_from": {str(m): alone for m, alone in verdict.alone_from.items()},
        "groups": [[found.labels[i] for i in group] for group in verdict.groups],
        "agents": list(found.labels),
        "losses": verdict.losses.tolist(),
    }


def figures(found: Diagnosis) -> list[Plot]:
    """The transfer matrix, agents in the order of their groups, and the returns over an agent's own trajectories."""
    verdict, returns = found.verdict, found.verdict.returns
    order = [i for group in verdict.groups for i in group]
    losses = HeatMap(
        f"{found.name}-transfer",
        "What an agent (column) loses by another agent's policy (row), of what learning is worth to it",
        "policy of agent",
        "used by agent",
        tuple(found.labels[i] for i in order),
        verdict.losses[np.ix_(order, order)],
        tuple(map(len, verdict.groups)) if len(verdict.groups) > 1 else (),
    )
    ticks = sorted({0, *returns.budgets.tolist(), int(returns.spent[-1])})
    own = Lines(
        f"{found.name}-trajectories",
        "Return over an agent's own trajectories",
        Axis.budgets("trajectories of the agent's own", ticks),
        "return, mean over agents",
        (
            Series("one step from an initialization", returns.budgets, returns.adapted.mean(axis=-1), BLUE),
            Series("worst agent of these", returns.budgets, returns.adapted.min(axis=-1), BLUE, dashed=True),
            Series("fine-tuning of one policy for all", returns.budgets, returns.tuned.mean(axis=-1), PINK),
            Series("learning alone", returns.spent, returns.alone.mean(axis=-1), ORANGE),
        ),
        tuple(range(found.seeds)),
        (
            Level("policies of their own", float(returns.own.mean()), GREEN),
            Level("one policy for all", float(returns.shared.mean()), GREY),
        ),
    )
    return [losses, own]


def diagnosis_page(found: Diagnosis, command: str) -> page.Report:
    """The page of a diagnosis."""
    made = "computed exactly" if found.verdict.returns.exact else "trained"
    facts = {
        "agents": found.chosen,
        "policies": f"{made}, {found.trajectories} trajectories per agent and policy, {found.seeds} seeds",
        "config": as_toml(found).replace("\n", "; "),
    }
    shown = [
        page.PageTable("Numbers", HEADER, numbers(found), "Returns and gains are means over agents."),
        page.PageTable("Agents", AGENTS, agents(found), "The agent that gains most is first."),
    ]
    summary = f"Does this fleet need personalization? {answer(found)}. Recommended: {advice(found)}."
    return page.Report(f"Diagnosis of {found.name}", summary, command, facts, shown, figures(found))
