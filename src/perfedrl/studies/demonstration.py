"""The demonstration: unseen agents personalize a meta-trained initialization, compared with training from scratch."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from perfedrl.experiments.assessment import assess, worst_agent
from perfedrl.experiments.config import Config
from perfedrl.experiments.evaluate import StepLosses, step_losses
from perfedrl.experiments.store import Run
from perfedrl.report import page
from perfedrl.report.run_figures import learning
from perfedrl.report.run_page import provenance_facts
from perfedrl.report.tables import losses
from perfedrl.report.terminal_table import Column, TerminalTable
from perfedrl.studies.few_shot.study import recommended
from perfedrl.studies.paper_neural.figures import by_budget, rollouts
from perfedrl.studies.paper_neural.study import META, SCRATCH_SHOWN, rollout_configs

SEEDS = 5
BUDGETS = (0, 20, 100, 200)
HEADER = ("trajectories", "return", "success", "worst agent", "success", "scratch", "success")
STEPS, STEP_TRAJECTORIES = 5, 50
"""The alternative to one step: as many steps, from so many trajectories each, at most the cost of the one step."""


class ReturnAndSuccess(NamedTuple):
    """A return and a success rate, means over seeds."""

    value: float
    success: float


class BudgetRow(NamedTuple):
    """Outcomes of unseen agents at one budget: their mean and the worst of them, and their mean from scratch."""

    trajectories: int
    personalized: ReturnAndSuccess
    worst: ReturnAndSuccess
    scratch: ReturnAndSuccess

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        shown = [(f"{x.value:.2f}", percent(x.success)) for x in (self.personalized, self.worst, self.scratch)]
        return str(self.trajectories) if self.trajectories else "none", *(cell for pair in shown for cell in pair)


class AgentRow(NamedTuple):
    """Outcomes of one agent with the shared policy, after one step, and after several steps of the same cost.

    `angle` is the direction of its goal in radians; `at_end` marks the two agents at the ends of the arc. The shared
    policy is measured twice, each time on the episodes that the steps are measured on: `before` goes with `one_step`,
    `before_several` with `several_steps`.
    """

    agent: int
    angle: float
    part: str
    at_end: bool
    before: ReturnAndSuccess
    one_step: ReturnAndSuccess
    before_several: ReturnAndSuccess
    several_steps: ReturnAndSuccess

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        place = f"{self.angle:+.2f}" + (" (end)" if self.at_end else "")
        shown = (f"{x.value:.2f}, {percent(x.success)}" for x in (self.before, self.one_step, self.several_steps))
        return str(self.agent), place, self.part, *shown


def configs(seeds: int) -> dict[str, Config]:
    """The recommended meta-training on the arc, and the held-out agents alone with up to 200 trajectories."""
    return {**rollout_configs(seeds, True), META: recommended(seeds)}


def rows(runs: Mapping[str, Run]) -> list[BudgetRow]:
    """One row per budget: means over seeds, of the three unseen agents and of the worst of them for each seed."""
    deployed, scratch = runs[META].deployed, runs[SCRATCH_SHOWN].history
    table = []
    for budget in BUDGETS:
        (here,), (there,) = (np.flatnonzero(x == budget) for x in (deployed.budgets, scratch.trajectories))
        own = {name: deployed.outcomes[name][:, here] for name in ("return", "success")}
        alone = scratch.after[:, there], scratch.outcomes["after.success"][:, there]
        parts = own.values(), [worst_agent(name, x) for name, x in own.items()], alone
        table.append(BudgetRow(budget, *(ReturnAndSuccess(*(float(x.mean()) for x in part)) for part in parts)))
    return table


def agent_rows(meta: Run) -> list[AgentRow]:
    """Every agent of the fleet, from one end of the arc to the other; measures outcomes after several steps."""
    fleet = meta.config.experiment.fleet
    table = []
    for part, prefix, first, count in (
        ("training", "", 0, fleet.agents),
        ("unseen", "held_out_", fleet.agents, fleet.held_out_agents),
    ):
        goals = [fleet.task(i, held_out=part == "unseen").goal for i in range(count)]
        before, after = (by_agent(meta, f"{prefix}{when}") for when in ("before", "after"))
        found = assess(meta, steps=STEPS, trajectories=STEP_TRAJECTORIES, held_out=part == "unseen")
        first_and_last = (means(found.outcomes["return"][:, k], found.outcomes["success"][:, k]) for k in (0, -1))
        for i, (goal, *measured) in enumerate(zip(goals, before, after, *first_and_last, strict=True)):
            angle = float(np.arctan2(goal[1], goal[0]))
            table.append(AgentRow(first + i, angle, part, False, *measured))
    table.sort(key=lambda row: row.angle)
    return [row._replace(at_end=row in (table[0], table[-1])) for row in table]


def by_agent(run: Run, when: str) -> list[ReturnAndSuccess]:
    """The outcomes of each agent at the last evaluation; `when` is a field of History, such as "held_out_after"."""
    return means(getattr(run.history, when)[:, -1], run.history.outcomes[f"{when}.success"][:, -1])


def means(
    returns: Float[np.ndarray, "seed agent"], successes: Float[np.ndarray, "seed agent"]
) -> list[ReturnAndSuccess]:
    """The outcomes of each agent, means over seeds."""
    pairs = zip(returns.mean(axis=0), successes.mean(axis=0), strict=True)
    return [ReturnAndSuccess(float(value), float(success)) for value, success in pairs]


def lost(agents: Sequence[AgentRow]) -> tuple[StepLosses, StepLosses]:
    """The agents that lose by one step, and those that lose by several."""
    ordered = sorted(agents)
    one = step_losses([row.before.value for row in ordered], [row.one_step.value for row in ordered])
    several = [row.before_several.value for row in ordered], [row.several_steps.value for row in ordered]
    return one, step_losses(*several)


def agents_header(meta: Run) -> tuple[str, ...]:
    """The columns of the table of agents."""
    one = f"1 step of {meta.config.experiment.evaluation.trajectories}"
    return "agent", "angle", "part", "no step", one, f"{STEPS} steps of {STEP_TRAJECTORIES}"


def terminal_table(rows: Sequence[BudgetRow], seeds: int) -> TerminalTable:
    """The result as a table for the terminal."""
    table = TerminalTable(
        *(Column(name, justify="right") for name in HEADER), title=f"three unseen agents, {mean_of(seeds)}"
    )
    for row in rows:
        table.add_row(*row.cells)
    return table


def agents_table(agents: Sequence[AgentRow], meta: Run) -> TerminalTable:
    """Every agent as a table for the terminal, and how many lose by their step."""
    one, several = lost(agents)
    caption = f"{losses(one)}\n{losses(several, STEPS)}"
    title = f"return and success of every agent, {mean_of(len(meta.config.seeds))}"
    table = TerminalTable(
        *(Column(name, justify="right") for name in agents_header(meta)), title=title, caption=caption
    )
    for row in agents:
        table.add_row(*row.cells)
    return table


def sentence(words: str) -> str:
    """Words with a capital letter and a full stop."""
    return f"{words[:1].upper()}{words[1:]}."


def percent(share: float) -> str:
    """A share as a percentage; shares that would round to 100 % but are less have a decimal."""
    return f"{share:.1%}" if 0.995 <= share < 0.9995 else f"{share:.0%}"


def mean_of(seeds: int) -> str:
    """What the numbers of a table are, in words."""
    return f"mean of {seeds} seed{'s' if seeds > 1 else ''}"


def demonstration_page(runs: Mapping[str, Run], agents: Sequence[AgentRow], command: str) -> page.Report:
    """The page of the demonstration: the tables, success by budget, episodes, and the learning curve."""
    table, meta, scratch = rows(runs), runs[META], runs[SCRATCH_SHOWN]
    one, several = lost(agents)
    result = page.PageTable(
        "What an unseen agent gets",
        HEADER,
        [row.cells for row in table],
        note="Mean over three agents that took no part in training and over seeds; the worst of the three for each "
        "seed; and the mean of the three when they learn from scratch. The best possible return is 4.32.",
    )
    every = page.PageTable(
        "What every agent gets",
        agents_header(meta),
        [row.cells for row in agents],
        note="Return and success, mean over seeds, from one end of the arc to the other; the angle is that of the "
        f"goal, in radians. {sentence(losses(one))} {sentence(losses(several, STEPS))}",
    )
    first, last, worst = table[0], table[-1], min(agents, key=lambda row: row.one_step.success)
    untrained, personal, alone = (percent(x.success) for x in (first.personalized, last.personalized, last.scratch))
    return page.Report(
        title="Personalized federated reinforcement learning, demonstrated",
        summary=f"Six agents with goals on an arc learned one policy initialization together. An agent that never took "
        f"part reaches its goal in {untrained} of episodes with it as it is, and in {personal} after one "
        f"policy-gradient step from {last.trajectories} trajectories; learning from scratch with as many reaches it in "
        f"{alone}. The worst of all agents after one step is agent {worst.agent} ({worst.part}, goal at "
        f"{worst.angle:+.2f} rad): {percent(worst.one_step.success)}, or {percent(worst.several_steps.success)} after "
        f"{STEPS} steps that cost it no more.",
        command=command,
        facts=provenance_facts(meta),
        tables=[result, every],
        plots=[by_budget("success", "success", meta, scratch), *rollouts(runs), learning(meta)[0]],
        runs=[meta, scratch],
    )
