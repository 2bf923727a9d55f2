"""The whole fleet in one process: a loop over rounds, agents side by side, seeds and step sizes side by side.

A *lane* is one training run: a seed with its alpha and beta. All lanes advance in one compiled call, spread over the
devices that JAX sees; the same call serves any number of rounds, so a run cut into pieces is bitwise the run in one go.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Key, PRNGKeyArray, PyTree

from perfedrl.algorithms import Algorithm, ServerState
from perfedrl.compilation import jit
from perfedrl.envs import Fleet, TabularMDP
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, Sampled
from perfedrl.exact import Exact, float64
from perfedrl.history import History
from perfedrl.types import Array, Params, Whole


class FleetState(NamedTuple):
    """Everything that a run carries from round to round; `clients` has a leading agent axis."""

    server: ServerState
    clients: PyTree


def agent_key(seed: Whole, agent: Whole) -> PRNGKeyArray:
    """An agent's own key for a whole run; the same in every engine, whatever runs beside it.

    In each round the agent works with `fold_in(key, round)`, so it can derive its randomness without the server.
    """
    return jax.random.fold_in(jax.random.key(seed), agent)


def fleet_round(
    algorithm: Algorithm,
    agent: Callable[[Any], Objective],
    tasks: Any,
    state: FleetState,
    keys: Key[Array, " n"],
    round_: Whole,
    chunk: int | None = None,
) -> FleetState:
    """One communication round of one lane: every client, at most `chunk` at a time, then the server."""

    def client(task, client_state, key):
        return algorithm.client(state.server.message, client_state, agent(task), jax.random.fold_in(key, round_))

    uploads, clients = by_agent(client, (tasks, state.clients, keys), chunk)
    # The barrier keeps the compiler from merging the chunks' layout into the server's sum and changing its order.
    uploads = jax.lax.optimization_barrier(uploads)
    return FleetState(algorithm.server(state.server, uploads, jnp.ones(len(keys))), clients)


def _lanes(algorithms, states, seeds, agent, tasks, first, rounds, chunk, devices):
    """Advance all lanes by `rounds` rounds from round `first`."""

    def lane(algorithm, state, seed, agent, tasks, first, rounds):
        keys = jax.vmap(lambda i: agent_key(seed, i))(jnp.arange(len(jax.tree.leaves(tasks)[0])))
        body = lambda k, state: fleet_round(algorithm, agent, tasks, state, keys, k, chunk)  # noqa: E731
        return jax.lax.fori_loop(first, first + rounds, body, state)

    every_lane = jax.vmap(lane, in_axes=(0, 0, 0, None, None, None, None))
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("lane",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:devices])
        split, whole = PartitionSpec("lane"), PartitionSpec()
        specs = (split, split, split, whole, whole, whole, whole)
        every_lane = jax.shard_map(every_lane, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
    return every_lane(algorithms, states, seeds, agent, tasks, first, rounds)


advance_lanes = jit(_lanes, static_argnames=("chunk", "devices"))


def _returns(algorithms, agent: Exact, tasks, messages, clients, chunk):
    """Every agent's exact return under the shared parameters and under its personalized ones: [lane, 2, agent]."""

    def lane(algorithm, message, clients):
        def measure(task, client):
            exact = agent(task)
            personal = algorithm.personalize(message, client, exact, jax.random.key(0), 0)
            return jnp.stack([exact.value(algorithm.shared(message)), exact.value(personal)])

        return by_agent(measure, (tasks, clients), chunk).T

    return jax.vmap(lane)(algorithms, messages, clients)


measure_lanes = float64(jit(_returns, static_argnames="chunk"))


