"""The demonstration shows the worst agent, the agents at the ends of the arc, and those that lose by their step."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from perfedrl.experiments.config import make_config
from perfedrl.experiments.evaluate import StepLoss, evaluate, losses_of_run, step_losses
from perfedrl.experiments.training import train
from perfedrl.report import page, tables
from perfedrl.studies import demonstration
from perfedrl.studies.demonstration import META, AgentRow, ReturnAndSuccess
from perfedrl.studies.few_shot.study import recommended
from tests.support.tiny_arc import TINY_ARC

CONFIG = TINY_ARC | {
    "name": "small-arc",
    "seeds": 2,
    "algorithm": {"name": "fedavg-pg", "alpha": 5.0, "beta": 0.3, "local_steps": 1, "m": 4},
    "evaluation": {"name": "monte-carlo", "trajectories": 4, "episodes": 8},
}


def agent_row(agent, angle, part, at_end, *outcomes) -> AgentRow:
    """A row with the outcomes (before, one step, before several steps, several steps)."""
    return AgentRow(agent, angle, part, at_end, *(ReturnAndSuccess(*pair) for pair in outcomes))


AGENTS = [
    agent_row(0, -0.5, "training", True, (0.5, 0.5), (0.9, 0.71), (0.6, 0.5), (3.0, 1.0)),
    agent_row(2, 0.0, "unseen", False, (3.23, 1.0), (3.02, 1.0), (3.2, 1.0), (3.21, 1.0)),
    agent_row(1, 0.5, "training", True, (0.4, 0.5), (0.8, 0.79), (0.4, 0.5), (3.1, 1.0)),
]


@pytest.fixture(scope="module")
def arc_run(tmp_path_factory):
    return train(make_config(CONFIG), tmp_path_factory.mktemp("runs"))


def printed(table) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_every_agent_of_the_fleet_is_shown_from_one_end_of_the_arc_to_the_other(arc_run, monkeypatch):
    def assessed(run, steps, trajectories, held_out):
        """Outcomes that are 10 for training agent 0, 11 for agent 1 and 20 for the unseen one, after the last step."""
        assert run is arc_run
        assert steps * trajectories <= recommended(1).evaluation["trajectories"], "no more than the one step costs"
        own = np.asarray([20.0] if held_out else [10.0, 11.0])
        return SimpleNamespace(outcomes=dict.fromkeys(("return", "success"), np.stack([[own - 1, own]] * 2)))

    monkeypatch.setattr(demonstration, "assess", assessed)
    rows = demonstration.agent_rows(arc_run)
    assert [(row.agent, row.part, row.at_end) for row in rows] == [
        (0, "training", True),
        (2, "unseen", False),
        (1, "training", True),
    ]
    np.testing.assert_allclose([row.angle for row in rows], [-0.5, 0, 0.5], atol=1e-6)
    h = arc_run.history
    assert rows[0].one_step == pytest.approx((h.after[:, -1, 0].mean(), h.outcomes["after.success"][:, -1, 0].mean()))
    assert rows[1].before.value == pytest.approx(h.held_out_before[:, -1, 0].mean())
    assert [row.several_steps.value for row in rows] == [10, 20, 11]
    assert [row.before_several.value for row in rows] == [9, 19, 10], "on the episodes of the several steps"
    assert "-0.50 (end)" in printed(demonstration.agents_table(rows, arc_run))


def test_agents_that_lose_by_their_step_are_counted(arc_run):
    found = step_losses([3.23, 1.0, 2.0, np.nan], [3.02, 1.5, 2.0, 1.0])
    assert found == ([StepLoss(0, 3.23, 3.02)], 3), "without change is no loss, and without a number no agent"
    assert tables.losses(found) == "1 of 3 agents lost by its step: agent 0 (3.230 -> 3.020)"
    assert tables.losses(step_losses([1.0, 2.0], [0.5, 1.0]), 5).startswith("2 of 2 agents lost by their 5 steps: ")
    assert tables.losses(step_losses([1.0], [1.1])) == "none of 1 agents lost by its step"
    h = arc_run.history
    lower = replace(arc_run, history=replace(h, after=h.before - 1, held_out_after=h.held_out_before + 1))
    assert [loss.agent for loss in losses_of_run(lower).lost] == [0, 1]
    assert "2 of 3 agents lost by their step" in printed(tables.summary(lower))
    of_evaluation = printed(tables.agents("run", evaluate(arc_run)))
    assert "of 3 agents lost by" in of_evaluation, "also in the table of `evaluate`"


def test_losses_by_several_steps_are_measured_on_the_same_episodes():
    """Agent 2 gains by several steps, though it had more on the other episodes of the last evaluation."""
    one, several = demonstration.lost(AGENTS)
    assert (one.lost, several.lost) == ([StepLoss(2, 3.23, 3.02)], [])
    lower = AGENTS[1]._replace(before_several=ReturnAndSuccess(3.25, 1.0))
    assert demonstration.lost([AGENTS[0], lower, AGENTS[2]])[1].lost == [StepLoss(2, 3.25, 3.21)]


def test_the_demonstration_shows_the_worst_agent(deployed_runs):
    deployment = deployed_runs[META].deployed
    uneven = {name: x * np.asarray([0.5, 1.0, 1.5]) for name, x in deployment.outcomes.items()}
    runs = {**deployed_runs, META: replace(deployed_runs[META], deployment=replace(deployment, outcomes=uneven))}
    last = demonstration.rows(runs)[-1]
    assert last.personalized == pytest.approx((1.94, 0.86))
    assert last.worst == pytest.approx((0.97, 0.43))
    assert last.cells == ("200", "1.94", "86%", "0.97", "43%", "0.20", "20%")
    assert "43%" in printed(demonstration.terminal_table(demonstration.rows(runs), 5))


def test_a_share_below_1_is_not_rounded_to_100_percent():
    assert [demonstration.percent(x) for x in (1.0, 0.997, 0.994, 0.5)] == ["100%", "99.7%", "99%", "50%"]


def test_the_page_of_the_demonstration_names_the_worst_agent_and_the_losses(deployed_runs):
    about = {"device": "cpu", "finished": "2026-01-01", "perfedrl": "0", "jax": "0", "python": "3", "seconds": 1.0}
    runs = {key: replace(run, provenance={**about, "commit": None}) for key, run in deployed_runs.items()}
    report = demonstration.demonstration_page(runs, AGENTS, "perfedrl demo")
    assert (
        "worst of all agents after one step is agent 0 (training, goal at -0.50 rad): 71%, or 100% after 5 steps"
        in (report.summary)
    )
    html = page.html(report)
    assert "1 of 3 agents lost by its step: agent 2 (3.230 -&gt; 3.020)" in html
    assert "None of 3 agents lost by its 5 steps." in html
