"""The simulator: train, measure and deploy a whole fleet in one process."""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from perfedrl.algorithms import Algorithm
from perfedrl.envs import Fleet
from perfedrl.errors import DivergenceError, UserError
from perfedrl.estimators import ADVANTAGE, BASELINE, CURVATURE, Advantage, Baseline, Curvature, Sampled
from perfedrl.exact.tabular import Exact, float64
from perfedrl.key_domains import DEPLOYMENT, EVALUATION
from perfedrl.memory import Need, check_memory
from perfedrl.simulation import python_loop
from perfedrl.simulation.best_state import better
from perfedrl.simulation.compiled import advance_replicas, measure_replicas
from perfedrl.simulation.experiment import Experiment
from perfedrl.simulation.failures import Counts, FailureLog
from perfedrl.simulation.history import Deployment, History
from perfedrl.simulation.measurements import before_and_after, deploy
from perfedrl.simulation.memory_use import name_settings, need_of_played_agent, need_of_states
from perfedrl.simulation.observers import Observer, announce
from perfedrl.simulation.progress import with_progress
from perfedrl.simulation.run_state import FleetState, RunState
from perfedrl.types import Params

MANY_DECISIONS = 5000
"""Decisions of one agent from which on a CPU runs agents one by one faster than side by side, with less memory."""

log = logging.getLogger("perfedrl")

RETURNS = ("before", "after", "held_out_before", "held_out_after")


