"""Acknowledged uploads: whatever is lost, an agent goes on from the state that the server's checkpoint has counted."""

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_process_fleet import NAMES, InProcessAgents, honest_answer, new_run, silent, train
from real_fleet import MDPS, config
from tiers import some_slow

import perfedrl as pf
from perfedrl.algorithms.control_variate import ControlVariate
from perfedrl.compilation import jit
from perfedrl.experiments.store import load_run
from perfedrl.experiments.training import train as simulate
from perfedrl.federation.agent.answer_store import AnswerStore, Counted
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.request_handler import Agent
from perfedrl.federation.frames import NEVER, Frame, decode, encode
from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.commands import Fail, Question, Save
from perfedrl.federation.server.run_folder import RunSpec, ServerCheckpoint, Terms
from perfedrl.federation.server.run_state_machine import RunStateMachine
from perfedrl.simulation.compiled import fleet_round
from perfedrl.simulation.keys import agent_keys
from perfedrl.simulation.simulator import Simulation

UPLOADS = ("counted", "lost", "refused", "away")
"""What can become of an agent's upload; lost: computed and stored, but not delivered in time."""
SERVER = ("goes on", "dies before saving", "dies after saving", "loses the checkpoint", "dies and loses the last one")
"""What can happen to the server after it has received a round's uploads."""


class StoreInMemory(AnswerStore):
    """An agent's store whose files are in memory; every call starts from these, as after a restart of the agent."""

    def __init__(self, number=0, records=None):
        self.number, self.records, self.folder = number, dict(records or {}), None

    def stored(self, run):
        return self.records.get(run)

    def path(self, run, what="run"):
        return f"{what}-{run}"

    def _save(self, run, record):
        self.records[run] = record

    def copy(self):
        return StoreInMemory(self.number, self.records)


# --- one agent and a model of the server ----------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    """A model of the server's checkpoint: the round, and of one agent the last counted round and the state after it."""

    round: int
    message: tuple
    counted: int
    state: tuple


class Work:
    """A round of an agent whose state is the list of its counted pieces of work; no two pieces are alike."""

    def __init__(self):
        self.pieces = itertools.count()

    def __call__(self, state):
        after = np.append(state["s"], next(self.pieces))
        return {"from": state["s"], "to": after}, {"s": after}


START = {"s": np.zeros(0)}


def explore(store, saved, earlier, generation, depth, work, moves=True):
    """Try everything that can happen in `depth` rounds; without `moves` every round has the same message."""
    if not depth:
        return 0
    tried = 0
    for upload, server in itertools.product(("counted", "lost", "away"), SERVER):
        agent, state = store.copy(), saved
        if upload != "away":
            digest, counted = repr((state.message, state.counted)), Counted(state.counted, required=True)
            sent = agent.answer("r", generation, state.round, digest, START, work, counted=counted).upload
            assert tuple(sent["from"]) == state.state, "the upload starts from a state that the server has not counted"
            if upload == "counted":
                state = Checkpoint(state.round, state.message, state.round, tuple(sent["to"]))
        state = state._replace(round=state.round + 1, message=(*state.message, state.state) if moves else ())
        disk = {
            "goes on": (state, saved),
            "dies before saving": (saved, earlier),
            "dies after saving": (state, saved),
            "loses the checkpoint": (saved, saved),
            "dies and loses the last one": (earlier, earlier),
        }[server]
        restarted = server != "goes on"
        if restarted and upload != "away":  # an agent that is away does not hear of the new job either
            agent.join("r", generation + 1, START)
        tried += 1 + explore(agent, *disk, generation + restarted, depth - 1, work, moves)
    return tried


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("depth", some_slow([4, 5], [4]))
def test_every_upload_starts_from_the_state_that_the_server_counted(depth, moves):
    """All histories of one agent: uploads counted, lost or not made, and crashes of the server around checkpoints."""
    first = Checkpoint(0, (), NEVER, ())
    tried = explore(StoreInMemory(), first, first, 1, depth, Work(), moves)
    assert tried == sum(15**k for k in range(1, depth + 1))


def test_without_acknowledgements_the_states_part():
    """The model notices what goes wrong: an agent that takes all its uploads for counted."""

    class Deaf(StoreInMemory):
        def answer(self, *args, counted=None):
            return super().answer(*args)

        def copy(self):
            return Deaf(self.number, self.records)

    first = Checkpoint(0, (), NEVER, ())
    with pytest.raises(AssertionError, match="has not counted"):
        explore(Deaf(), first, first, 1, 2, Work())


# --- control variates in the server's own state machine -------------------------------------------------------------

AGENTS = ("agent-0", "agent-1")
CONFIG = config("model", 9, fleet={"env": "random-mdps", "agents": 2, "states": 2, "actions": 2})


@dataclass(frozen=True)
class WholeSteps:
    """An agent whose gradient is a whole number, so that float32 has no rounding errors."""

    step: jax.Array
    traceable = True

    def gradient(self, params, key, m):
        return jnp.full_like(params, self.step)


