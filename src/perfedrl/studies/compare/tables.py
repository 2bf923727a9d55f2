"""Tables of comparisons: measures, differences from the reference, tuning and costs."""

from collections.abc import Sequence

import numpy as np

from perfedrl.experiments.stats import Interval, bootstrap_interval
from perfedrl.report import page
from perfedrl.report.terminal_table import Column, TerminalTable
from perfedrl.studies.compare import Comparison, find_method
from perfedrl.studies.compare.own_methods import in_order

REFERENCE = "per-fedavg-pg"
TRAINING, UNSEEN = ("training", "gap to the optimum"), "unseen, "
MOST_COLUMNS = 5
"""The largest number of measures in a table of the page, so that it is not wider than the page."""
LEFT_OUT = ("gap to the optimum", f"{UNSEEN}0")
"""Measures without a column of differences: the gap differs as the return does, and the other needs no step."""
BUDGET = 50
"""The budget of unseen agents that figures show, where the plan has it."""


def measured(comparison: Comparison) -> dict[str, dict[str, np.ndarray]]:
    """The measures of each method by seed, the best for training agents first, diverged methods last."""
    found = {name: comparison.measures(name) for name in comparison.entries}
    means = {name: np.nan_to_num(own["training"].mean(), nan=-np.inf) for name, own in found.items()}
    return {name: found[name] for name in sorted(found, key=lambda name: means[name], reverse=True)}


def columns(comparison: Comparison) -> list[str]:
    """The measures that at least one method has, in order."""
    return list(dict.fromkeys(key for found in measured(comparison).values() for key in found))


def unseen_columns(comparison: Comparison) -> list[str]:
    """The measures of unseen agents, from the smallest to the largest budget."""
    return [name for name in columns(comparison) if name.startswith(UNSEEN)]


def unseen_measure(comparisons: Sequence[Comparison]) -> str | None:
    """The measure of unseen agents that figures show: at `BUDGET`, or at the largest budget that all fleets have."""
    first, *others = (unseen_columns(comparison) for comparison in comparisons)
    common = [name for name in first if all(name in own for own in others)]
    wanted = f"{UNSEEN}{BUDGET}"
    return wanted if wanted in common else common[-1] if common else None


def shown(comparison: Comparison) -> list[str]:
    """The measures on the terminal: training agents, and unseen ones at the least, the shown and the largest budget."""
    unseen, chosen = unseen_columns(comparison), unseen_measure([comparison])
    wanted = [*TRAINING, *unseen[:1], *([chosen] if chosen else []), *unseen[-1:]]
    return [name for name in dict.fromkeys(wanted) if name in columns(comparison)]


def terminal(comparison: Comparison) -> TerminalTable:
    """Means over seeds as a table for the terminal, with methods by the names that `--only` takes."""
    names = shown(comparison)
    missing = f"no results yet: {', '.join(comparison.missing)}" if comparison.missing else None
    title = f"{comparison.plan.name}: mean return over {comparison.plan.seeds} seeds"
    table = TerminalTable(Column("method", no_wrap=True), *names, title=title, caption=missing)
    for name, found in measured(comparison).items():
        table.add_row(name, *(number(found.get(key)) for key in names))
    return table


def lines(comparisons: Sequence[Comparison], measure: str) -> list[str]:
    """One measure of all methods on all fleets as a Markdown table: means over seeds, the best in bold."""
    found = [measured(comparison) for comparison in comparisons]

    def mean(own: dict[str, dict[str, np.ndarray]], method: str) -> float:
        return own[method][measure].mean() if method in own and measure in own[method] else np.nan

    def cell(x: float, top: float) -> str:
        return "" if np.isnan(x) else f"**{x:.2f}**" if x >= top - 0.005 else f"{x:.2f}"

    values = {m: np.asarray([mean(own, m) for own in found]) for m in in_order(m for own in found for m in own)}
    best = np.nanmax(list(values.values()), axis=0)
    head = ["method", *(comparison.plan.name for comparison in comparisons)]
    rows = [
        [find_method(m).title, *(cell(x, top) for x, top in zip(row, best, strict=True))]
        for m, row in values.items()
        if not np.isnan(row).all()
    ]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def results(comparison: Comparison) -> list[page.PageTable]:
    """All measures with bootstrap intervals: tables of training agents and of unseen agents, each fits the page."""
    every, unseen = columns(comparison), unseen_columns(comparison)
    trained = [name for name in every if name not in unseen]
    notes = (
        "Mean over test seeds with 95 % bootstrap intervals. 'curve by ...': mean height of the learning curve up to a "
        "cost that all reach.",
        "Mean over test seeds with 95 % bootstrap intervals. 'unseen, m': agents that took no part, after m of their "
        "own trajectories.",
    )
    parts = [("training agents", trained, notes[0])]
    parts += [("unseen agents", unseen[i : i + MOST_COLUMNS], notes[1]) for i in range(0, len(unseen), MOST_COLUMNS)]
    return [part_of_results(comparison, *part) for part in parts]


