"""The Python loop: the numbers of the compiled loop, and training that continues when an agent fails."""

import dataclasses
import logging

import jax
import numpy as np
import pytest
from interruption import Rounds, StopAt
from rooms import Room
from simulations import simulation_of
from untraced import AGENTS, ARC, Played

import perfedrl as pf
from perfedrl.algorithms import Clustered, FedAvgPG, PerFedAvgPG
from perfedrl.envs.fleet import Roster, fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Sampled
from perfedrl.experiments.config import make_config
from perfedrl.experiments.store import load_run
from perfedrl.experiments.training import Interrupted, train
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.worker import Worker
from perfedrl.gym_environment.open_environment import LocalEnvironment
from perfedrl.policies import mlp
from perfedrl.report import tables
from perfedrl.simulation import python_loop
from perfedrl.simulation.evaluation import MonteCarlo

EXACT = PerFedAvgPG(0.3, 0.2, local_steps=2, m_in=3, m_h=3, m_out=3)


def simulation(fleet, algorithm=EXACT, weights=None, seeds=(0, 1)):
    policy = mlp(ARC, (4,))
    evaluation = MonteCarlo(Sampled(policy), 4, 6, few_shot=(0, 3), repeats=2, rollouts=2)
    replicas = [algorithm] * len(seeds)
    return simulation_of(fleet, policy, replicas, list(seeds), Sampled(policy), evaluation=evaluation, weights=weights)