@dataclass(frozen=True)
class Simulation:
    """An experiment with its seeds, ready to train.

    All seeds train side by side in one compiled call. `algorithms` are the experiment's algorithm with the step sizes
    of each seed, where they differ. `chunk` bounds how many agents run at a time, for fleets that exceed memory; it
    does not change results, and by default it is chosen for speed.
    """

    experiment: Experiment
    seeds: Sequence[int]
    algorithms: Sequence[Algorithm] = ()
    chunk: int | None = None

    def __post_init__(self) -> None:
        if not self.algorithms:
            object.__setattr__(self, "algorithms", [self.experiment.algorithm] * len(self.seeds))
        if len(self.algorithms) != len(self.seeds) or not self.seeds:
            raise UserError(f"expected one algorithm per seed, got {len(self.algorithms)} for {len(self.seeds)} seeds")
        if any(not 0 <= seed < 2**32 for seed in self.seeds):
            raise UserError("seeds must be whole numbers from 0 to 2**32 - 1")
        if len({jax.tree.structure(algorithm) for algorithm in self.algorithms}) > 1:
            raise UserError(
                "runs side by side may differ in step sizes and seeds only, not in the algorithm or its counts"
            )
        if self.chunk is not None and self.chunk < 1:
            raise UserError(f"chunk must be at least 1, got {self.chunk}")

    @property
    def fleet(self) -> Fleet:
        """The experiment's fleet."""
        return self.experiment.fleet

    def _chunk(self, decisions: int) -> int | None:
        """The number of agents that run at a time; on a CPU one, where its decisions fill the cache."""
        alone = jax.default_backend() == "cpu" and decisions >= MANY_DECISIONS
        return 1 if self.chunk is None and alone else self.chunk

    @cached_property
    def _algorithms(self) -> Algorithm:
        """The algorithms as one pytree with a leading replica axis on its step sizes."""
        return jax.tree.map(lambda *xs: np.asarray(xs, dtype=float), *self.algorithms)

    @cached_property
    def _failures(self) -> list[FailureLog]:
        """The failures of played agents while this simulation works, a log for every seed; empty for traced agents."""
        tasks = () if self.fleet.traceable else (*self.fleet.train, *(self.fleet.held_out or ()))
        return [FailureLog(tasks) for _ in self.seeds]

    @property
    def failures(self) -> Counts:
        """How often agents failed so far: while this simulation worked, and before."""
        return np.stack([log.counts for log in self._failures])

    def add_failures(self, earlier: Counts) -> None:
        """Count failures of a run that this simulation continues."""
        for log, counts in zip(self._failures, earlier, strict=True):
            log.counts += counts

    def _initial_states(self) -> tuple[Any, PyTree]:
        """The server's and a client's first state, with a leading replica axis."""
        numbers = [self.experiment.start_number(seed) for seed in self.seeds]
        drawn = {number: self.experiment.initial_states(number) for number in set(numbers)}
        return jax.tree.map(lambda *xs: np.stack(xs), *(drawn[number] for number in numbers))

    def start(self) -> FleetState:
        """The state before round 0."""
        with self.experiment.precision:
            with self._name_settings():
                check_memory(need_of_states(self.experiment, len(self.seeds)))
            server, client = self._initial_states()
            return FleetState(server, _repeat(client, self.fleet.agents, axis=1))

    def advance(self, state: FleetState, first: int, rounds: int) -> FleetState:
        """Train every replica for some rounds, counted from `first`."""
        if not self.fleet.traceable:
            played = self.algorithms, state, self.seeds, self.experiment.agent, self.fleet.train
            return python_loop.advance(*played, first, rounds, self._weights, self._participants, self._failures)
        return self._unpadded(self._train(advance_replicas, state, first, rounds))

    def _train(self, program: Callable, state: FleetState, first: int, rounds: int) -> Any:
        """Call a program, or a function of its arguments, with the arguments of some rounds."""
        experiment = self.experiment
        chunk = self._chunk(self.algorithms[0].trajectories_per_round * (self.fleet.train.horizon + 1))
        static = {"chunk": chunk, "devices": self._devices, "participants": self._participants}
        shared = experiment.agent, self.fleet.train, first, rounds, self._weights
        with experiment.precision, self._name_settings():
            return program(*self._padded((self._algorithms, state, self._seeds)), *shared, **static)

    def measure(self, state: FleetState, round_: int) -> History:
        """The history of a single evaluation.

        Held-out agents are measured as they would start: with the message and a fresh client state.
        """
        moment = EVALUATION + round_
        measured = {"": self.each_agent(before_and_after, state, moment, held_out=False)}
        if self.fleet.held_out is not None:
            measured["held_out_"] = self.each_agent(before_and_after, state, moment, held_out=True)
        outcomes = {
            f"{part}{when}.{name}": np.asarray(x)[:, None]
            for part, both in measured.items()
            for when, named in both.items()
            for name, x in named.items()
        }
        outcomes |= {f"training.{name}": x[:, None] for name, x in self._diagnostics(state).items()}
        nobody = np.zeros((len(self.seeds), 1, 0))
        returns = {when: outcomes.pop(f"{when}.return", nobody) for when in RETURNS}
        return History(
            seeds=np.asarray(self.seeds),
            rounds=np.asarray([round_]),
            **self.experiment.cost_after(round_),
            **returns,
            outcomes=outcomes,
        )

    def _diagnostics(self, state: FleetState) -> dict[str, np.ndarray]:
        """The algorithm's diagnostics of every agent: arrays [replica, agent] by name."""
        if not jax.tree.leaves(state.clients):
            return {}
        return jax.tree.map(np.asarray, dict(jax.vmap(jax.vmap(self.algorithms[0].diagnostics))(state.clients)))

    def deploy(self, state: FleetState, round_: int) -> Deployment | None:
        """Outcomes of held-out agents (without any, of training agents) after personalization from each budget."""
        evaluation = self.experiment.evaluation
        if not evaluation.few_shot:
            return None
        outcomes, rollouts = self.each_agent(deploy, state, DEPLOYMENT + round_, self.fleet.held_out is not None)
        by_budget = {name: np.moveaxis(x, 1, -1) for name, x in outcomes.items()}
        none = np.zeros((*by_budget["return"].shape, 0))
        shown = none if rollouts is None else np.moveaxis(rollouts, 1, 2)
        return Deployment(np.asarray(evaluation.few_shot), by_budget, shown)

    def each_agent(self, how: Callable, state: FleetState, moment: int, held_out: bool) -> Any:
        """Apply a function of one agent to every agent of one part: arrays [replica, agent, ...]."""
        if not self.fleet.traceable:
            tasks, clients, first_agent = self._part(state, held_out)
            played = self.algorithms, state.server.message, clients, self.seeds
            measured = self.experiment.evaluation, tasks, first_agent, moment
            return python_loop.measure(how, *played, *measured, self._failures)
        return self._unpadded(self._measure(measure_replicas, how, state, moment, held_out))

    def _measure(self, program: Callable, how: Callable, state: FleetState, moment: int, held_out: bool) -> Any:
        """Call a program, or a function of its arguments, with the arguments of a measurement."""
        evaluation, (tasks, clients, first_agent) = self.experiment.evaluation, self._part(state, held_out)
        static = {"how": how, "chunk": self._chunk(evaluation.decisions(tasks)), "devices": self._devices}
        replicas = self._padded((self._algorithms, state.server.message, clients, self._seeds))
        called: Callable = float64(program) if evaluation.float64 else program
        with self._name_settings():
            return called(*replicas, evaluation, tasks, first_agent, np.uint32(moment), **static)

    def _part(self, state: FleetState, held_out: bool) -> tuple[Any, PyTree, int]:
        """The tasks of training or held-out agents, their states, and the number of the first of them."""
        if not held_out:
            return self.fleet.train, state.clients, 0
        clients = _repeat(self._initial_states()[1], self.fleet.held_out_agents, axis=1)
        return self.fleet.held_out, clients, self.fleet.agents

    @property
    def _seeds(self) -> np.ndarray:
        return np.asarray(self.seeds, np.uint32)

    @property
    def _weights(self) -> np.ndarray | None:
        return None if self.experiment.weights is None else np.asarray(self.experiment.weights, float)

    @property
    def _participants(self) -> int | None:
        """The number of participants in a round; None with full participation, for the program without the draw."""
        participants = self.experiment.participants
        return participants if participants < self.fleet.agents else None

    @property
    def _devices(self) -> int:
        return min(len(jax.local_devices()), len(self.seeds))

    def _padded(self, per_replica: tuple) -> tuple:
        """Arguments with the last replica repeated until replicas divide evenly among the devices."""
        more = -len(self.seeds) % self._devices
        return jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[-1:], more, axis=0)]), per_replica)

    def _unpadded(self, results: Any) -> Any:
        """Results without those of repeated replicas, in NumPy."""
        return jax.tree.map(lambda x: np.asarray(x)[: len(self.seeds)], results)

    def need(self, state: FleetState) -> Need:
        """The memory that training and measuring need, estimated before anything is compiled."""
        if not self.fleet.traceable:
            return need_of_played_agent(self.experiment)
        measured: list[tuple[Callable, bool]] = [(before_and_after, False)]
        if self.fleet.held_out is not None:
            measured.append((before_and_after, True))
        if self.experiment.evaluation.few_shot:
            measured.append((deploy, self.fleet.held_out is not None))
        needs = [self._measure(measure_replicas.need, how, state, 0, held_out) for how, held_out in measured]
        most = max(self._train(advance_replicas.need, state, 0, 1), *needs)
        return Need(float(most.bytes), tuple(int(length) for length in most.shape))

    def check_memory(self, state: FleetState) -> Need:
        """Reject a simulation that does not fit into memory, before anything is compiled; return what it needs."""
        need = self.need(state)
        with self._name_settings():
            check_memory(need)
        return need

    def _name_settings(self) -> AbstractContextManager:
        return name_settings(self.experiment, seeds=math.ceil(len(self.seeds) / self._devices))

    def begin(self) -> RunState:
        """The run before its first round, measured; environments that break their contract are rejected first."""
        state = self.start()
        self.check_memory(state)
        for warning in self.fleet.check():
            log.warning("%s", warning)
        measured = self.measure(state, 0)
        return RunState(0, state, measured, failures=self.failures)

    def run(self, begun: RunState, stops: Sequence[int]) -> Iterator[RunState]:
        """Continue to each of the rounds `stops` that lies ahead, and yield the run there, measured.

        The best state is kept if `begun` has one. Rounds of agents that are played in Python take long: there it also
        yields after every other round, unmeasured.
        """
        current = begun
        for stop in stops:
            if stop <= current.round:
                continue
            state, history = current.fleet_state, current.history
            assert state is not None
            assert history is not None
            while not self.fleet.traceable and current.round < stop - 1:
                state = self.advance(state, current.round, 1)
                current = current._replace(round=current.round + 1, fleet_state=state, failures=self.failures)
                yield current
            state = self.advance(state, current.round, stop - current.round)
            measured = self.measure(state, stop)
            # Sampled returns can look well where parameters diverged; returns of failed environments are NaN anyway.
            returns = (measured.before, measured.after) if self.fleet.traceable else ()
            if not all(np.isfinite(x).all() for x in (*returns, *jax.tree.leaves(state))):
                raise DivergenceError(
                    f"training diverged between rounds {current.round} and {stop}: lower alpha or beta"
                )
            history = history.extend(measured)
            best = None if current.best is None else better(current.best, state, history)
            current = current._replace(round=stop, fleet_state=state, history=history, best=best)
            current = current._replace(failures=self.failures)
            yield current