def part_of_results(comparison: Comparison, agents: str, names: Sequence[str], note: str) -> page.PageTable:
    """Some of the measures with bootstrap intervals; methods that have none of them are left out."""
    rows = [
        (find_method(method).title, *(interval(found[key]) if key in found else "" for key in names))
        for method, found in measured(comparison).items()
        if any(key in found for key in names)
    ]
    return page.PageTable(f"{comparison.plan.name}: {agents}", ("method", *names), rows, note)


def differences(comparison: Comparison) -> page.PageTable:
    """The lead of each method over Per-FedAvg-PG with paired bootstrap intervals over seeds."""
    found, names = measured(comparison), [name for name in shown(comparison) if name not in LEFT_OUT]
    if REFERENCE not in found:
        return page.PageTable(f"{comparison.plan.name}: differences", ("method",), [])
    base = found[REFERENCE]

    def ahead(own: dict[str, np.ndarray], key: str) -> str:
        return interval(own[key] - base[key]) if key in own and key in base else ""

    rows = [
        (find_method(method).title, *(ahead(own, key) for key in names))
        for method, own in found.items()
        if method != REFERENCE
    ]
    note = "Mean difference over test seeds with a 95 % paired bootstrap interval; positive is ahead."
    title = f"{comparison.plan.name}: ahead of {find_method(REFERENCE).title}"
    return page.PageTable(title, ("method", *names), rows, note)


def tuned(comparison: Comparison) -> page.PageTable:
    """The number of trials, the chosen settings and the cost on the test seeds of each method."""
    rows = []
    for name, entry in comparison.entries.items():
        chosen = ", ".join(f"{key} = {value:g}" for key, value in entry.settings.items())
        scores = [trial.score for trial in entry.trials if np.isfinite(trial.score)]
        failed = len(entry.trials) - len(scores)
        tried = f"{len(entry.trials)}" + (f", {failed} diverged" if failed else "")
        best = f"{max(scores):.3f}" if scores else "none"
        cost = f"{entry.trajectories[-1]:,.0f}", f"{entry.bytes[-1]:,.0f}"
        rows.append((find_method(name).title, tried, chosen, best, *cost))
    header = (
        "method",
        "tried",
        "chosen",
        "score on tuning agents",
        "trajectories per agent",
        "bytes per agent",
    )
    return page.PageTable(f"{comparison.plan.name}: tuning and cost", header, rows)


def absent(comparison: Comparison) -> page.PageTable:
    """The methods that do not work with the fleet, and why."""
    rows = [(find_method(name).title, why) for name, why in comparison.plan.unfit.items()]
    return page.PageTable(f"{comparison.plan.name}: not compared", ("method", "why"), rows)


def winners(comparisons: Sequence[Comparison], measure: str) -> list[tuple[str, str, Interval]]:
    """The best method of each comparison under a measure: fleet, method, interval."""
    found = []
    for comparison in comparisons:
        means = {
            name: own[measure] for name, own in measured(comparison).items() if measure in own and finite(own[measure])
        }
        if not means:
            continue
        best = max(means, key=lambda name: means[name].mean())
        found.append((comparison.plan.name, find_method(best).title, bootstrap_interval(means[best])))
    return found


def finite(values: np.ndarray) -> bool:
    """Whether all values are finite."""
    return bool(np.isfinite(values).all())


def number(values: np.ndarray | None) -> str:
    """The mean as text, empty where there is none."""
    return "" if values is None or not finite(values) else f"{values.mean():.3f}"


def interval(values: np.ndarray) -> str:
    """The mean with its bootstrap interval as text."""
    if not finite(values):
        return "none"
    found = bootstrap_interval(values)
    return f"{found.mean:.3f} ({found.low:.3f}, {found.high:.3f})"