@dataclass(frozen=True)
class Simulation:
    """A fleet, a policy and one algorithm per lane, ready to train.

    `agent` makes what an algorithm sees of a task: `Sampled(policy)` when left out; with `Exact(policy)` gradients and
    curvature are exact and everything is in float64: the m -> infinity dynamics. `chunk` bounds how many agents run at
    a time, for fleets that exceed memory; results do not depend on it.
    """

    fleet: Fleet
    policy: Any
    algorithms: Sequence[Algorithm]
    seeds: Sequence[int]
    agent: Callable[[Any], Objective] | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if len(self.algorithms) != len(self.seeds) or not self.seeds:
            raise UserError(f"each lane needs an algorithm and a seed: {len(self.algorithms)} and {len(self.seeds)}")
        if any(not 0 <= seed < 2**32 for seed in self.seeds):
            raise UserError("seeds must be whole numbers from 0 to 2**32 - 1")
        if len({jax.tree.structure(algorithm) for algorithm in self.algorithms}) > 1:
            raise UserError("lanes may differ in step sizes and seeds only, not in the algorithm or its batch sizes")
        if self.chunk is not None and self.chunk < 1:
            raise UserError(f"chunk must be at least 1; it is {self.chunk}")
        if not isinstance(self.fleet.train, TabularMDP):
            raise UserError("the simulator measures by dynamic programming and needs a fleet of TabularMDP")
        tabulated = jax.eval_shape(self.policy.probabilities, self.policy.init(jax.random.key(0))).shape
        if tabulated != self.fleet.train.r.shape[1:]:
            raise UserError(
                f"the policy is for {tabulated} states and actions, the fleet has {self.fleet.train.r.shape[1:]}"
            )

    @property
    def _agent(self) -> Callable[[Any], Objective]:
        return Sampled(self.policy) if self.agent is None else self.agent

    @property
    def _precision(self):
        return jax.enable_x64(True) if isinstance(self.agent, Exact) else nullcontext()

    @cached_property
    def _algorithms(self) -> Algorithm:
        """The lanes' algorithms as one pytree with a leading lane axis on its step sizes."""
        return jax.tree.map(lambda *xs: np.asarray(xs, dtype=float), *self.algorithms)

    def _init(self) -> tuple[ServerState, PyTree]:
        return self.algorithms[0].init(self.policy.init(jax.random.key(0)))

    def start(self) -> FleetState:
        """The state before round 0, the same in every lane."""
        with self._precision:
            server, client = self._init()
            state = FleetState(server, _repeat(client, self.fleet.agents))
            return jax.tree.map(np.asarray, _repeat(state, len(self.seeds)))

    def advance(self, state: FleetState, first: int, rounds: int) -> FleetState:
        """Train every lane for some rounds, counted from `first`."""
        lanes = len(self.seeds)
        devices = min(len(jax.local_devices()), lanes)
        # The last lane is repeated until the lanes divide evenly among the devices.
        pad = lambda x: np.concatenate([x, np.repeat(x[-1:], -lanes % devices, axis=0)])  # noqa: E731
        per_lane = jax.tree.map(pad, (self._algorithms, state, np.asarray(self.seeds, np.uint32)))
        with self._precision:
            out = advance_lanes(
                *per_lane, self._agent, self.fleet.train, first, rounds, chunk=self.chunk, devices=devices
            )
            return jax.tree.map(lambda x: np.asarray(x)[:lanes], out)

    def measure(self, state: FleetState, round_: int) -> History:
        """The history of a single evaluation, by exact dynamic programming.

        Held-out agents are measured as they would start: with the message and a fresh client state.
        """
        lanes, message = len(self.seeds), state.server.message
        nobody = np.zeros((lanes, 2, 0))
        measured = [self._returns(self.fleet.train, message, state.clients), nobody]
        if self.fleet.held_out is not None:
            fresh = _repeat(_repeat(self._init()[1], self.fleet.held_out_agents), lanes)
            measured[1] = self._returns(self.fleet.held_out, message, fresh)
        (before, after), (held_out_before, held_out_after) = (np.moveaxis(x, 1, 0)[:, :, None] for x in measured)
        return History(
            seeds=np.asarray(self.seeds),
            rounds=np.asarray([round_]),
            trajectories=np.asarray([round_ * self.algorithms[0].trajectories_per_round]),
            bytes=np.asarray([round_ * self._bytes_per_round]),
            before=before,
            after=after,
            held_out_before=held_out_before,
            held_out_after=held_out_after,
        )

    def _returns(self, tasks: Any, messages: PyTree, clients: PyTree) -> np.ndarray:
        return measure_lanes(self._algorithms, Exact(self.policy), tasks, messages, clients, chunk=self.chunk)

    @cached_property
    def _bytes_per_round(self) -> int:
        """What one agent receives and sends."""
        with self._precision:
            server, client = self._init()
            agent = self._agent(self.fleet.task(0))
            work = lambda key: self.algorithms[0].client(server.message, client, agent, key)  # noqa: E731
            upload, _ = jax.eval_shape(work, jax.random.key(0))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((server.message, upload)))

    def begin(self) -> "Standing":
        """Where the run stands before its first round, measured."""
        state = self.start()
        return Standing(0, state, self.measure(state, 0))

    def run(self, standing: "Standing", rounds: int, every: int) -> Iterator["Standing"]:
        """Go on to round `rounds`: yield where the run stands after every `every` rounds and after the last."""
        for k in range(standing.round, rounds, every):
            done = min(k + every, rounds)
            state = self.advance(standing.state, k, done - k)
            measured = self.measure(state, done)
            if not (np.isfinite(measured.before).all() and np.isfinite(measured.after).all()):
                raise UserError(f"training diverged between rounds {k} and {done}: lower alpha or beta")
            standing = Standing(done, state, standing.history.extend(measured))
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
) -> Result:
    """Train one algorithm on a fleet for several seeds at once and measure it exactly every few rounds.

    `noiseless` replaces sampling by exact gradients and curvature. For other estimators, or an objective of one's own,
    make a `Simulation`.
    """
    if rounds < 1 or every < 1:
        raise UserError(f"rounds and every must be at least 1; they are {rounds} and {every}")
    seeds = list(range(seeds) if isinstance(seeds, int) else seeds)
    agent = Exact(policy) if noiseless else None
    simulation = Simulation(fleet, policy, [algorithm] * len(seeds), seeds, agent, chunk)
    last = deque(simulation.run(simulation.begin(), rounds, every), maxlen=1).pop()
    return Result(last.history, shared_params(algorithm, last.state))


def shared_params(algorithm: Algorithm, state: FleetState) -> Params:
    """The shared initialization of every lane."""
    return jax.tree.map(np.asarray, jax.vmap(algorithm.shared)(state.server.message))


def by_agent(f: Callable[..., Any], each: tuple, chunk: int | None) -> Any:
    """Map a function over agents, all at once or at most `chunk` at a time."""
    if chunk is None or chunk >= len(jax.tree.leaves(each)[0]):
        return jax.vmap(f)(*each)
    return jax.lax.map(lambda xs: f(*xs), each, batch_size=chunk)


def _repeat(tree: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda x: np.broadcast_to(x, (count, *np.shape(x))), tree)