class ToyTraining:
    """The part of `LocalTraining` that requests need."""

    private, trajectories, failed_episodes, mean_return = None, 1, 0, None

    def __init__(self, algorithm, number, start):
        server, self.state = algorithm.init(start)
        self.algorithm, self.number, self.message, self.config = algorithm, number, server.message, CONFIG
        self.client = jax.jit(
            lambda message, state, x: algorithm.client(message, state, WholeSteps(x), jax.random.key(0))
        )

    def prepare(self):
        pass

    def trajectories_in(self, round_):
        return 1

    def update(self, message, state, round_):
        return jax.tree.map(np.asarray, self.client(message, state, jnp.float32((self.number + 1) * (round_ + 1))))


@dataclass
class ToyWorker:
    """The part of `Worker` that requests need."""

    number: int
    made: ToyTraining

    def training(self, plan):
        return self.made


class NoLedger:
    """The ledger of an agent without noise, which writes nothing."""

    def __init__(self, store, demands):
        pass

    def check_budget(self, noise):
        pass

    def noised(self, run):
        return 0

    def record(self, run, clip, noise):
        pass

    def told(self, delta):
        return ""


@dataclass(frozen=True)
class World:
    """A server's job and its disk, and the disks of the agents."""

    saved: ServerCheckpoint | None
    earlier: ServerCheckpoint | None
    generation: int
    stores: dict
    state: object = None
    question: Question | None = None


def checkpoint(state):
    """The checkpoint of a server's state."""
    kept = state.server, state.history, state.gate.snapshot(), 0.0, dict(state.counted)
    return ServerCheckpoint("r", 0, state.round, *kept)


def seen_from_outside(world):
    """All that matters for what follows, without the numbers of jobs."""
    records = [world.stores[name].stored("r") for name in AGENTS]
    answers = [(x.round, x.since, x.digest, x.earlier_round, x.earlier_since, x.earlier_digest) for x in records]
    saved = [(x.round, x.counted, jax.tree.leaves(x.server)) for x in (world.saved, world.earlier)]
    running = world.state.settled, sorted(world.state.accepted), world.state.round
    return repr((answers, [x.generation > x.answered_for for x in records], saved, running))


class Model:
    """A server with the real state machine, and agents with the real request handler, for all that can happen."""

    def __init__(self, algorithm, monkeypatch):
        self.experiment = replace(CONFIG.experiment, algorithm=algorithm)
        start = np.zeros_like(CONFIG.experiment.start_params(0))
        monkeypatch.setattr("perfedrl.federation.agent.request_handler.AnswerStore", lambda _, number: StoreInMemory())
        monkeypatch.setattr(
            "perfedrl.federation.agent.request_handler.Worker",
            lambda _, number: ToyWorker(number, ToyTraining(algorithm, number, start)),
        )
        monkeypatch.setattr("perfedrl.federation.agent.request_handler.PrivacyLedger", NoLedger)
        self.agents = {name: Agent(SimpleNamespace(privacy=None), i, None) for i, name in enumerate(AGENTS)}
        self.start = jax.tree.map(np.asarray, algorithm.init(start)[0])
        self.spec = RunSpec("r", CONFIG.to_toml(), AGENTS, Terms(1, strikes=1000, personalize=0), "runs")

    def machine(self, generation):
        machine = RunStateMachine(CONFIG, self.spec, generation)
        machine.experiment, machine.start = self.experiment, self.start
        return machine

    def begin(self, world):
        """Start a job from the checkpoint, up to its first round."""
        machine, stores = self.machine(world.generation), dict(world.stores)
        state, commands = machine.begin(world.saved)
        while (question := commands[-1]).kind != "update":
            told = {name: self.asked(stores, name, question) for name in AGENTS} if question.kind == "prepare" else {}
            told = told or {name: honest_answer(question.frame) for name in AGENTS}
            state, commands = machine.answered(state, Answers(AGENTS, told), 0.0)
        saved, earlier = world.saved or checkpoint(state), world.earlier or checkpoint(state)
        return World(saved, earlier, world.generation, stores, state, question)

    def asked(self, stores, name, question):
        """The answer of an agent, whose store may change."""
        self.agents[name].store = stores[name] = stores[name].copy()
        return encode(self.agents[name].answer(decode(question.frame)))

    def after(self, world, uploads, server):
        """What follows when so much becomes of the uploads and of the server."""
        stores, frames, failures = dict(world.stores), {}, {}
        asked = tuple(name for name in AGENTS if name not in world.question.without)
        for name, upload in zip(AGENTS, uploads, strict=True):
            if name not in asked or upload == "away":
                failures |= {name: "away"} if name in asked else {}
                continue
            answer = self.asked(stores, name, world.question)
            if upload == "refused":
                frame = decode(answer)
                answer = encode(Frame("upload", frame.fields, {k: x * np.nan for k, x in frame.tensors.items()}))
            if upload != "lost":
                frames[name] = answer
        state, commands = self.machine(world.generation).answered(world.state, Answers(asked, frames, failures), 0.0)
        restarted = replace(world, stores=stores, generation=world.generation + 1)
        if any(isinstance(command, Fail) for command in commands):
            return self.begin(restarted)
        if not any(isinstance(command, Save) for command in commands):
            return replace(world, stores=stores, state=state, question=commands[-1])
        new, saved = checkpoint(state), world.saved
        if server == "goes on":
            return replace(world, saved=new, earlier=saved, stores=stores, state=state, question=commands[-1])
        disk = {
            "dies before saving": (saved, world.earlier),
            "dies after saving": (new, saved),
            "loses the checkpoint": (saved, saved),
            "dies and loses the last one": (world.earlier, world.earlier),
        }[server]
        return self.begin(replace(restarted, saved=disk[0], earlier=disk[1]))


