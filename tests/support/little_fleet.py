"""The surroundings of a server and two agents in this process: no network, no clock, and a little arithmetic to train.

The operator's `prepare`, the server's coordinator and the agents' request handlers are the real ones.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np
from real_fleet import config as small_config

from perfedrl.federation.agent import request_handler
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.worker import AgentOutcomes, LocalTraining, Worker
from perfedrl.federation.engine import supervisor
from perfedrl.federation.engine.fleet_folder import FleetFolder
from perfedrl.federation.server import answers, coordinator, run_state_machine
from perfedrl.federation.server.run_folder import RunFolder, Terms

NAMES = ("agent-0", "agent-1")
ROUNDS = 2
CONFIG = small_config("cut", ROUNDS, fleet={"env": "random-mdps", "agents": 2, "states": 2, "actions": 2})
AGENT = make_agent_config({"fleet": dict(CONFIG.fleet)})
TERMS = Terms(min_agents=2, personalize=0)
OPERATOR, SUPERVISOR = "operator", "supervisor"
"""Who starts the next job: the operator anew, after a power cut or an error, or the supervisor, if it is there."""


def start_job(fleet: FleetFolder, by: str, ask: Any) -> None:
    """Do what `perfedrl federation train` does, as far as the server's files go."""
    folder = RunFolder(fleet.control(CONFIG.folder))
    if by == OPERATOR:
        if supervisor.finished(fleet, CONFIG) is not None:
            return
        new_id = SimpleNamespace(token_hex=lambda _: f"{folder.generation()}")  # that no earlier run has had
        with mock.patch.object(supervisor, "secrets", new_id):
            supervisor.prepare(fleet, CONFIG, TERMS)
    coordinator.Coordinator(folder.path, folder.next_generation()).run(ask)


class UncertifiedFleet(FleetFolder):
    """A fleet's folder without certificates."""

    def __init__(self, folder):
        self.folder, self.info = folder, SimpleNamespace(agents=NAMES)


@contextmanager
def simulated_surroundings() -> Iterator[None]:
    """Replace local training, the clock and random names; build the experiment once."""
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None)
    constant = {"format": 3, "seconds": 0.0, "finished": "2026-01-01T00:00:00", "device": "none"}
    patches = [
        mock.patch.object(request_handler, "Worker", LittleWorker),
        mock.patch.object(request_handler, "time", clock),
        mock.patch.object(coordinator, "time", clock),
        mock.patch.object(coordinator, "provenance", return_value=constant),
        mock.patch.object(coordinator, "config_of", return_value=CONFIG),
        mock.patch.object(supervisor, "networked", lambda config, _: config),
        mock.patch.object(run_state_machine.RunStateMachine, "start", property(lambda _: server_start())),
        mock.patch.object(run_state_machine, "draw_participants", cache(run_state_machine.draw_participants)),
        mock.patch.object(answers, "outcome_names", return_value=["before.return", "after.return"]),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


class LittleWorker(Worker):
    """A worker whose local training is a little arithmetic, by which every round depends on all earlier ones."""

    def __init__(self, config, number):
        self.config, self.number, self.environment_spaces = config, number, None

    def training(self, plan):
        assert plan == CONFIG.to_toml()
        return LittleTraining(self.number)

    def close(self):
        pass


class LittleTraining(LocalTraining):
    """One agent's part: the upload moves by the agent's state, which counts rounds in its own way."""

    private, trajectories, failed_episodes, mean_return, config = None, 1, 0, None, CONFIG
    state = np.float32(1.0)

    def __init__(self, number):
        self.number = number
        self.message, self.algorithm = server_start().message, CONFIG.experiment.algorithm

    def trajectories_in(self, round_):
        return self.trajectories

    def prepare(self):
        pass

    def update(self, message, state, round_):
        step = np.float32(0.001) * (self.number + 1) * state
        return (message + step).astype(np.float32), np.float32(state * 1.5 + round_ + self.number)

    def evaluate(self, message, state, round_):
        value = float(np.sum(message)) * 0.1 + float(state) * 0.01 + round_ * 0.001
        return AgentOutcomes({"return": value}, {"return": value + 0.5})


@cache
def server_start():
    """The server's state before the first round."""
    server, _ = CONFIG.experiment.initial_states(CONFIG.experiment.start_number(CONFIG.seeds[0]))
    return jax.tree.map(np.asarray, server)
