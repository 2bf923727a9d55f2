"""Real fleets over TLS: the simulator's bits, through crashes of every process."""

import os
import signal
import time

import jax
import numpy as np
import pytest
import real_fleet

from perfedrl.federation.agent.answer_store import AnswerStore
from perfedrl.federation.agent.daemon_client import call
from perfedrl.federation.engine.fleet_folder import Kit
from perfedrl.federation.frames import Frame
from perfedrl.federation.server.replay import replay

pytestmark = pytest.mark.network

ALGORITHMS = {
    "exact": {"name": "per-fedavg-pg", "alpha": 0.5, "beta": 0.3},
    "first-order": {"name": "per-fedavg-pg", "alpha": 0.5, "beta": 0.3, "variant": "first-order"},
    "fedavg": {"name": "fedavg-pg", "alpha": 0.5, "beta": 0.3},
    "clustered": {"name": "clustered", "clusters": 2, "alpha": 0.5, "beta": 0.3},
    "fast": {"name": "fast-fedpg", "alpha": 0.5, "beta": 0.3},
}
PLAIN = {"name": "fedavg-pg", "alpha": 0.5, "beta": 0.001, "local_steps": 400, "m": 300}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with real_fleet.running_fleet(tmp_path_factory.mktemp("live")) as fleet:
        yield fleet


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_networked_run_has_the_simulators_bits(fleet, name, tmp_path):
    wanted = real_fleet.config(name, 5, ALGORITHMS[name])
    run, events = real_fleet.train(fleet, wanted)
    assert real_fleet.rounds_in(events) == list(range(5))
    real_fleet.same_bits(run, wanted, tmp_path)


def test_an_agents_bridge_does_not_load_jax(fleet):
    for process in real_fleet.processes("nvflare.private", fleet.kit("agent-0")):
        with open(f"/proc/{process.pid}/maps") as maps:
            assert "jaxlib" not in maps.read(), "NVFlare's client has loaded JAX"


def test_a_finished_run_is_shown_and_not_trained_again(fleet, run, tmp_path):
    (tmp_path / "c.toml").write_text(real_fleet.config("fedavg", 5, ALGORITHMS["fedavg"]).to_toml())
    code, shown, said = run("federation", "train", fleet.folder, "c.toml")
    assert code == 0, said
    assert "return, training agents" in shown
    code, shown, said = run("federation", "status", fleet.folder)
    assert code == 0, said
    assert "agent-2: connected" in shown
    assert "finished, round 5 of 5, 3 answered, return after adaptation" in shown


def test_a_killed_daemon_misses_only_its_own_rounds(fleet):
    rounds_in_all, deadline = 80, 600.0
    wanted = real_fleet.slow(rounds_in_all, real_fleet.STATEFUL)
    training = real_fleet.Training(fleet, wanted, min_agents=2, deadline=deadline)
    training.until(5)
    dead = real_fleet.kill_daemon(fleet, "agent-1")
    run, events = training.result()
    rounds = {event["round"]: event for event in events if event["event"] == "round"}
    assert sorted(rounds) == list(range(rounds_in_all))
    without = [k for k, event in rounds.items() if "agent-1" not in event["agents"]]
    assert without
    assert min(without) >= 5
    assert all({"agent-0", "agent-2"} <= set(event["agents"]) for event in rounds.values())
    assert "agent-1" in rounds[rounds_in_all - 1]["agents"], "the agent did not rejoin"
    times = [event["time"] for event in rounds.values()]
    assert max(np.diff(times)) < deadline, "a round waited for the dead agent"
    assert [event["agent"] for event in events if event["event"] == "failure"] == ["agent-1"]
    health = call(Kit(fleet.kit("agent-1")).socket, Frame("health"), timeout=60.0)
    assert int(health.fields["pid"]) != dead
    assert np.isfinite(run.history.after[:, -1]).all()
    stored = AnswerStore(Kit(fleet.kit("agent-1")).state, 1).stored(run.provenance["federation"]["run"])
    assert stored.round == rounds_in_all - 1
    assert stored.after, "this algorithm's agents have a personal state"
    assert any(not np.array_equal(stored.after[name], x) for name, x in stored.before.items())