def controls(model, world):
    """The server's control variate, and those of the agents in the states that the server has counted."""
    server, counted = world.state.server, world.state.counted
    theirs = []
    for name in AGENTS:
        record = world.stores[name].stored("r")
        state = record.state_after(counted.get(name, NEVER))
        assert state is not None, "the agent does not have the state that the server counts on"
        theirs.append(state["control"])
    mode = model.experiment.algorithm.mode
    return (server.private if mode == "round" else server.message).control, theirs


@pytest.mark.parametrize("mode", ["round", "step"])
@pytest.mark.parametrize("depth", some_slow([2, 3], [2]))
def test_the_servers_control_variate_is_the_mean_of_the_agents_whatever_is_lost(mode, depth, monkeypatch, untyped):
    """All that can become of two agents' uploads and of the server, in every world that differs from those before."""
    model = Model(ControlVariate(pf.FedAvgPG(0.5, 1.0, local_steps=2), mode, 2.0, 0.5), monkeypatch)
    first = model.begin(World(None, None, 1, {name: StoreInMemory(i) for i, name in enumerate(AGENTS)}))
    events, known = list(itertools.product(itertools.product(UPLOADS, UPLOADS), SERVER)), {}
    worlds = {seen_from_outside(first): first}
    for _ in range(depth):
        known |= worlds
        found = [model.after(world, *event) for world in worlds.values() for event in events]
        worlds = {seen: world for world in found if (seen := seen_from_outside(world)) not in known}
        for world in worlds.values():
            mean, theirs = controls(model, world)
            np.testing.assert_array_equal(mean, np.mean(theirs, axis=0))
    assert sum(bool(controls(model, world)[0].any()) for world in worlds.values()) > len(worlds) // 2


# --- real agents ----------------------------------------------------------------------------------------------------

STEPS = {"alpha": 0.5, "beta": 0.3, "local_steps": 2, "m": 4}
MECHANISMS = {
    "round": config("round", 4, {"name": "fedavg-pg", **STEPS}, control_variate={"mode": "round"}),
    "step": config("step", 4, {"name": "fedavg-pg", **STEPS}, control_variate={"mode": "step", "memory": 0.5}),
    "fast-fedpg": config("fast", 4, {"name": "fast-fedpg", **STEPS}),
}


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Three agents in this process."""
    made, folder = make_agent_config({"fleet": dict(MDPS)}), tmp_path_factory.mktemp("agents")
    return {name: Agent(made, i, folder / name) for i, name in enumerate(NAMES)}


def simulated(wanted, participants):
    """The server's state after rounds with these participants, by the simulator's own rounds."""
    experiment, tasks = wanted.experiment, wanted.experiment.fleet.train
    state = jax.tree.map(lambda x: jnp.asarray(x[0]), Simulation(experiment, wanted.seeds).start())
    keys, one_round = agent_keys(wanted.seeds[0], tasks), jit(fleet_round, static_argnums=(0, 1))
    for k, who in enumerate(participants):
        here = None if len(who) == len(NAMES) else jnp.asarray(who)
        state = one_round(experiment.algorithm, experiment.agent, tasks, state, keys, k, who=here)
    return state.server


def same_bits(ours, theirs):
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.squeeze(x), np.squeeze(y))


@pytest.mark.parametrize("name", MECHANISMS)
def test_without_losses_a_run_has_the_simulators_bits(agents, tmp_path, name):
    wanted = MECHANISMS[name]
    train(new_run(tmp_path, wanted), InProcessAgents(agents))
    run = load_run(tmp_path / "runs" / wanted.folder)
    same_bits(run.message, simulate(wanted, tmp_path / "simulated").message)


@pytest.mark.parametrize("name", MECHANISMS)
def test_with_losses_a_run_is_a_simulation_with_the_agents_that_counted(agents, tmp_path, name):
    wanted = MECHANISMS[name]
    folder = new_run(tmp_path, wanted, min_agents=1)
    troubles = {("update", 0): silent("agent-1"), ("update", 2): silent("agent-0", "agent-2")}
    train(folder, InProcessAgents(agents, troubles))
    counted = [event["agents"] for event in folder.events() if event["event"] == "round"]
    assert list(map(len, counted)) == [2, 3, 1, 3]
    run = load_run(tmp_path / "runs" / wanted.folder)
    expected = simulated(wanted, [[NAMES.index(x) for x in round_] for round_ in counted]).message
    # The simulator's program for a part of the agents is another one: its sums may differ in the last bit.
    for x, y in zip(jax.tree.leaves(run.message), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.squeeze(x), np.squeeze(y), rtol=1e-6, atol=1e-8)
