"""The simulator: train, measure and deploy a whole fleet in one process."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from perfedrl.algorithms import Algorithm
from perfedrl.envs import Fleet
from perfedrl.errors import DivergenceError, UserError
from perfedrl.estimators import BASELINE, CURVATURE, Baseline, Curvature, Sampled
from perfedrl.exact.tabular import Exact, float64
from perfedrl.key_domains import DEPLOYMENT, EVALUATION
from perfedrl.simulation import python_loop
from perfedrl.simulation.compiled import advance_replicas, measure_replicas
from perfedrl.simulation.experiment import Experiment
from perfedrl.simulation.history import Deployment, History
from perfedrl.simulation.measurements import before_and_after, deploy
from perfedrl.simulation.observers import Observer, announce
from perfedrl.simulation.run_state import FleetState, RunState
from perfedrl.types import Params

MANY_DECISIONS = 5000
"""Decisions of one agent from which on a CPU runs agents one by one faster than side by side, with less memory."""

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

    def _initial_states(self) -> tuple[Any, PyTree]:
        """The server's and a client's first state, with a leading replica axis."""
        numbers = [self.experiment.start_number(seed) for seed in self.seeds]
        drawn = {number: self.experiment.initial_states(number) for number in set(numbers)}
        return jax.tree.map(lambda *xs: np.stack(xs), *(drawn[number] for number in numbers))

    def start(self) -> FleetState:
        """The state before round 0."""
        with self.experiment.precision:
            server, client = self._initial_states()
            return FleetState(server, _repeat(client, self.fleet.agents, axis=1))

    def advance(self, state: FleetState, first: int, rounds: int) -> FleetState:
        """Train every replica for some rounds, counted from `first`."""
        experiment = self.experiment
        chunk = self._chunk(self.algorithms[0].trajectories_per_round * (self.fleet.train.horizon + 1))
        weights = None if experiment.weights is None else np.asarray(experiment.weights, float)
        # With full participation, the program without the draw.
        participants = experiment.participants if experiment.participants < self.fleet.agents else None
        if not self.fleet.traceable:
            played = self.algorithms, state, self.seeds, experiment.agent, self.fleet.train
            return python_loop.advance(*played, first, rounds, weights, participants)

        def call(replicas: tuple, devices: int) -> FleetState:
            shared = experiment.agent, self.fleet.train, first, rounds, weights
            return advance_replicas(*replicas, *shared, chunk=chunk, devices=devices, participants=participants)

        with experiment.precision:
            return self._by_replica(call, (self._algorithms, state, self._seeds))

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
        fleet, clients = self.fleet, state.clients
        tasks, first_agent = (fleet.held_out, fleet.agents) if held_out else (fleet.train, 0)
        if held_out:
            clients = _repeat(self._initial_states()[1], fleet.held_out_agents, axis=1)
        if not self.fleet.traceable:
            played = self.algorithms, state.server.message, clients, self.seeds
            return python_loop.measure(how, *played, self.experiment.evaluation, tasks, first_agent, moment)
        evaluation = self.experiment.evaluation
        chunk = self._chunk(evaluation.decisions(tasks))
        program: Callable = float64(measure_replicas) if evaluation.float64 else measure_replicas

        def call(replicas: tuple, devices: int) -> Any:
            shared = evaluation, tasks, first_agent, np.uint32(moment)
            return program(*replicas, *shared, how=how, chunk=chunk, devices=devices)

        return self._by_replica(call, (self._algorithms, state.server.message, clients, self._seeds))

    @property
    def _seeds(self) -> np.ndarray:
        return np.asarray(self.seeds, np.uint32)

    def _by_replica(self, call: Callable[[tuple, int], Any], per_replica: tuple) -> Any:
        """Call a program with the last replica repeated until replicas divide evenly among the devices."""
        count = len(self.seeds)
        devices = min(len(jax.local_devices()), count)

        def pad(x: Any) -> np.ndarray:
            return np.concatenate([x, np.repeat(x[-1:], -count % devices, axis=0)])

        return jax.tree.map(lambda x: np.asarray(x)[:count], call(jax.tree.map(pad, per_replica), devices))

    def begin(self) -> RunState:
        """The run before its first round, measured."""
        state = self.start()
        return RunState(0, state, self.measure(state, 0))

    def run(self, begun: RunState, stops: Sequence[int]) -> Iterator[RunState]:
        """Continue to each of the rounds `stops` that lies ahead, and yield the run there, measured.

        Rounds of agents that are played in Python take long: there it also yields after every other round, unmeasured.
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
                current = current._replace(round=current.round + 1, fleet_state=state)
                yield current
            state = self.advance(state, current.round, stop - current.round)
            measured = self.measure(state, stop)
            # Sampled returns can look well where parameters diverged; returns of failed environments are NaN anyway.
            returns = (measured.before, measured.after) if self.fleet.traceable else ()
            if not all(np.isfinite(x).all() for x in (*returns, *jax.tree.leaves(state))):
                raise DivergenceError(
                    f"training diverged between rounds {current.round} and {stop}: lower alpha or beta"
                )
            current = current._replace(round=stop, fleet_state=state, history=history.extend(measured))
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
    participation: float = 1.0,
    observers: Iterable[Observer] = (),
) -> Result:
    """Train one algorithm on a fleet for several seeds at once and measure it every few rounds.

    `noiseless` replaces sampling by exact gradients and curvature; otherwise `curvature`, `baseline` and `entropy` say
    how they are estimated (`**perfedrl.estimators.PAPER` for the paper's forms). `participation` is the share of
    agents that participate in a round. `observers` are told what was measured. For another evaluation or your own
    objective, make an `Experiment` and a `Simulation`.
    """
    if rounds < 1 or every < 1:
        raise UserError(f"rounds and every must be at least 1, got {rounds} and {every}")
    seeds = list(range(seeds) if isinstance(seeds, int) else seeds)
    agent = Exact(policy) if noiseless else Sampled(policy, curvature, baseline, entropy)
    experiment = Experiment(fleet, policy, algorithm, agent, participation=participation)
    simulation = Simulation(experiment, seeds, chunk=chunk)
    observers = list(observers)
    name = type(algorithm).__name__
    for observer in observers:
        observer.on_start(RunState(0, None, None, name, rounds, name))

    def watched() -> Iterator[RunState]:
        """The states that training passes, each announced to the observers."""
        begun = simulation.begin()._replace(name=name, rounds=rounds, group=name)
        announce(observers, begun)
        for state in simulation.run(begun, every_few(rounds, every)):
            announce(observers, state)
            yield state

    try:
        last = deque(watched(), maxlen=1).pop()
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
