"""Agents with Gymnasium environments of their own, and a server that has none of these."""

import re
import sys
from dataclasses import replace

import jax
import numpy as np
import poles
import pytest
import tomli_w
from faulty_envs import Single
from fixtures import write
from in_process_fleet import NAMES, REPORT, InProcessAgents, ask_honest_agents, new_run, train

from perfedrl.envs import ENVS, PLAYED
from perfedrl.envs.base import made_up_episodes
from perfedrl.errors import UserError
from perfedrl.experiments.config import parse_config
from perfedrl.experiments.files import named_leaves
from perfedrl.experiments.store import load_run
from perfedrl.experiments.training import train as simulate
from perfedrl.federation import environment_report
from perfedrl.federation.agent.config import load_agent_config, make_agent_config, read_plan
from perfedrl.federation.agent.request_handler import Agent
from perfedrl.federation.agent.worker import Worker
from perfedrl.federation.environment_report import agents_of
from perfedrl.federation.frames import Frame, encode
from perfedrl.federation.server.answers import failed_episodes_in
from perfedrl.federation.server.network_config import networked, trained_config
from perfedrl.saved_policies.file import load_policy

CONFIG = parse_config(poles.table(3))
FOURTH = "agent-3"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The folder with the user's module, which Python finds."""
    (tmp_path / "my_poles.py").write_text(poles.MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_agents_of_ones_own_have_the_bits_of_the_python_loop_and_a_fourth_personalizes(module, tmp_path):
    said = {name: [] for name in (*NAMES, FOURTH)}
    agents = {
        name: Agent(make_agent_config(poles.agent_table(i)), i, tmp_path / name, said[name].append)
        for i, name in enumerate(said)
    }
    folder = new_run(tmp_path, CONFIG, personalize=4)
    folder.write_spec(replace(folder.spec(), newcomers=(FOURTH,)))
    engine = InProcessAgents(agents)
    train(folder, engine)
    assert folder.progress()["phase"] == "trained"
    assert not any(FOURTH in names for *_, names in engine.asked), "a newcomer is asked before the last round is over"
    train(folder, engine)  # the job that takes in newcomers
    (done,) = (tmp_path / "runs").iterdir()
    run, simulated = load_run(done, trained_config(done, CONFIG)), simulate(CONFIG, tmp_path / "simulated")
    for ours, theirs in zip(jax.tree.leaves(run.message), jax.tree.leaves(simulated.message), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in ((run.history.before, simulated.history.before), (run.history.after, simulated.history.after)):
        np.testing.assert_array_equal(ours.astype(np.float32), theirs)
    assert len(set(run.history.after[0, -1].tolist())) == 3, "the agents differ"
    assert set(run.history.outcomes) == {"before.score", "after.score"}
    assert {kind: names for kind, _, names in engine.asked if FOURTH in names} == {"personalize": (*NAMES, FOURTH)}
    assert [event["agent"] for event in folder.events() if event["event"] == "personalized"] == [*NAMES, FOURTH]
    rounds = [line for line in said[NAMES[1]] if line.startswith("round ")]
    assert len(rounds) == 3
    assert rounds[2].startswith("round 3 of 3: played 16 episodes, mean return ")
    assert rounds[2].endswith(" s, uploaded 120 bytes")
    assert said[FOURTH][0].startswith("personalized with 4 trajectories: return ")
    own = load_policy(agents[FOURTH].store.folder / f"personal-{folder.spec().run}.safetensors")
    assert own.act(np.zeros(4, np.float32), deterministic=True) in (0, 1)
    assert own.about["fleet"]["options"] == {"length": poles.LENGTHS[3]}


def test_a_server_needs_neither_gymnasium_nor_the_users_module(tmp_path, monkeypatch):
    def missing(*_):
        raise AssertionError("the server imports Gymnasium")

    monkeypatch.setattr("perfedrl.gym_environment.recipe.gymnasium", missing)
    monkeypatch.setattr("perfedrl.envs.gym.fleet.recipes_of", missing)
    wanted = networked(parse_config(poles.table(2, outcomes="nowhere:success")))
    assert agents_of(wanted) == 3
    folder = new_run(tmp_path, wanted, personalize=4)
    train(folder, ask_honest_agents)
    done = tmp_path / "runs" / wanted.folder
    assert load_run(done, trained_config(done, wanted)).history.after.tolist() == [[[1.5] * 3] * 2]


def test_the_families_that_agents_bring_are_those_in_python():
    in_python = {
        name for name, make in ENVS.items() if make.__module__.startswith(("perfedrl.envs.gym", "perfedrl.envs.loco"))
    }
    assert in_python == PLAYED
    assert all("agents" in ENVS.parameters(name) for name in PLAYED)
    for fleet, count in (({"agents": None}, 8), ({"id": ["a:b"] * 5, "agents": None, "held_out": 2, "vary": ()}, 3)):
        assert agents_of(parse_config(poles.table(1, **fleet))) == count


def agent_with(folder, **fleet):
    """An agent with an environment of `faulty_envs`, and what it says."""
    said = []
    return Agent(make_agent_config(poles.agent_table(0, options={}, **fleet)), 0, folder / "own", said.append), said


def request(agent, kind, **fields):
    """Ask an agent with a message of zeros."""
    about = {"run": "r", "generation": "1", "round": "0", "plan": tomli_w.dumps(poles.table(1)), "m": "2", **fields}
    message = agent.worker.training(about["plan"]).message
    return agent.answer(Frame(kind, about, named_leaves(message)))


def test_an_agents_environment_is_closed_after_personalization_and_at_the_end(tmp_path):
    """Of this environment only one can be open at a time, also when the policy is written."""
    agent, _ = agent_with(tmp_path, id="faulty_envs:Single", parallel=1)
    assert Single.owner is None
    assert request(agent, "update").kind == "upload"
    assert Single.owner is not None, "it stays open between rounds"
    assert request(agent, "personalize", round="1").kind == "personalized"
    assert Single.owner is None
    assert request(agent, "update", round="1").kind == "upload", "it opens again"
    with agent._lock:
        agent.close()
    assert Single.owner is not None, "a busy agent's environment is in use"
    agent.close()
    assert Single.owner is None


def test_an_environment_that_cannot_be_closed_is_reported(tmp_path, caplog, monkeypatch):
    agent, _ = agent_with(tmp_path, id="faulty_envs:Sound")

    def broken(_):
        raise OSError("no answer")

    monkeypatch.setattr("perfedrl.envs.gym.fleet.GymTask.close", broken)
    agent.close()
    assert "the environment of agent 0 could not be closed: OSError: no answer" in caplog.text


def test_failed_episodes_are_told_by_the_agent_and_logged_by_the_server(tmp_path):
    agent, said = agent_with(tmp_path, id="faulty_envs:RaisesSometimes")
    told = [request(agent, "update", round=str(k)).fields.get("failed_episodes", "0") for k in range(3)]
    counts = [int(re.search(r"(?:(\d+) failed and (?:was|were) drawn again)?, mean", line)[1] or 0) for line in said]
    assert counts == [int(n) for n in told]
    assert sum(counts) > 0
    upload = encode(Frame("upload", {"failed_episodes": told[0]}))
    assert failed_episodes_in(upload) == counts[0]
    for invalid in ("-1", "\u0663", "9" * 20, "many"):
        assert failed_episodes_in(encode(Frame("upload", {"failed_episodes": invalid}))) == 0
    assert "failed_episodes" not in request(agent, "update", round="2").fields, "a repeated answer plays nothing"


def test_an_unexpected_failure_is_told_by_the_agent(tmp_path, monkeypatch):
    agent, said = agent_with(tmp_path, id="faulty_envs:Sound")

    def defective(*_):
        raise RuntimeError("a defect")

    monkeypatch.setattr(agent.worker, "training", defective)
    answer = agent.answer(Frame("prepare", {"run": "r", "generation": "1", "plan": ""}))
    assert answer.kind == "error"
    assert said == ["'prepare' failed: RuntimeError: a defect"]


def test_a_stale_job_gets_no_report(tmp_path):
    agent, _ = agent_with(tmp_path, id="faulty_envs:Sound")
    assert request(agent, "describe", generation="1").kind == "described"
    assert request(agent, "prepare", generation="2").kind == "prepared"
    stale = request(agent, "describe", generation="1")
    assert "this is a stale job: generation 1 of r" in stale.fields["message"]


def test_a_report_takes_no_memory_for_an_episode(monkeypatch):
    made = []

    def outline(*sizes):
        made.append(made_up_episodes(*sizes))
        return made[-1]

    monkeypatch.setattr(environment_report, "made_up_episodes", outline)
    report = make_agent_config(poles.agent_table(0, id="faulty_envs:Sound", options={}, horizon=999_999)).report(0)
    assert report.outcomes == ("score",)
    assert all(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(made))


def test_an_agent_imports_nothing_that_a_plans_fleet_names(module):
    (module / "evil_module.py").write_text("raise SystemExit('imported')")
    plan = tomli_w.dumps(poles.table(1, id="evil_module:Env", outcomes="evil_module:f"))
    agent = make_agent_config(poles.agent_table(0))
    assert read_plan(plan, agent).experiment.fleet.agents == 3
    assert "evil_module" not in sys.modules
    unlike = "\n[environment]\nobservation_size = 3\naction_size = 1\nhorizon = 39\ndiscount = 0.99\n"
    why = r"its agents have observations of length 3, actions of length 1, .*; this agent's environment has .* 4, 2 act"
    with pytest.raises(UserError, match=why):
        read_plan(plan + unlike, agent)
    with pytest.raises(UserError, match="environment is not a table"):
        read_plan(f"environment = 3\n{plan}", agent)
    with pytest.raises(UserError, match="at most 10000 agents"):
        read_plan(tomli_w.dumps(poles.table(1, agents=10**9)), agent)


def test_an_agent_checks_its_environment_before_it_joins():
    agent = make_agent_config(poles.agent_table(0, id="faulty_envs:ArrayReward", options={}))
    with pytest.raises(UserError, match=r"^agent 0 \(faulty_envs:ArrayReward\): .*reward"):
        Worker(agent, 0)


def test_a_robot_takes_the_environment_that_the_plan_reports():
    robot, plan = make_agent_config({"fleet": {"env": "robots:robot"}}), tomli_w.dumps(poles.table(1))
    with pytest.raises(UserError, match="no report of an environment, and this agent's sampler cannot give one"):
        read_plan(plan, robot)
    reported = read_plan(plan + tomli_w.dumps({"environment": REPORT.table()}), robot).experiment
    assert reported.policy.widths == (REPORT.observation_size, 4, REPORT.actions)
    with pytest.raises(UserError, match="on its own machine"):
        reported.fleet.task(0).sampler(reported.policy)


def test_an_agents_module_is_found_beside_its_file_or_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    path = write(tmp_path / "agent.toml", {**poles.agent_table(0, id="pole_elsewhere:Pole"), "folder": "robots"})
    (tmp_path / "robots").mkdir()
    why = rf"agent\.toml: the environment 'pole_elsewhere:Pole' .* looked for pole_elsewhere\.py in .*{tmp_path}/robots"
    with pytest.raises(UserError, match=why):
        load_agent_config(path)
    (tmp_path / "robots" / "pole_elsewhere.py").write_text(poles.MODULE)
    assert load_agent_config(path).report(5).actions == 2