def played(broken=None):
    part = [[Played(task, broken == i) for i, task in enumerate(tasks)] for tasks in AGENTS]
    return fleet(part[0], [dataclasses.replace(task, broken=False) for task in part[1]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [EXACT, Clustered(0.3, 0.2, local_steps=2, m=3, m_choose=3)], ids=["exact", "clustered"]
)
def test_the_python_loop_computes_the_numbers_of_the_compiled_loop(algorithm):
    compiled, in_python = (simulation(fleet, algorithm, (1.0, 2.0, 3.0)) for fleet in (ARC, played()))
    assert isinstance(in_python.fleet.train, Roster)
    assert compiled.experiment.bytes_per_round == in_python.experiment.bytes_per_round
    ends = [list(x.run(x.begin(), [1, 3]))[-1] for x in (compiled, in_python)]
    for a, b in zip(*(jax.tree.leaves(end.fleet_state) for end in ends), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for name, x in ends[0].history.arrays().items():
        np.testing.assert_allclose(x, ends[1].history.arrays()[name], atol=1e-5, err_msg=name)
    deployed = [x.deploy(end.fleet_state, 3) for x, end in zip((compiled, in_python), ends, strict=True)]
    for name, x in deployed[0].arrays().items():
        np.testing.assert_allclose(x, deployed[1].arrays()[name], atol=1e-5, err_msg=name)


def test_a_round_goes_on_without_an_agent_whose_environment_failed(caplog):
    failing = simulation(played(broken=1), FedAvgPG(0.3, 0.2, local_steps=2, m=3), seeds=[0])
    whole = simulation(played(), FedAvgPG(0.3, 0.2, local_steps=2, m=3), weights=(1.0, 1e-30, 1.0), seeds=[0])
    with caplog.at_level(logging.WARNING, "perfedrl"):
        start = failing.begin()
        (end,) = failing.run(start, [1])
    (expected,) = whole.run(whole.begin(), [1])
    for a, b in zip(*(jax.tree.leaves(x.fleet_state.server) for x in (end, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)
    assert "round 0, seed 0 goes on without one agent: agent 1: a wheel came off" in caplog.text
    np.testing.assert_array_equal(np.isnan(end.history.after[0, -1]), [False, True, False])
    np.testing.assert_array_equal(end.history.before[0, -1, ::2], expected.history.before[0, -1, ::2])


def test_a_fleet_in_which_every_agent_failed_is_an_error():
    failing = simulation(fleet([Played(task, True) for task in AGENTS[0]]))
    with pytest.raises(UserError, match="round 0 has too few agents left to go on; agent 1: a wheel came off"):
        failing.advance(failing.start(), 0, 1)
    assert np.isnan(failing.begin().history.after).all()
    assert failing.failures[:, :, 2:].tolist() == [[[1, 1]] * 3, [[0, 1]] * 3]


def test_held_out_agents_that_all_fail_do_not_stop_training():
    lost = fleet([Played(task) for task in AGENTS[0]], [Played(task, True) for task in AGENTS[1]])
    (end,) = (failing := simulation(lost, seeds=[0])).run(failing.begin(), [1])
    assert np.isnan(end.history.held_out_after).all()
    assert set(end.history.outcomes) == {
        f"{part}{when}.{name}"
        for part in ("", "held_out_")
        for when in ("before", "after")
        for name in ("success", "distance")
    }
    whole = simulation(played(), seeds=[0])
    (expected,) = whole.run(whole.begin(), [1])
    np.testing.assert_array_equal(end.history.after, expected.history.after)
    assert np.isnan(failing.deploy(end.fleet_state, 1).outcomes["return"]).all()


def test_agents_of_a_python_fleet_must_have_equal_horizons_and_samplers():
    other = dataclasses.replace(Played(AGENTS[0][0]))
    object.__setattr__(other, "horizon", 7)
    with pytest.raises(UserError, match="agent 0 has horizon 20, agent 1 has 7"):
        fleet([Played(AGENTS[0][0]), other])
    with pytest.raises(UserError, match="agent 1 brings no sampler of its own"):
        fleet([Played(AGENTS[0][0]), AGENTS[0][1]])


GYM = {
    "name": "poles",
    "seeds": 2,
    "rounds": 5,
    "evaluate_every": 5,
    "fleet": {
        "env": "gymnasium",
        "id": "CartPole-v1",
        "agents": 2,
        "held_out": 1,
        "horizon": 19,
        "parallel": 4,
        "vary": {"length": [0.1, 0.9]},
    },
    "policy": {"name": "mlp", "hidden": [4]},
    "algorithm": {
        "name": "per-fedavg-pg",
        "alpha": 0.1,
        "beta": 0.1,
        "local_steps": 1,
        "m_in": 3,
        "m_h": 3,
        "m_out": 3,
    },
    "evaluation": {"name": "monte-carlo", "trajectories": 3, "episodes": 4, "few_shot": [0, 3], "rollouts": 1},
}


@pytest.fixture(scope="module")
def poles(tmp_path_factory):
    return train(make_config(GYM), tmp_path_factory.mktemp("runs"))


def test_a_gymnasium_fleet_trains_from_a_config_and_resumes_bitwise(poles, tmp_path):
    config = make_config(GYM)
    with pytest.raises(Interrupted, match="after round 3 of 5"):  # between two evaluations
        train(config, tmp_path, observers=[StopAt(3)])
    rounds = Rounds()
    again = train(config, tmp_path, observers=[rounds])
    assert rounds.seen == [3, 4, 5]
    for a, b in zip(jax.tree.leaves(poles.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)
    for name, x in poles.history.arrays().items():
        np.testing.assert_array_equal(x, again.history.arrays()[name])
    assert {"before.score", "held_out_after.score"} <= set(poles.history.outcomes)


def test_a_gymnasium_fleet_keeps_the_best_and_goes_on_from_a_finished_run_bitwise(tmp_path):
    config = make_config({**GYM, "keep": "best", "seeds": 1, "rounds": 3, "evaluate_every": 1})
    whole = train(config, tmp_path / "whole")
    train(config.with_rounds(1), tmp_path)
    with pytest.raises(Interrupted, match="after round 2 of 3"):
        train(config, tmp_path, observers=[StopAt(2)])
    rounds = Rounds()
    again = train(config, tmp_path, observers=[rounds])
    assert rounds.seen == [2, 3]
    for one, two in ((whole, again), (whole.at_end, again.at_end)):
        jax.tree.map(np.testing.assert_array_equal, one.message, two.message)
    jax.tree.map(np.testing.assert_array_equal, whole.deployment.arrays(), again.deployment.arrays())


@pytest.mark.slow
def test_a_networked_gymnasium_agent_uploads_what_the_simulator_computes(poles):
    config = make_config({**GYM, "seeds": [7]})
    work = Worker(make_agent_config({"fleet": GYM["fleet"]}), 1).training(config.to_toml())
    upload, _ = work.update(work.message, work.state, 2)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 1), 2)
    parts = config.experiment
    expected, _ = parts.algorithm.client(work.message, work.state, parts.agent(parts.fleet.task(1)), key)
    for a, b in zip(jax.tree.leaves(upload), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert set(work.evaluate(work.message, work.state, 0).after) == {"return", "score"}
    with pytest.raises(UserError, match="there is no agent 5"):
        Worker(make_agent_config({"fleet": GYM["fleet"]}), 5)


def test_a_gymnasium_agent_personalizes_and_is_evaluated_step_by_step(poles, run):
    own = pf.personalize(poles, agent=2, trajectories=3, episodes=4)
    assert own.after["score"].mean > 0
    assert pf.evaluate(poles)[2].part == "held-out"
    parts = poles.config.experiment
    assert all(not task._player.slots._environments for task in (*parts.fleet.train, *parts.fleet.held_out)), (
        "all are closed"
    )
    code, out, _ = run("evaluate", str(poles.folder), "--steps", "2", "--trajectories", "3", "--scratch", "0.1")
    assert code == 0
    assert "from scratch" in out
    assert "worst agent" in out


ROOMS = {
    **GYM,
    "name": "rooms",
    "seeds": 1,
    "rounds": 2,
    "evaluate_every": 1,
    "fleet": {
        "env": "gymnasium",
        "id": "rooms:Room",
        "agents": 3,
        "horizon": 5,
        "parallel": 2,
        "options": {"how": "raise", "below": 0.3},
        "vary": {"trouble": {"train": [99, 2, 0]}},
    },
    "evaluation": {"name": "monte-carlo", "trajectories": 3, "episodes": 4},
}


def test_failed_episodes_are_counted_saved_with_the_run_and_shown(tmp_path, run):
    path = tmp_path / "rooms.toml"
    path.write_text(make_config(ROOMS).to_toml())
    code, _, err = run("train", str(path), "--runs", str(tmp_path))
    assert code == 0
    said = " ".join(err.split())
    assert "agent 1 (rooms:Room: trouble 2): the environment raised ZeroDivisionError" in said
    trained = load_run(tmp_path / make_config(ROOMS).folder)
    failures = trained.provenance["failures"]
    assert list(failures) == ["1", "2"]
    assert failures["1"]["failed_episodes"] > 1
    assert failures["1"]["rounds_missed"] == failures["1"]["measurements_missed"] == 0
    assert np.isfinite(trained.history.after).all()
    read_again = " ".join(run("train", str(path), "--runs", str(tmp_path))[2].split())
    for output in (said, read_again):
        assert f"agent 1: {failures['1']['failed_episodes']} episodes failed and were dropped" in output


def test_failures_are_still_counted_after_an_interrupt(tmp_path):
    config = make_config(ROOMS)
    expected = train(config, tmp_path / "whole").provenance["failures"]
    with pytest.raises(Interrupted):
        train(config, tmp_path, observers=[StopAt(1)])
    assert train(config, tmp_path).provenance["failures"] == expected


def test_failures_of_a_round_that_is_interrupted_and_played_again_count_once(tmp_path, monkeypatch):
    config = make_config(ROOMS)
    expected = train(config, tmp_path / "whole").provenance["failures"]
    play_round = python_loop.play_round

    def interrupted(*args):
        play_round(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(python_loop, "play_round", interrupted)
        with pytest.raises(Interrupted):
            train(config, tmp_path)
    assert train(config, tmp_path).provenance["failures"] == expected


def test_environments_are_closed_if_those_of_a_later_agent_cannot_be_opened(tmp_path, monkeypatch):
    config = make_config({**ROOMS, "fleet": {**ROOMS["fleet"], "options": {}}})
    open_environment, opened = LocalEnvironment.__init__, []

    def refuse_the_second_of_agent_1(self, recipe):
        opened.append(recipe.values["trouble"])
        if opened.count(2) == 2:  # of agent 1
            raise OSError("no more files")
        open_environment(self, recipe)

    monkeypatch.setattr(LocalEnvironment, "__init__", refuse_the_second_of_agent_1)
    Room.made.clear(), Room.closed.clear()
    with pytest.raises(UserError, match=r"agent 1 .*: its environments cannot be opened: no more files"):
        train(config, tmp_path)
    assert len(Room.closed) == len(Room.made) > 3


def test_personalizing_a_new_agent_closes_its_environments(tmp_path):
    finished = train(make_config({**ROOMS, "fleet": {**ROOMS["fleet"], "options": {}}}), tmp_path)
    Room.made.clear(), Room.closed.clear()
    pf.personalize(finished, settings={"trouble": 50}, trajectories=2, episodes=2)
    assert len(Room.closed) == len(Room.made) > 2


def test_tables_say_how_many_agents_a_mean_is_over_also_when_the_run_is_read_again(tmp_path, run):
    broken = {"train": [99, 2, 1]}
    fleet = {**ROOMS["fleet"], "retries": 0, "options": {"how": "raise"}, "vary": {"trouble": broken}}
    config = make_config({**ROOMS, "rounds": 1, "fleet": fleet})
    path = tmp_path / "rooms.toml"
    path.write_text(config.to_toml())
    for _ in range(2):
        code, out, err = run("train", str(path), "--runs", str(tmp_path))
        assert code == 0
        assert "return, 1 of 3 training agents" in " ".join(out.replace("│", " ").split())
        assert "agent 1: 3 episodes failed and were dropped, 1 round went on without it" in " ".join(err.split())
    out = " ".join(run("list", "--runs", str(tmp_path))[1].replace("│", " ").split())
    assert "(1 of 3" in out
    rows = pf.evaluate(load_run(tmp_path / config.folder))
    assert [np.isnan(row.after.mean) for row in rows] == [False, True, True]
    assert "not measured" in run("evaluate", str(tmp_path / config.folder))[1]


@pytest.mark.slow
def test_a_process_that_always_dies_costs_its_agent_the_run_and_nobody_else(tmp_path, run):
    how = {"parallel": 1, "processes": True, "retries": 1, "agents": 2, "options": {"how": "exit"}}
    fleet = {**ROOMS["fleet"], **how, "vary": {"trouble": {"train": [99, 2]}}}
    path = tmp_path / "rooms.toml"
    path.write_text(make_config({**ROOMS, "rounds": 1, "fleet": fleet}).to_toml())
    code, out, err = run("train", str(path), "--runs", str(tmp_path))
    assert code == 0
    assert "return, 1 of 2 training agents" in " ".join(out.replace("│", " ").split())
    said = " ".join(err.split())
    assert "goes on without one agent: agent 1 (rooms:Room: trouble 2): an episode failed 2 times in a row" in said
    assert "because the environment ended its process with exit code 3" in said
    assert "agent 1: 6 episodes failed and were dropped, 6 processes were restarted" in said


def test_at_most_eight_agents_are_listed_with_their_failures():
    counts = {str(i): {"failed_episodes": 1} for i in range(11)}
    lines = tables.failures({"failures": counts})
    assert lines[0] == "agent 0: 1 episode failed and was dropped"
    assert lines[8:] == ["and 3 more agents; provenance.json has the counts"]


@pytest.mark.slow
def test_the_command_line_warns_of_a_failing_agent_and_finishes_the_run(tmp_path, run):
    config = make_config(
        {
            **ROOMS,
            "fleet": {**ROOMS["fleet"], "options": {"how": "raise"}, "vary": {"trouble": {"train": [99, 2, 98]}}},
        }
    )
    Room.made.clear(), Room.closed.clear()
    path = tmp_path / "rooms.toml"
    path.write_text(config.to_toml())
    code, _, err = run("train", str(path), "--runs", str(tmp_path / "runs"))
    assert code == 0
    said = " ".join(err.split())
    assert (
        "goes on without one agent: agent 1 (rooms:Room: trouble 2): an episode failed 11 times in a row, the last "
        "time because the environment raised ZeroDivisionError" in said
    )
    assert len(Room.made) == len(Room.closed)
