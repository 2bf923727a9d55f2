"""Worker processes share the episodes of a batch: the same bits for any number of them, also when one dies."""

import logging
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from rooms import Room

from perfedrl.envs import gymnasium_fleet
from perfedrl.envs.base import EpisodeFailures
from perfedrl.envs.gym import episodes
from perfedrl.errors import DivergenceError, EnvironmentFailureError, UserError
from perfedrl.gym_environment.episodes import Request, episodes_of
from perfedrl.gym_environment.worker import Job
from perfedrl.gym_environment.worker_pool import WorkerProcess
from perfedrl.policies import POLICIES

KEY, BELOW, M = jax.random.key(3), 0.4, 11
HIDDEN = (64, 64)
"""Large enough for matrix products to round by the number of their rows."""


def rooms(workers, trouble=2, how="raise", agents=1, **more):
    """Rooms in which some episodes fail, and others end after two of four steps."""
    options = {"trouble": trouble, "how": how, "below": more.pop("below", BELOW), "short": 2, "action": "box"}
    settings = {"parallel": 4, "options": options, **more}
    return gymnasium_fleet("rooms:Room", agents=agents, horizon=5, workers=workers, **settings)


def play(fleet, agent=0, m=M, key=KEY):
    policy = POLICIES["gaussian-mlp"](fleet, hidden=HIDDEN)
    return fleet.task(agent).sampler(policy).sample(policy.init(jax.random.key(0)), key, m)


def processes(fleet):
    return list(fleet.task(0).workers._processes.values())


@pytest.fixture(scope="module")
def expected():
    fleet = rooms(1)
    try:
        return play(fleet), fleet.task(0).failures
    finally:
        fleet.close()


@pytest.fixture
def pair():
    fleet = rooms(2, agents=2)
    yield fleet
    fleet.close()


