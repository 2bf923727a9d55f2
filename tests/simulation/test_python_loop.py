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
from perfedrl.algorithms import FedAvgPG, PerFedAvgPG
from perfedrl.envs.fleet import Roster, fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Sampled
from perfedrl.experiments.config import make_config
from perfedrl.experiments.training import Interrupted, train
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.worker import Worker
from perfedrl.policies import mlp
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
def test_the_python_loop_computes_the_numbers_of_the_compiled_loop():
    compiled, in_python = (simulation(fleet, weights=(1.0, 2.0, 3.0)) for fleet in (ARC, played()))
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
    with pytest.raises(UserError, match="no agent of the fleet can be measured"):
        failing.begin()


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
    with pytest.raises(UserError, match="there is no training agent 5"):
        Worker(make_agent_config({"fleet": GYM["fleet"]}), 5)


def test_a_gymnasium_agent_personalizes_and_is_evaluated_step_by_step(poles, run):
    own = pf.personalize(poles, agent=2, trajectories=3, episodes=4)
    assert own.after["score"].mean > 0
    assert pf.evaluate(poles)[2].part == "held-out"
    parts = poles.config.experiment
    assert all(task._slots._vector is None for task in (*parts.fleet.train, *parts.fleet.held_out)), "all are closed"
    code, out, _ = run("evaluate", str(poles.folder), "--steps", "2", "--trajectories", "3", "--scratch", "0.1")
    assert code == 0
    assert "from scratch" in out
    assert "worst agent" in out


@pytest.mark.slow
def test_the_command_line_warns_of_a_failing_agent_and_finishes_the_run(tmp_path, run):
    config = make_config(
        {
            **GYM,
            "name": "rooms",
            "seeds": 1,
            "rounds": 2,
            "evaluate_every": 1,
            "fleet": {
                "env": "gymnasium",
                "id": "rooms:Room",
                "agents": 2,
                "horizon": 5,
                "options": {"how": "raise"},
                "vary": {"trouble": {"train": [99, 2]}},
            },
            "evaluation": {"name": "monte-carlo", "trajectories": 3, "episodes": 4},
        }
    )
    Room.made.clear(), Room.closed.clear()
    path = tmp_path / "rooms.toml"
    path.write_text(config.to_toml())
    code, _, err = run("train", str(path), "--runs", str(tmp_path / "runs"))
    assert code == 0
    said = " ".join(err.split())
    assert (
        "goes on without one agent: agent 1 (rooms:Room: trouble 2): the environment raised ZeroDivisionError" in said
    )
    assert len(Room.made) == len(Room.closed)
