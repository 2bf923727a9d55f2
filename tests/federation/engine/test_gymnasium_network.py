"""A real fleet of Gymnasium agents, each with its own module and physics; the server has neither."""

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack

import jax
import numpy as np
import poles
import pytest
from fixtures import write

from perfedrl.experiments.config import parse_config
from perfedrl.experiments.store import load_run
from perfedrl.experiments.training import train as simulate
from perfedrl.federation.agent.config import make_agent_config, read_plan
from perfedrl.federation.agent.worker import LocalTraining
from perfedrl.federation.engine.fleet_folder import FleetFolder
from perfedrl.federation.engine.local_fleet import federation_command, free_port, join_arguments
from perfedrl.federation.engine.provision import init
from perfedrl.federation.server.network_config import networked
from perfedrl.federation.server.run_folder import RunFolder

pytestmark = pytest.mark.network

ROUNDS, OWN_EPISODES = 10, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A server's machine without Gymnasium, and four agents' machines with a module beside their settings."""
    folder = tmp_path_factory.mktemp("poles")
    for name in ("server", *(f"machine-{i}" for i in range(4))):
        (folder / name).mkdir()
    (folder / "server" / "gymnasium.py").write_text('raise ImportError("the server has no Gymnasium")')
    write(folder / "server" / "poles.toml", poles.table(ROUNDS))
    for i in range(4):
        write(folder / f"machine-{i}" / "agent.toml", poles.agent_table(i))
        (folder / f"machine-{i}" / "my_poles.py").write_text(poles.MODULE)
    return folder


def command(folder, *words):
    """Run a command on the server's machine; return what it prints."""
    line = [sys.executable, "-m", "perfedrl", "federation", *map(str, words)]
    done = subprocess.run(line, cwd=folder / "server", capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def fleet(folder):
    """The trained fleet."""
    init(folder / "fleet", 4, port=free_port())
    fleet, path = FleetFolder(folder / "fleet"), os.environ.get("PYTHONPATH", "")
    with ExitStack() as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{folder / 'server'}{os.pathsep}{path}")
        running.enter_context(federation_command(["server", str(fleet.folder)], folder / "server.out"))
        with pytest.MonkeyPatch.context() as agents:
            agents.setenv("PYTHONPATH", path)
            for i, name in enumerate(fleet.info.agents):
                settings = folder / f"machine-{i}" / "agent.toml"
                arguments = join_arguments(fleet, name, settings)
                running.enter_context(federation_command(arguments, folder / f"{name}.out"))
        # As long as the agents need to connect on a busy machine: all must be there in every round.
        shown = command(folder, "train", fleet.folder, "poles.toml", "--personalize", OWN_EPISODES, "--wait", 600)
        assert "return, training agents" in shown
        assert "score, training agents" in shown
        yield fleet


def test_gymnasium_agents_over_a_network_have_the_bits_of_the_python_loop(fleet, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder / "machine-0")
    wanted = networked(parse_config(poles.table(ROUNDS)))
    (done,) = fleet.runs.iterdir()
    run, simulated = load_run(done), simulate(wanted, folder / "simulated")
    for ours, theirs in zip(jax.tree.leaves(run.message), jax.tree.leaves(simulated.message), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(run.history.before.astype(np.float32), simulated.history.before)
    np.testing.assert_array_equal(run.history.after.astype(np.float32), simulated.history.after)
    np.testing.assert_array_equal(run.history.outcomes["after.score"], simulated.history.outcomes["after.score"])
    assert len(set(run.history.before[0, 0].tolist())) > 1, "the agents differ"


def test_a_fourth_agent_that_did_not_train_personalizes(fleet, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder / "machine-3")
    wanted, (done,) = networked(parse_config(poles.table(ROUNDS))), fleet.runs.iterdir()
    events = RunFolder(fleet.control(done.name)).events()
    told = {event["agent"]: event for event in events if event["event"] == "personalized"}
    assert sorted(told) == list(fleet.info.agents)
    agent = make_agent_config(poles.agent_table(3))
    training = LocalTraining(read_plan(wanted.to_toml(), agent, 3), agent, 3)
    message = jax.tree.map(lambda x: x[0], load_run(done).message)
    _, outcomes = training.personalize(message, training.state, OWN_EPISODES)
    assert told["agent-3"]["before.return"] == outcomes.before["return"]
    assert told["agent-3"]["after.return"] == outcomes.after["return"]


def lines_until(path, begin, seconds=300.0):
    """The lines of a terminal once one of them begins with some words; `join` prints them a moment later."""
    end = time.monotonic() + seconds
    while True:
        lines = path.read_text().splitlines()
        if any(line.startswith(begin) for line in lines):
            return lines
        assert time.monotonic() < end, f"no line begins with {begin!r}: {lines}"
        time.sleep(0.2)


def test_an_agents_terminal_says_what_it_did_in_each_round(fleet, folder):
    """A round that is asked for again, after a lost job, say, has a further line, which says so."""
    lines = lines_until(folder / "agent-1.out", f"agent 1: round {ROUNDS} of {ROUNDS}: played ")
    played = {line.partition(": played ")[0]: line for line in lines if ": played " in line}
    assert list(played) == [f"agent 1: round {k + 1} of {ROUNDS}" for k in range(ROUNDS)]
    for line in played.values():
        assert re.fullmatch(r".*: played 16 episodes, mean return \S+, \S+ s, uploaded 120 bytes", line)
    lines_until(folder / "agent-3.out", "agent 3: personalized with 8 ")