def test_shares_are_every_episode_once():
    for parallel, n, m in ((4, 3, 11), (16, 2, 20), (3, 3, 1)):
        shares = [episodes_of((i, n), parallel, m) for i in range(n)]
        assert sorted(np.concatenate(shares)) == list(range(m))
        assert max(map(len, shares)) - min(map(len, shares)) <= -(-m // parallel)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_batch_has_the_same_bits_and_failures_for_any_number_of_workers(expected, workers):
    fleet = rooms(workers)
    assert len(processes(fleet)) == 0
    batch, counted = play(fleet), fleet.task(0).failures
    again, single = play(fleet), play(fleet, m=1)
    assert len(processes(fleet)) == workers
    for x, y, z, one in zip(expected[0], batch, again, single, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x, z)
        assert (x.dtype, one.shape) == (one.dtype, (1, *x.shape[1:]))
    assert counted == expected[1]
    assert counted.episodes > 0
    fleet.close()
    assert not processes(fleet)


def test_the_share_of_a_process_that_was_killed_is_played_again(expected, pair, caplog):
    play(pair)
    first = pair.task(0).failures
    processes(pair)[1]._process.kill()
    with caplog.at_level(logging.WARNING, "perfedrl"):
        batch = play(pair)
    for x, y in zip(expected[0], batch, strict=True):
        np.testing.assert_array_equal(x, y)
    assert pair.task(0).failures == EpisodeFailures(2 * first.episodes, 1)
    assert "agent 0 (rooms:Room): a worker process was ended by signal 9; its episodes are played again" in caplog.text
    for x, y in zip(expected[0], play(pair, agent=1), strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_agent_fails_if_its_workers_die_again_and_again():
    fleet = rooms(2, how="exit", retries=1)
    with pytest.raises(
        EnvironmentFailureError, match="ended with exit code 3, 2 times in a row; with processes = true"
    ):
        play(fleet)
    assert fleet.task(0).failures == EpisodeFailures(0, 2)
    assert not processes(fleet)


def test_errors_of_workers_are_those_of_one_process():
    def said(fleet, params=None):
        policy = POLICIES["gaussian-mlp"](fleet)
        params = jax.tree.map(lambda x: x * np.nan, policy.init(jax.random.key(0))) if params is None else params
        try:
            fleet.task(0).sampler(policy).sample(params, KEY, 1)
        except UserError as error:
            return type(error), str(error)

    def failing(workers):
        fleet = rooms(workers, below=1.0, retries=1, trouble=1)
        return said(fleet, POLICIES["gaussian-mlp"](fleet).init(jax.random.key(0)))

    assert said(rooms(2)) == said(rooms(1))
    assert said(rooms(1))[0] is DivergenceError
    assert failing(2) == failing(1)
    assert failing(1)[0] is EnvironmentFailureError


def test_processes_end_with_the_last_open_agent_and_close_environments(tmp_path):
    options = {"file": str(tmp_path / "closed")}
    fleet = gymnasium_fleet(
        "rooms:Logged", agents=2, horizon=5, parallel=3, workers=2, options={**options, "action": "box"}
    )
    shown = len((tmp_path / "closed").read_text().splitlines())
    play(fleet), play(fleet, agent=1)
    running = processes(fleet)
    fleet.task(0).close()
    assert processes(fleet) == running
    fleet.task(1).close()
    assert not processes(fleet)
    assert all(process._process.returncode == 0 for process in running)
    assert len((tmp_path / "closed").read_text().splitlines()) == shown + 6
    play(fleet)
    fleet.close()


def test_ctrl_c_ends_the_processes_that_play_and_the_next_batch_starts_new_ones(expected, pair, monkeypatch):
    play(pair), play(pair, agent=1)  # which stays open
    running = processes(pair)

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(WorkerProcess, "answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            play(pair, key=jax.random.key(4))
    assert all(process._process.returncode is not None for process in running)
    for x, y in zip(expected[0], play(pair), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not show blocked signals")
def test_workers_are_born_without_ctrl_c_and_end_when_nobody_is_connected():
    worker = WorkerProcess(0, 1)
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{worker._process.pid}/status").read_text().splitlines())
    assert int(lines["SigBlk"], 16) >> (signal.SIGINT - 1) & 1
    worker._ours.close()  # as the end of this process does
    assert worker.end(time.monotonic() + 60) == "ended with exit code 0"


def test_workers_do_not_load_jax():
    """Neither their module nor a job, with its environment, its policy and its map of actions."""
    fleet = rooms(1)
    policy = POLICIES["gaussian-mlp"](fleet)
    act = policy.in_numpy(policy.init(jax.random.key(0)))
    job = Job(0, fleet.task(0)._player.settings, Request(act, np.zeros(2, np.uint32), 1, 6, policy.noise))
    code = (
        "import pickle, sys, perfedrl.gym_environment.worker as w; job = pickle.load(sys.stdin.buffer);"
        "assert w.Shares((0, 1)).play(job).error is None;"
        "sys.exit('jax' in sys.modules or 'pydantic' in sys.modules)"
    )
    folder = Path(__file__).parents[1] / "support"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(job), check=False, cwd=folder)
    assert done.returncode == 0


def test_a_policy_that_cannot_be_sent_is_played_in_this_process(expected, caplog):
    fleet = rooms(2)
    policy = POLICIES["gaussian-mlp"](fleet, hidden=HIDDEN)
    act = policy.in_numpy(policy.init(jax.random.key(0)))
    player = fleet.task(0)._player
    with caplog.at_level(logging.WARNING, "perfedrl"):
        here = [player.play(lambda obs, u: act(obs, u), policy.noise, KEY, M, 6, sendable=x) for x in (True, True)]
        here.append(player.play(act, policy.noise, KEY, M, 6, sendable=False))
    assert not processes(fleet)
    assert caplog.text.count("workers cannot get the policy, and this process plays instead") == 1
    for batch in here:
        for x, y in zip(expected[0], batch, strict=True):
            np.testing.assert_array_equal(x, y)
    fleet.close()


def test_a_factory_that_cannot_be_sent_is_a_mistake_of_one_sentence():
    fleet = gymnasium_fleet([lambda: Room(action="box")], horizon=5, parallel=2, workers=2)
    with pytest.raises(UserError, match=r"agent 0 .* cannot be sent to a worker process: .*; name a factory that"):
        play(fleet)


def test_a_factory_of_the_script_that_runs_is_a_mistake_of_one_sentence(monkeypatch):
    def make():
        return Room(action="box")

    make.__module__, make.__qualname__ = "__main__", "make"
    monkeypatch.setattr(sys.modules["__main__"], "make", make, raising=False)
    fleet = gymnasium_fleet([make], horizon=5, parallel=2, workers=2)
    with pytest.raises(UserError, match=r"cannot load what it is to play: AttributeError: .*; set workers = 1"):
        play(fleet)
    assert not processes(fleet)


def test_auto_is_one_process_for_each_core_and_at_most_one_for_each_slot(monkeypatch):
    monkeypatch.setattr(episodes, "available_cores", lambda: 3)
    assert episodes.make_workers("auto", processes=False, parallel=16).count == 3
    assert episodes.make_workers("auto", processes=False, parallel=2).count == 2
    assert episodes.make_workers(8, processes=False, parallel=5).count == 5
    assert episodes.make_workers("auto", processes=True, parallel=16) is None
    monkeypatch.setattr(episodes, "available_cores", lambda: 1)
    assert episodes.make_workers("auto", processes=False, parallel=16) is None