def test_control_variates_stay_the_mean_of_the_agents_when_one_is_killed(fleet):
    wanted = real_fleet.slow(40, PLAIN, control_variate={"mode": "step"})
    training = real_fleet.Training(fleet, wanted, min_agents=2, deadline=600.0)
    training.until(5)
    real_fleet.kill_daemon(fleet, "agent-1")
    run, events = training.result()
    counted = {name: event["round"] for event in events if event["event"] == "round" for name in event["agents"]}
    assert sum(len(event["agents"]) for event in events if event["event"] == "round") < 3 * 40
    controls = []
    for number, name in enumerate(sorted(counted)):
        stored = AnswerStore(Kit(fleet.kit(name)).state, number).stored(run.provenance["federation"]["run"])
        controls.append(stored.state_after(counted[name])["control"])
    assert np.abs(controls).max() > 1e-5
    np.testing.assert_allclose(run.message.control[0], np.mean(controls, axis=0), rtol=1e-4, atol=1e-9)


def test_asynchronous_rounds_go_on_without_an_agent_that_stands_still_and_can_be_replayed(fleet):
    ticks = {"name": "afedpg", "alpha": 0.5, "beta": 0.05, "m": 30_000, "delays": "none"}
    wanted = real_fleet.config("ticks", 60, ticks)
    training = real_fleet.Training(fleet, wanted, deadline=300.0)
    training.until(5)
    still = int(call(Kit(fleet.kit("agent-2")).socket, Frame("health"), timeout=60.0).fields["pid"])
    os.kill(still, signal.SIGSTOP)
    stopped, before = time.time(), training.progress["round"]
    try:
        while training.progress["round"] < min(before + 20, 60):
            assert training.is_alive(), f"training ended early: {training.error!r}"
            assert time.time() < stopped + 600, "rounds wait for an agent that stands still"
            time.sleep(0.02)
    finally:
        resumed = time.time()
        os.kill(still, signal.SIGCONT)
    run, events = training.result()
    arrivals = run.provenance["federation"]["arrivals"]
    assert sorted({k for k, _, _ in arrivals}) == list(range(60)), "a round without a gradient"
    assert {i for _, i, _ in arrivals} == {0, 1, 2}
    meanwhile = [e["agents"] for e in events if e["event"] == "round" and stopped < e["time"] < resumed]
    assert len(meanwhile) >= 10
    assert sum("agent-2" in agents for agents in meanwhile) <= 2, "what it had sent before"
    assert len(arrivals) == len({(i, since) for _, i, since in arrivals}), "a gradient counted twice"
    assert not [event for event in events if event["event"] in ("silent", "refused", "stale")]
    for ours, again in zip(jax.tree.leaves(run.message), jax.tree.leaves(replay(wanted, arrivals)), strict=True):
        np.testing.assert_array_equal(ours[0], again)


@pytest.mark.parametrize("words", [("worker_process",), ("client_train",)], ids=["job process", "client"])
def test_a_killed_bridge_is_restarted(fleet, words, tmp_path):
    wanted = real_fleet.slow(25, curvature="score", baseline="none" if words[0] == "client_train" else "leave-one-out")
    training = real_fleet.Training(fleet, wanted, deadline=20.0, patience=300.0)
    training.until(5)
    assert real_fleet.kill("nvflare.private", fleet.kit("agent-2"), *words)
    run, events = training.result()
    assert real_fleet.rounds_in(events) == list(range(25))
    assert sum(event["event"] == "submitted" for event in events) == 2
    real_fleet.same_bits(run, wanted, tmp_path)  # every agent took part in every round


def test_a_server_killed_ten_times_counts_every_round_once(fleet, tmp_path):
    wanted = real_fleet.slow(60, evaluation={"name": "exact"}, curvature="causal", entropy=0.01)
    training = real_fleet.Training(fleet, wanted, deadline=30.0, patience=300.0)
    for i in range(10):
        training.until(5 * i + 2)
        if i % 2:  # between rounds: a checkpoint was just written; else during one
            training.until_a_round_ends()
        assert real_fleet.kill_server(fleet) >= 2
    run, events = training.result()
    counted = real_fleet.rounds_in(events)  # a kill between a checkpoint and its log line loses the line
    assert len(set(counted)) == len(counted) >= 50
    assert set(counted) <= set(range(60))
    assert sum(event["event"] == "submitted" for event in events) >= 11
    real_fleet.same_bits(run, wanted, tmp_path)


def test_the_demonstration_reports_the_killed_agent(run):
    code, shown, said = run("federation", "demo")
    assert code == 0, said
    for word in ("150 rounds over mutual TLS", "agent-1 was killed", "agent-2 personalized"):
        assert word in shown, shown
    # Two agents finish the rounds in seconds, and how long a process takes to start depends on the machine.
    assert "it rejoined by itself in round" in shown or "it did not rejoin before the end" in shown, shown
