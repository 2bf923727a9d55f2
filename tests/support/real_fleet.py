"""A real fleet for tests: NVFlare, TLS and daemons on the loopback device, and functions that kill its processes."""

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress

import jax
import numpy as np
import psutil

from perfedrl.experiments.config import make_config
from perfedrl.experiments.store import load_run
from perfedrl.experiments.training import train as simulate
from perfedrl.federation.agent.daemon_client import call
from perfedrl.federation.engine import supervisor
from perfedrl.federation.engine.admin_session import Operator
from perfedrl.federation.engine.fleet_folder import Kit
from perfedrl.federation.engine.local_fleet import local_fleet
from perfedrl.federation.frames import Frame
from perfedrl.federation.server.run_folder import Terms

MDPS = {"env": "random-mdps", "agents": 3}
AGENT = '[fleet]\nenv = "random-mdps"\nagents = 3\n[limits]\ntrajectories_per_round = 100000000\n'


def config(name="net", rounds=5, algorithm=None, fleet=MDPS, **more):
    """A small experiment on three random MDPs."""
    algorithm = {"name": "per-fedavg-pg", "alpha": 0.5, "beta": 0.3} if algorithm is None else algorithm
    table = {"name": name, "seeds": [0], "rounds": rounds, "evaluate_every": rounds, "fleet": fleet}
    return make_config({**table, "policy": {"name": "table"}, "algorithm": algorithm, **more})


SLOW = {"name": "per-fedavg-pg", "alpha": 0.5, "beta": 0.001, "local_steps": 400, "m_in": 300, "m_out": 300}
STATEFUL = SLOW | {"control": "shrink", "local_steps": 100, "m_h": 200}
"""An algorithm with a personal state: how noisy an agent's curvature estimates are."""


def slow(rounds, algorithm=SLOW | {"variant": "first-order"}, **more):
    """The same with rounds that take some tenths of a second."""
    return config("slow", rounds, algorithm, **more)


@contextmanager
def running_fleet(folder, agents=3, agent=AGENT, joining=None):
    """Run a fleet."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.toml").write_text(agent)
    with local_fleet(folder / "fleet", agents, folder / "agent.toml", joining) as fleet:
        yield fleet


def train(fleet, wanted, *, wait=60.0, watch=lambda _: None, **terms):
    """Train over the network; return the finished run and its log."""
    terms = {
        "min_agents": wanted.experiment.fleet.agents,
        "deadline": 60.0,
        "patience": 120.0,
        "personalize": 0,
        **terms,
    }
    with supervisor.only_training(fleet):
        run_folder = supervisor.prepare(fleet, wanted, Terms(**terms))
        supervisor.Supervisor(fleet, run_folder, wait, watch).run()
    return load_run(supervisor.finished(fleet, wanted)), run_folder.events()


class Training(threading.Thread):
    """A training in a thread; `result` waits for its end."""

    def __init__(self, fleet, wanted, **terms):
        super().__init__(daemon=True)
        self.fleet, self.wanted, self.terms = fleet, wanted, terms
        self.progress, self.outcome, self.error = {}, None, None
        self.start()

    def run(self):
        def watch(view):
            self.progress = view.progress

        try:
            self.outcome = train(self.fleet, self.wanted, watch=watch, **self.terms)
        except BaseException as error:
            self.error = error

    def until(self, round_, seconds=600.0):
        """Wait until a round is under way."""
        end = time.monotonic() + seconds
        while self.progress.get("round", -1) < round_ or self.progress.get("phase") != "update":
            assert self.is_alive(), f"training ended early: {self.error!r}"
            assert time.monotonic() < end, f"round {round_} was not reached: {self.progress}"
            time.sleep(0.02)

    def until_a_round_ends(self, seconds=300.0):
        """Wait for the next event in the log."""
        log = next(self.fleet.control(supervisor.networked(self.wanted).folder).glob("events.jsonl"))
        size, end = log.stat().st_size, time.monotonic() + seconds
        while log.stat().st_size == size:
            assert time.monotonic() < end, "no round ended"
            time.sleep(0.001)

    def result(self, seconds=1200.0):
        """Wait for the end; return the run and its log."""
        self.join(seconds)
        assert not self.is_alive(), f"training did not end: {self.progress}"
        if self.error is not None:
            raise self.error
        return self.outcome


def processes(*words):
    """The processes whose command lines contain all these words."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if all(str(word) in line for word in words):
                found.append(process)
    return found


def kill(*words):
    """SIGKILL all processes with these words; return their number."""
    found = processes(*words)
    for process in found:
        with suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    return len(found)


def kill_daemon(fleet, name):
    """SIGKILL an agent's daemon; return its process id."""
    pid = int(call(Kit(fleet.kit(name)).socket, Frame("health"), timeout=60.0).fields["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def kill_server(fleet):
    """SIGKILL all NVFlare processes of the server."""
    return kill("nvflare.private", fleet.server)


def same_bits(networked, wanted, folder):
    """Check that a networked run is the simulated one of its own config, which names the aggregation."""
    simulated = simulate(supervisor.networked(wanted), folder)
    for ours, theirs in zip(jax.tree.leaves(networked.message), jax.tree.leaves(simulated.message), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(networked.history.after, simulated.history.after, rtol=1e-12)
    np.testing.assert_allclose(networked.history.before, simulated.history.before, rtol=1e-12)
    np.testing.assert_array_equal(networked.history.bytes, simulated.history.bytes)


def without_daemon(process):
    """A process of NVFlare's client that does not wait for its agent's daemon."""
    at = process.command.index("--after")
    process.command = [*process.command[:at], *process.command[at + 2 :]]
    return process


def rounds_in(events):
    """The rounds in a log."""
    return [event["round"] for event in events if event["event"] == "round"]


def connected(fleet):
    """The names of the connected agents."""
    operator = Operator(fleet)
    try:
        return operator.connected()
    finally:
        operator.close()


def wait_until(condition, seconds=180.0):
    """Wait for a condition, with a limit that a loaded machine meets."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.5)
