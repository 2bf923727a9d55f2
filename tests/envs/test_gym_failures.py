"""Episodes that fail are drawn again, without a change of the others; dead and hanging processes are restarted."""

import logging
import multiprocessing
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import rooms
from rooms import Room

from perfedrl.envs import gymnasium_fleet, hopper_mass
from perfedrl.envs.base import EpisodeFailures
from perfedrl.errors import EnvironmentFailureError, UserError
from perfedrl.gym_environment import episodes
from perfedrl.gym_environment.open_environment import (
    OPENING_SECONDS,
    LocalEnvironment,
    RemoteEnvironment,
    Reply,
    failed,
)
from perfedrl.policies import mlp

KEY, BELOW, M = jax.random.key(3), 0.4, 12


def room(trouble, parallel=2, **more):
    options = {
        "trouble": trouble,
        "how": more.pop("how", "raise"),
        "below": more.pop("below", BELOW),
        "short": more.pop("short", None),
    }
    return gymnasium_fleet("rooms:Room", agents=1, horizon=5, parallel=parallel, options=options, **more)


def play(fleet, m=M):
    policy = mlp(fleet, (4,))
    try:
        return fleet.task(0).sampler(policy).sample(policy.init(jax.random.key(0)), KEY, m)
    finally:
        fleet.close()


@pytest.fixture(scope="module")
def whole():
    """A batch in which nothing fails, and which of its episodes start where `room` fails."""
    batch = play(room(None))
    return batch, batch.obs[:, 0, 1] < BELOW


TROUBLES = [(2, "raise"), (2, "nan"), (2, "huge"), (2, "stays broken"), (2, "sys.exit"), (0, "raise")]


@pytest.mark.parametrize(("trouble", "how"), TROUBLES)
def test_failed_episodes_are_drawn_again_and_the_others_keep_their_bits(whole, caplog, trouble, how):
    expected, doomed = whole
    assert 0 < doomed.sum() < M
    with caplog.at_level(logging.WARNING, "perfedrl"):
        fleet = room(trouble, how=how)
        batch = play(fleet)
    for x, y in zip(expected, batch, strict=True):
        np.testing.assert_array_equal(x[~doomed], y[~doomed])
    assert (batch.obs[doomed, 0, 1] >= BELOW).all(), "none of those that failed is left"
    np.testing.assert_array_equal(batch.mask, expected.mask)
    np.testing.assert_array_equal(batch.reward, expected.reward)
    assert fleet.task(0).failures.episodes >= doomed.sum()
    assert caplog.text.count("the episode is drawn again, and further failures are counted") == 1
    assert "agent 0 (rooms:Room): the environment" in caplog.text


def test_nothing_is_left_of_a_dropped_episode_that_was_longer():
    batch = play(room(4, short=2))
    np.testing.assert_array_equal(batch.mask, [[1, 1, 0, 0, 0, 0]] * M)
    np.testing.assert_array_equal(batch.reward, [[1, 2, 0, 0, 0, 0]] * M)
    assert not batch.obs[:, 2:].any()


@pytest.mark.parametrize("how", ["raise", "stays broken"])
def test_episodes_that_are_drawn_again_do_not_depend_on_how_many_play_at_a_time(how):
    fleets = [room(2, parallel=n, how=how) for n in (1, 5)]
    one, other = (play(fleet) for fleet in fleets)
    assert all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))
    assert fleets[0].task(0).failures == fleets[1].task(0).failures


@pytest.mark.parametrize(("retries", "said"), [(0, "an episode failed: the"), (2, "failed 3 times in a row, the last")])
def test_an_agent_fails_when_an_episode_was_drawn_as_often_as_allowed(retries, said):
    fleet = room(2, parallel=1, below=1.0, retries=retries)
    with pytest.raises(EnvironmentFailureError, match=said) as error:
        play(fleet)
    assert "raised ZeroDivisionError: the floor gave way (step 1 of the episode with seed" in str(error.value)
    assert fleet.task(0).failures == EpisodeFailures(retries + 1)


class Mortal(LocalEnvironment):
    """Stands for an environment in a process, which ends with the episodes that fail."""

    def __init__(self, recipe, timeout):
        super().__init__(recipe)

    def opened(self):
        return Reply()

    def answer(self):
        said = super().answer()
        return said if said.failure is None else failed("ended its process with exit code 3", lost=True)


def test_lost_processes_are_counted(whole, monkeypatch):
    monkeypatch.setattr(episodes, "RemoteEnvironment", Mortal)
    fleet = room(2, processes=True)
    batch = play(fleet)
    np.testing.assert_array_equal(batch.obs[~whole[1]], whole[0].obs[~whole[1]])
    failures = fleet.task(0).failures
    assert failures.episodes == failures.restarts >= whole[1].sum()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "ended its process with exit code 3"),
        pytest.param("hang", "did not answer within 20 s", marks=pytest.mark.slow),
    ],
)
def test_processes_that_die_or_hang_are_restarted(whole, caplog, how, said):
    fleet = room(2, parallel=3, how=how, processes=True, timeout=20.0)
    with caplog.at_level(logging.WARNING, "perfedrl"):
        batch = play(fleet, 3)
    assert whole[1][:3].any()
    np.testing.assert_array_equal(batch.obs[~whole[1][:3]], whole[0].obs[:3][~whole[1][:3]])
    assert fleet.task(0).failures.restarts >= whole[1][:3].sum()
    assert f"agent 0 (rooms:Room): the environment {said} (in the episode with seed" in caplog.text


