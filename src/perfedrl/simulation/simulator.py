"""The whole fleet in one process: start, train, measure, deploy. The programs it calls are in `lanes.py`."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from perfedrl.algorithms import Algorithm, ServerState
from perfedrl.algorithms.base import agents_per_round, check_agents, check_algorithm
from perfedrl.envs import Fleet
from perfedrl.errors import DivergenceError, UserError
from perfedrl.estimators import BASELINE, CURVATURE, Baseline, Curvature, Objective, Sampled
from perfedrl.exact.tabular import Exact, float64
from perfedrl.simulation import python_loop
from perfedrl.simulation.compiled import DEPLOYMENT, EVALUATION, START, FleetState, advance_lanes, measure_lanes
from perfedrl.simulation.evaluation import Evaluation, auto, exact
from perfedrl.simulation.history import Deployment, History
from perfedrl.simulation.measurements import before_and_after, deploy
from perfedrl.types import Params

MANY_DECISIONS = 5000
"""Of one agent; from about here on agents one by one are faster on a CPU than side by side, and take less memory."""

RETURNS = ("before", "after", "held_out_before", "held_out_after")


@dataclass(frozen=True)
class Simulation:
    """A fleet, a policy and one algorithm per lane, ready to train.

    `agent` makes what an algorithm sees of a task: `Sampled(policy)` when left out; with `Exact(policy)` gradients and
    curvature are exact and everything is in float64: the m -> infinity dynamics. `chunk` bounds how many agents run at
    a time, for fleets that exceed memory; results do not depend on it, and left out it is chosen for speed.
    `evaluation` is exact where that is possible when left out. `start_key` draws the start parameters that all seeds
    share; "per-seed" gives each its own draw. `weights` are the training agents' in the server's mean, all alike when
    left out. `participation` is the share of the agents that take part in a round, drawn anew for each.
    """

    fleet: Fleet
    policy: Any
    algorithms: Sequence[Algorithm]
    seeds: Sequence[int]
    agent: Callable[[Any], Objective] | None = None
    chunk: int | None = None
    evaluation: Evaluation | None = None
    start_key: int | str = 0
    weights: Sequence[float] | None = None
    participation: float = 1.0

    def __post_init__(self) -> None:
        if len(self.algorithms) != len(self.seeds) or not self.seeds:
            raise UserError(f"each lane needs an algorithm and a seed: {len(self.algorithms)} and {len(self.seeds)}")
        if any(not 0 <= seed < 2**32 for seed in self.seeds):
            raise UserError("seeds must be whole numbers from 0 to 2**32 - 1")
        if len({jax.tree.structure(algorithm) for algorithm in self.algorithms}) > 1:
            raise UserError("lanes may differ in step sizes and seeds only, not in the algorithm or its batch sizes")
        if self.chunk is not None and self.chunk < 1:
            raise UserError(f"chunk must be at least 1; it is {self.chunk}")
        if self.start_key != "per-seed" and not isinstance(self.start_key, int):
            raise UserError(f'start_key must be a whole number or "per-seed"; it is {self.start_key!r}')
        check_algorithm(self.algorithms[0], type(self.algorithms[0]).__name__)
        check_agents(self.algorithms[0], self.fleet.agents, self.weights)
        agents_per_round(self.algorithms[0], self.fleet.agents, self.participation, self.weights)
        self.algorithms[0].check_supports(self.fleet, self.policy)
        if isinstance(self.agent, Exact):
            exact(self.fleet, Sampled(self.policy))
        self._evaluation  # noqa: B018

    @property
    def _agent(self) -> Callable[[Any], Objective]:
        return Sampled(self.policy) if self.agent is None else self.agent

    @cached_property
    def _evaluation(self) -> Any:
        if self.evaluation is not None:
            return self.evaluation
        return auto(self.fleet, self._agent if isinstance(self._agent, Sampled) else Sampled(self.policy))

    @cached_property
    def present(self) -> int:
        """How many agents take part in a round."""
        return agents_per_round(self.algorithms[0], self.fleet.agents, self.participation, self.weights)

    def cost_after(self, rounds: int) -> dict[str, np.ndarray]:
        """What so many rounds cost the mean agent, in whole trajectories and bytes; who sits out pays nothing."""
        mean = lambda cost: np.asarray([round(cost * self.present / self.fleet.agents)])  # noqa: E731
        cost = self.algorithms[0].trajectories_after(rounds), rounds * self.bytes_per_round
        return {"trajectories": mean(cost[0]), "bytes": mean(cost[1])}

    def _chunk(self, decisions: int) -> int | None:
        """How many agents run at a time, each of so many decisions: on a CPU one, where its batches fill the cache."""
        alone = jax.default_backend() == "cpu" and decisions >= MANY_DECISIONS
        return 1 if self.chunk is None and alone else self.chunk

    @property
    def _precision(self):
        return jax.enable_x64(True) if isinstance(self.agent, Exact) else nullcontext()

    @cached_property
    def _algorithms(self) -> Algorithm:
        """The lanes' algorithms as one pytree with a leading lane axis on its step sizes."""
        return jax.tree.map(lambda *xs: np.asarray(xs, dtype=float), *self.algorithms)

    def _init(self) -> tuple[ServerState, PyTree]:
        """The server's and a client's first state, with a leading lane axis."""
        if self.start_key == "per-seed":
            numbers = [int(seed) for seed in self.seeds]
        else:
            numbers = [int(self.start_key)] * len(self.seeds)
        key = lambda number: jax.random.fold_in(jax.random.key(number), START)  # noqa: E731
        drawn = {number: self.algorithms[0].init(self.policy.init(key(number))) for number in set(numbers)}
        return jax.tree.map(lambda *xs: np.stack(xs), *(drawn[number] for number in numbers))

    def start(self) -> FleetState:
        """The state before round 0."""
        with self._precision:
            server, client = self._init()
            return FleetState(server, _repeat(client, self.fleet.agents, axis=1))

    def advance(self, state: FleetState, first: int, rounds: int) -> FleetState:
        """Train every lane for some rounds, counted from `first`."""
        chunk = self._chunk(self.algorithms[0].trajectories_per_round * (self.fleet.train.horizon + 1))
        weights = None if self.weights is None else np.asarray(self.weights, float)
        # Where all take part, it is the program without the draw.
        present = self.present if self.present < self.fleet.agents else None
        if not self.fleet.traceable:
            there = self.algorithms, state, self.seeds, self._agent, self.fleet.train
            return python_loop.advance(*there, first, rounds, weights, present)
        with self._precision:
            common = self._agent, self.fleet.train, first, rounds, weights
            call = lambda lanes, devices: advance_lanes(  # noqa: E731
                *lanes, *common, chunk=chunk, devices=devices, present=present
            )
            return self._by_lane(call, (self._algorithms, state, self._seeds))

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
            **self.cost_after(round_),
            **returns,
            outcomes=outcomes,
        )

    def _diagnostics(self, state: FleetState) -> dict[str, np.ndarray]:
        """The algorithm's diagnostics of every agent: arrays [lane, agent] by name."""
        if not jax.tree.leaves(state.clients):
            return {}
        return jax.tree.map(np.asarray, dict(jax.vmap(jax.vmap(self.algorithms[0].diagnostics))(state.clients)))

    def deploy(self, state: FleetState, round_: int) -> Deployment | None:
        """What the initialization is worth to held-out agents (or, without any, to the training agents), by budget."""
        evaluation = self._evaluation
        if not evaluation.few_shot:
            return None
        outcomes, rollouts = self.each_agent(deploy, state, DEPLOYMENT + round_, self.fleet.held_out is not None)
        by_budget = {name: np.moveaxis(x, 1, -1) for name, x in outcomes.items()}
        none = np.zeros((*by_budget["return"].shape, 0))
        shown = none if rollouts is None else np.moveaxis(rollouts, 1, 2)
        return Deployment(np.asarray(evaluation.few_shot), by_budget, shown)

    def each_agent(self, how: Callable, state: FleetState, moment: int, held_out: bool) -> Any:
        """A function of one agent, for every agent of one part: arrays [lane, agent, ...]."""
        fleet, clients = self.fleet, state.clients
        tasks, first_agent = (fleet.held_out, fleet.agents) if held_out else (fleet.train, 0)
        if held_out:
            clients = _repeat(self._init()[1], fleet.held_out_agents, axis=1)
        if not self.fleet.traceable:
            lanes = self.algorithms, state.server.message, clients, self.seeds
            return python_loop.measure(how, *lanes, self._evaluation, tasks, first_agent, moment)
        evaluation, chunk = self._evaluation, self._chunk(self._evaluation.decisions(tasks))
        program: Callable = float64(measure_lanes) if evaluation.float64 else measure_lanes
        call = lambda lanes, devices: program(  # noqa: E731
            *lanes, evaluation, tasks, first_agent, np.uint32(moment), how=how, chunk=chunk, devices=devices
        )
        return self._by_lane(call, (self._algorithms, state.server.message, clients, self._seeds))

    @property
    def _seeds(self) -> np.ndarray:
        return np.asarray(self.seeds, np.uint32)

    def _by_lane(self, call: Callable[[tuple, int], Any], per_lane: tuple) -> Any:
        """Call a program with lanes that divide evenly among the devices: the last one is repeated until they do."""
        lanes = len(self.seeds)
        devices = min(len(jax.local_devices()), lanes)
        pad = lambda x: np.concatenate([x, np.repeat(x[-1:], -lanes % devices, axis=0)])  # noqa: E731
        return jax.tree.map(lambda x: np.asarray(x)[:lanes], call(jax.tree.map(pad, per_lane), devices))

    @cached_property
    def bytes_per_round(self) -> int:
        """What one agent receives and sends; one that sends nothing takes no part in a federation."""
        with self._precision:
            server, client = jax.tree.map(lambda x: x[0], self._init())
            task = self.fleet.task(0)
            agent = self._agent.outline(task) if isinstance(self._agent, Sampled) else self._agent(task)
            work = lambda key: self.algorithms[0].client(server.message, client, agent, key)  # noqa: E731
            upload, _ = jax.eval_shape(work, jax.random.key(0))
        crossing = jax.tree.leaves((server.message, upload)) if jax.tree.leaves(upload) else []
        return sum(x.size * x.dtype.itemsize for x in crossing)

    def begin(self) -> "Standing":
        """Where the run stands before its first round, measured."""
        state = self.start()
        return Standing(0, state, self.measure(state, 0))

    def run(self, standing: "Standing", stops: Sequence[int]) -> Iterator["Standing"]:
        """Go on to each of the rounds `stops` that lies ahead, and yield where the run stands there.

        Agents that are played in Python take their time: there it also yields, not measured anew, after other rounds.
        """
        for stop in stops:
            if stop <= standing.round:
                continue
            while not self.fleet.traceable and standing.round < stop - 1:
                state = self.advance(standing.state, standing.round, 1)
                standing = Standing(standing.round + 1, state, standing.history)
                yield standing
            state = self.advance(standing.state, standing.round, stop - standing.round)
            measured = self.measure(state, stop)
            # Sampled returns can look well where parameters no longer do; agents whose environments failed have none.
            returns = (measured.before, measured.after) if self.fleet.traceable else ()
            if not all(np.isfinite(x).all() for x in (*returns, *jax.tree.leaves(state))):
                raise DivergenceError(
                    f"training diverged between rounds {standing.round} and {stop}: lower alpha or beta"
                )
            standing = Standing(stop, state, standing.history.extend(measured))
            yield standing


