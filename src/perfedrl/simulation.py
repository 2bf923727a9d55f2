"""The whole fleet in one process: a loop over rounds, agents side by side, seeds and step sizes side by side.

A *lane* is one training run: a seed with its alpha and beta. All lanes advance in one compiled call, spread over the
devices that JAX sees; the same call serves any number of rounds, so a run cut into pieces is bitwise the run in one go.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from perfedrl.exact import Exact, returns_of_many
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

    each = (tasks, state.clients, keys)
    if chunk is None or chunk >= len(keys):
        uploads, clients = jax.vmap(client)(*each)
    else:
        uploads, clients = jax.lax.map(lambda xs: client(*xs), each, batch_size=chunk)
    # The barrier keeps the compiler from merging the chunks' layout into the server's sum and changing its order.
    uploads = jax.lax.optimization_barrier(uploads)
    return FleetState(algorithm.server(state.server, uploads, jnp.ones(len(keys))), clients)


def _lanes(algorithms, agent, tasks, states, seeds, first, rounds, chunk, devices):
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


@dataclass(frozen=True)
class Simulation:
    """A fleet, a policy and one algorithm per lane, ready to train.

    `exact` replaces sampling by exact gradients and curvature, in float64: the m -> infinity dynamics. `chunk` bounds
    how many agents run at a time, for fleets that exceed memory; results do not depend on it.
    """

    fleet: Fleet
    policy: Any
    algorithms: Sequence[Algorithm]
    seeds: Sequence[int]
    curvature: str = "score"
    exact: bool = False
    chunk: int | None = None

    def __post_init__(self) -> None:
        if len(self.algorithms) != len(self.seeds) or not self.seeds:
            raise UserError(f"each lane needs an algorithm and a seed: {len(self.algorithms)} and {len(self.seeds)}")
        if len({jax.tree.structure(algorithm) for algorithm in self.algorithms}) > 1:
            raise UserError("lanes may differ in step sizes and seeds only, not in the algorithm or its batch sizes")
        if self.chunk is not None and self.chunk < 1:
            raise UserError(f"chunk must be at least 1; it is {self.chunk}")

    @property
    def _precision(self):
        return jax.enable_x64(True) if self.exact else nullcontext()

    @property
    def _agent(self) -> Callable[[Any], Objective]:
        return Exact(self.policy) if self.exact else Sampled(self.policy, self.curvature)

    @property
    def stacked_algorithms(self) -> Algorithm:
        """The lanes' algorithms as one pytree with a leading lane axis on its step sizes."""
        return jax.tree.map(lambda *xs: np.asarray(xs, dtype=float), *self.algorithms)

    def start(self) -> FleetState:
        """The state before round 0, the same in every lane."""
        with self._precision:
            server, client = self.algorithms[0].init(self.policy.init(jax.random.key(0)))
            clients = _repeat(client, self.fleet.agents)
            return jax.tree.map(np.asarray, _repeat(FleetState(server, clients), len(self.seeds)))

    def advance(self, state: FleetState, first: int, rounds: int) -> FleetState:
        """Train every lane for some rounds, counted from `first`."""
        lanes = len(self.seeds)
        devices = min(len(jax.local_devices()), lanes)
        with self._precision:
            # The last lane is repeated until the lanes divide evenly among the devices.
            pad = lambda x: np.concatenate([x, np.repeat(x[-1:], -lanes % devices, axis=0)])  # noqa: E731
            algorithms, state, seeds = jax.tree.map(
                pad, (self.stacked_algorithms, state, np.asarray(self.seeds, np.uint32))
            )
            out = advance_lanes(
                algorithms,
                self._agent,
                self.fleet.train,
                state,
                seeds,
                first,
                rounds,
                chunk=self.chunk,
                devices=devices,
            )
            return jax.tree.map(lambda x: np.asarray(x)[:lanes], out)

    def measure(self, state: FleetState, round_: int) -> History:
        """The history of a single evaluation, by exact dynamic programming."""
        thetas, alphas = state.server.message, np.asarray([a.alpha for a in self.algorithms], dtype=float)
        both = lambda tasks: np.moveaxis(  # noqa: E731
            returns_of_many(tasks, thetas, alphas, self.policy), 1, 0
        )[:, :, None]
        before, after = both(self.fleet.train)
        nobody = np.zeros((len(self.seeds), 1, 0))
        held_out = (nobody, nobody) if self.fleet.held_out is None else both(self.fleet.held_out)
        each_way = sum(x[0].nbytes for x in jax.tree.leaves(thetas))
        return History(
            seeds=np.asarray(self.seeds),
            rounds=np.asarray([round_]),
            trajectories=np.asarray([round_ * self.algorithms[0].trajectories_per_round]),
            bytes=np.asarray([round_ * 2 * each_way]),
            before=before,
            after=after,
            held_out_before=held_out[0],
            held_out_after=held_out[1],
        )

    def begin(self) -> "Standing":
        """Where the run stands before its first round, measured."""
        state = self.start()
        return Standing(0, state, self.measure(state, 0))

    def run(self, standing: "Standing", rounds: int, every: int) -> Iterator["Standing"]:
        """Go on to round `rounds`: yield where the run stands after every `every` rounds and after the last."""
        for k in range(standing.round, rounds, every):
            done = min(k + every, rounds)
            state = self.advance(standing.state, k, done - k)
            standing = Standing(done, state, standing.history.extend(self.measure(state, done)))
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
    exact: bool = False,
    chunk: int | None = None,
) -> Result:
    """Train one algorithm on a fleet for several seeds at once and measure it exactly every few rounds."""
    if rounds < 1 or every < 1:
        raise UserError(f"rounds and every must be at least 1; they are {rounds} and {every}")
    if not isinstance(fleet.train, TabularMDP):
        raise UserError("the simulator measures by dynamic programming and needs a fleet of TabularMDP")
    seeds = range(seeds) if isinstance(seeds, int) else seeds
    simulation = Simulation(fleet, policy, [algorithm] * len(seeds), list(seeds), exact=exact, chunk=chunk)
    last = deque(simulation.run(simulation.begin(), rounds, every), maxlen=1).pop()
    return Result(last.history, last.state.server.message)


def _repeat(tree: PyTree, count: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), tree)
