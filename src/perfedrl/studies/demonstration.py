"""The demonstration: unseen agents personalize a meta-trained initialization, compared with training from scratch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.table import Column, Table

from perfedrl.experiments.config import Config
from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.experiments.store import Run
from perfedrl.report import page
from perfedrl.report.run_figures import learning
from perfedrl.report.run_page import provenance_facts
from perfedrl.studies.few_shot.study import recommended
from perfedrl.studies.paper_neural.figures import by_budget, rollouts
from perfedrl.studies.paper_neural.study import META, SCRATCH_SHOWN, rollout_configs

SEEDS = 5
BUDGETS = (0, 20, 100, 200)
HEADER = ("trajectories", "return, personalized", "success", "return, from scratch", "success")


class BudgetRow(NamedTuple):
    """Return and success rate of unseen agents at one budget, personalized and from scratch."""

    trajectories: int
    personalized_return: Interval
    personalized_success: Interval
    scratch_return: Interval
    scratch_success: Interval

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        numbers = self.personalized_return, self.personalized_success, self.scratch_return, self.scratch_success
        shown = [f"{x.mean:.0%}" if i % 2 else f"{x.mean:.2f}" for i, x in enumerate(numbers)]
        return str(self.trajectories) if self.trajectories else "none", *shown


def configs(seeds: int) -> dict[str, Config]:
    """The recommended meta-training on the arc, and the held-out agents alone with up to 200 trajectories."""
    return {**rollout_configs(seeds, True), META: recommended(seeds)}


def rows(runs: Mapping[str, Run]) -> list[BudgetRow]:
    """One row per budget, means over the three unseen agents and over seeds."""
    deployed, scratch = runs[META].deployed, runs[SCRATCH_SHOWN].history
    table = []
    for budget in BUDGETS:
        (at,) = np.flatnonzero(scratch.trajectories == budget)
        alone = scratch.after[:, at].mean(axis=-1), scratch.outcomes["after.success"][:, at].mean(axis=-1)
        values = deployed.at("return", budget), deployed.at("success", budget), *alone
        table.append(BudgetRow(budget, *(mean_interval(x) for x in values)))
    return table


def terminal_table(rows: Sequence[BudgetRow], seeds: int) -> Table:
    """The result as a table for the terminal."""
    title = f"three unseen agents, mean of {seeds} seed{'s' if seeds > 1 else ''}"
    table = Table(*(Column(name, justify="right") for name in HEADER), title=title)
    for row in rows:
        table.add_row(*row.cells)
    return table


def demonstration_page(runs: Mapping[str, Run], command: str) -> page.Report:
    """The page of the demonstration: the table, success by budget, episodes, and the learning curve."""
    table = rows(runs)
    meta, scratch = runs[META], runs[SCRATCH_SHOWN]
    result = page.Table(
        "What an unseen agent gets",
        HEADER,
        [row.cells for row in table],
        note="Mean over three agents that took no part in training and over seeds. The best possible return is 4.32.",
    )
    first, last = table[0], table[-1]
    return page.Report(
        title="Personalized federated reinforcement learning, demonstrated",
        summary=f"Six agents with goals on an arc learned one policy initialization together. An agent that never took "
        f"part reaches its goal in {first.personalized_success.mean:.0%} of episodes with it as it is, and in "
        f"{last.personalized_success.mean:.0%} after one policy-gradient step from {last.trajectories} trajectories; "
        f"learning from scratch with as many reaches it in {last.scratch_success.mean:.0%}.",
        command=command,
        facts=provenance_facts(meta),
        tables=[result],
        plots=[by_budget("success", "success", meta, scratch), *rollouts(runs), learning(meta)[0]],
        runs=[meta, scratch],
    )