class Result(NamedTuple):
    """A finished run: its history, and the shared initialization of every seed."""

    history: History
    params: Params


def simulate(
    fleet: Fleet,
    policy: Any,
    algorithm: Algorithm,
    *,
    rounds: int,
    seeds: int | Sequence[int] = 10,
    every: int = 1,
    noiseless: bool = False,
    chunk: int | None = None,
    curvature: str | Curvature = CURVATURE,
    baseline: str | Baseline = BASELINE,
    entropy: float = 0.0,
    advantage: str | Advantage = ADVANTAGE,
    participation: float = 1.0,
    observers: Iterable[Observer] = (),
    progress: bool = False,
) -> Result:
    """Train one algorithm on a fleet for several seeds at once and measure it every few rounds.

    `noiseless` replaces sampling by exact gradients and curvature; otherwise `curvature`, `baseline`, `entropy`
    and `advantage` say how they are estimated (`**perfedrl.estimators.PAPER` for the paper's forms). `participation` is
    the share of agents that participate in a round. `observers` are told what was measured, and `progress` shows how
    far training is. For another evaluation or your own objective, make an `Experiment` and a `Simulation`.
    """
    if rounds < 1 or every < 1:
        raise UserError(f"rounds and every must be at least 1, got {rounds} and {every}")
    seeds = list(range(seeds) if isinstance(seeds, int) else seeds)
    agent = Exact(policy) if noiseless else Sampled(policy, curvature, baseline, entropy, advantage)
    experiment = Experiment(fleet, policy, algorithm, agent, participation=participation)
    simulation = Simulation(experiment, seeds, chunk=chunk)
    name = type(algorithm).__name__

    def watched(observers: list[Observer]) -> Iterator[RunState]:
        """The states that training passes, each announced to the observers."""
        for observer in observers:
            observer.on_start(RunState(0, None, None, name, rounds, name))
        begun = simulation.begin()._replace(name=name, rounds=rounds, group=name)
        announce(observers, begun)
        for state in simulation.run(begun, every_few(rounds, every)):
            announce(observers, state)
            yield state

    try:
        with with_progress(observers, progress) as watching:
            last = deque(watched(watching), maxlen=1).pop()
    finally:
        fleet.close()
    assert last.history is not None
    return Result(last.history, shared_params(algorithm, last.fleet_state))


def every_few(rounds: int, every: int) -> list[int]:
    """The rounds after which a run is measured: every `every` rounds, and the last."""
    return [*range(every, rounds, every), rounds]


def shared_params(algorithm: Algorithm, state: Any) -> Params:
    """The shared initialization of every replica."""
    return jax.tree.map(np.asarray, jax.vmap(algorithm.shared)(state.server.message))


def _repeat(tree: PyTree, count: int, axis: int) -> PyTree:
    return jax.tree.map(lambda x: np.repeat(np.expand_dims(x, axis), count, axis=axis), tree)