def test_an_environment_that_stays_broken_is_made_again_in_its_process():
    batch = play(room(2, parallel=1, how="stays broken", processes=True), 3)
    for x, y in zip(batch, play(room(2, parallel=1, how="stays broken"), 3), strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_environment_that_cannot_be_closed_is_reported_and_spoils_nothing(whole, caplog):
    with caplog.at_level(logging.WARNING, "perfedrl"):
        batch = play(room(2, how="cannot close", below=0.0))
    np.testing.assert_array_equal(batch.obs, whole[0].obs)
    assert "rooms:Room: its environment could not be closed: OSError: the door is stuck" in caplog.text


def test_a_machine_without_room_for_another_process_fails_the_episode(monkeypatch):
    fleet = room(1, parallel=1, how="exit", below=1.0, processes=True, retries=1)
    fleet.task(0)._player.slots.open()

    def refuse(self):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", refuse)
    with pytest.raises(EnvironmentFailureError, match="could not be made again: got no process: no more processes"):
        play(fleet, 1)


def test_processes_close_their_environments_after_an_error(tmp_path):
    """One agent's episode failed for good; the other process of the agent has nothing to do with it."""
    options = {"file": str(tmp_path / "closed"), "trouble": 1, "how": "raise", "below": BELOW}
    made = gymnasium_fleet("rooms:Logged", agents=1, horizon=5, parallel=3, processes=True, retries=0, options=options)
    with pytest.raises(EnvironmentFailureError, match="the floor gave way"):
        play(made)
    assert (tmp_path / "closed").read_text() == "closed\n" * 4, "one that showed its spaces, and three processes"


def test_environments_are_closed_if_a_later_one_cannot_be_made():
    Room.made.clear(), Room.closed.clear()
    fleet = gymnasium_fleet([only_two_more(1)], horizon=5, parallel=3)  # the fleet itself opens one to see its spaces
    with pytest.raises(UserError, match="only two can be open"):
        play(fleet, 1)
    assert len(Room.closed) == len(Room.made) == 3


def only_two_more(already):
    """A factory of rooms of which two can be open, after `already` others."""

    def make():
        if len(Room.made) == already + 2:
            raise OSError("only two can be open")
        return Room()

    return make


def test_making_an_environment_again_does_not_count_as_a_step():
    """After a failure the answer may take as long as the opening of an environment, and then as a step again."""
    env = RemoteEnvironment(room(1, how="raise", below=1.0).task(0).recipe, 60.0)
    try:
        limits = [env._limit]
        assert env.opened().failure is None
        for action, seed in ((None, 0), (1, None), (None, 1)):
            env.ask(action, seed)
            limits.append(env._limit)
            assert (env.answer().failure is None) == (seed is not None)
        env.discard()
        env.ask(None, 2)
        limits.append(env._limit)
        assert env.answer().failure is None
        assert limits == [OPENING_SECONDS, 60.0, 60.0, OPENING_SECONDS + 60.0, OPENING_SECONDS + 60.0]
    finally:
        env.close()


def test_a_process_that_dies_fails_its_episode_with_a_sentence():
    fleet = room(1, parallel=1, how="exit", below=1.0, processes=True, retries=0)
    with pytest.raises(
        EnvironmentFailureError, match=r"agent 0 .* ended its process with exit code 3 \(in the episode"
    ):
        play(fleet, 1)


def test_processes_of_environments_do_not_load_jax():
    """Neither the module nor a recipe, which is pickled to send it there, imports more than it needs."""
    recipes = [room(1).task(0).recipe, hopper_mass(agents=1, held_out=0).task(0).recipe]
    code = (
        "import pickle, sys, perfedrl.gym_environment.open_environment; pickle.load(sys.stdin.buffer);"
        "sys.exit('jax' in sys.modules or 'pydantic' in sys.modules)"
    )
    for recipe in recipes:
        done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(recipe), check=False)
        assert done.returncode == 0, recipe


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not show blocked signals")
def test_processes_of_environments_are_born_without_ctrl_c():
    """It reaches all processes of a terminal, also those that still import modules."""
    recipe = room(None).task(0).recipe
    env = RemoteEnvironment(recipe, 60.0)
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{env._process.pid}/status").read_text().splitlines())
        assert int(lines["SigBlk"], 16) >> (signal.SIGINT - 1) & 1
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert env.opened().failure is None
    finally:
        env.close()


def test_factories_that_cannot_be_sent_to_a_process_are_a_mistake_of_one_sentence():
    for factory in (lambda: Room(), rooms.UNNAMED):
        fleet = gymnasium_fleet([factory], horizon=5, parallel=1, processes=True)
        with pytest.raises(UserError, match=r"agent 0 .* cannot be opened: .*; name a factory that stands at the top"):
            play(fleet, 1)