class Standing(NamedTuple):
    """Where a run stands after a round: all that is needed to go on, and all that was measured so far."""

    round: int
    state: FleetState
    history: History


class Result(NamedTuple):
    """A finished run: what it measured, and the shared initialization of every seed."""

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
) -> Result:
    """Train one algorithm on a fleet for several seeds at once and measure it every few rounds.

    `noiseless` replaces sampling by exact gradients and curvature; else `curvature`, `baseline` and `entropy` say how
    they are estimated (`**perfedrl.estimators.PAPER` for the paper's forms). `participation` is the share
    of the agents that take part in a round. For another evaluation or an objective of one's own, make a `Simulation`.
    """
    if rounds < 1 or every < 1:
        raise UserError(f"rounds and every must be at least 1; they are {rounds} and {every}")
    seeds = list(range(seeds) if isinstance(seeds, int) else seeds)
    agent = Exact(policy) if noiseless else Sampled(policy, curvature, baseline, entropy)
    simulation = Simulation(fleet, policy, [algorithm] * len(seeds), seeds, agent, chunk, participation=participation)
    try:
        last = deque(simulation.run(simulation.begin(), every_few(rounds, every)), maxlen=1).pop()
    finally:
        fleet.close()
    return Result(last.history, shared_params(algorithm, last.state))


def every_few(rounds: int, every: int) -> list[int]:
    """The rounds after which a run is measured: every so many, and the last."""
    return [*range(every, rounds, every), rounds]


def shared_params(algorithm: Algorithm, state: FleetState) -> Params:
    """The shared initialization of every lane."""
    return jax.tree.map(np.asarray, jax.vmap(algorithm.shared)(state.server.message))


def _repeat(tree: PyTree, count: int, axis: int) -> PyTree:
    return jax.tree.map(lambda x: np.repeat(np.expand_dims(x, axis), count, axis=axis), tree)
