"""The compiled loop: rounds of one fleet, with agents and replicas as vmapped axes.

A *replica* is one training run: a seed with its alpha and beta. All replicas advance in one call, spread over the
devices that JAX sees. The number of rounds is traced, so a run in several pieces is bitwise the run in one piece.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Float, Integer, Key

from perfedrl.algorithms import Algorithm
from perfedrl.compilation import jit
from perfedrl.estimators import Objective
from perfedrl.simulation.keys import agent_keys, draw_participants
from perfedrl.simulation.run_state import FleetState
from perfedrl.types import Array, Whole


def fleet_round(
    algorithm: Algorithm,
    agent: Callable[[Any], Objective],
    tasks: Any,
    state: FleetState,
    keys: Key[Array, " n"],
    round_: Whole,
    chunk: int | None = None,
    weights: Float[Array, " n"] | None = None,
    who: Integer[Array, " k"] | None = None,
) -> FleetState:
    """Run one communication round of one replica: every client, at most `chunk` at a time, then the server.

    Agents have equal weights in the server's mean unless `weights` are given. `who` lists the participants; the
    other agents neither work nor change.
    """
    if who is not None:
        own = (tasks, state.clients, keys, weights)
        tasks, clients, keys, weights = jax.tree.map(lambda x: jnp.asarray(x)[who], own)
        here = FleetState(state.server, clients)
        after = fleet_round(algorithm, agent, tasks, here, keys, round_, chunk, weights)
        clients = jax.tree.map(lambda x, new: x.at[who].set(new), state.clients, after.clients)
        return FleetState(after.server, clients)

    def client(task, client_state, key):
        return algorithm.client(state.server.message, client_state, agent(task), jax.random.fold_in(key, round_))

    uploads, clients = by_agent(client, (tasks, state.clients, keys), chunk)
    # The barrier keeps the compiler from merging the chunks' layout into the server's sum and changing its order.
    uploads = jax.lax.optimization_barrier(uploads)
    weights = jnp.ones(len(keys)) if weights is None else weights
    return FleetState(algorithm.server(state.server, uploads, weights), clients)


def _advance(algorithms, states, seeds, agent, tasks, first, rounds, weights, chunk, devices, participants=None):
    """Advance all replicas by `rounds` rounds from round `first`, with `participants` agents in each, or with all."""

    def replica(algorithm, state, seed, agent, tasks, first, rounds, weights):
        keys = agent_keys(seed, tasks)

        def body(k, state):
            who = None if participants is None else draw_participants(seed, k, len(keys), participants)
            return fleet_round(algorithm, agent, tasks, state, keys, k, chunk, weights, who)

        return jax.lax.fori_loop(first, first + rounds, body, state)

    return over_replicas(replica, (algorithms, states, seeds), (agent, tasks, first, rounds, weights), devices)


def _measure(algorithms, messages, clients, seeds, evaluation, tasks, first_agent, moment, how, chunk, devices):
    """Apply `how`, a function of one agent, to every agent of every replica, each with its own key for that moment."""

    def replica(algorithm, message, clients, seed, evaluation, tasks, first_agent, moment):
        keys = agent_keys(seed, tasks, first_agent)

        def one(task, client, key):
            return how(evaluation, algorithm, message, client, task, jax.random.fold_in(key, moment))

        return by_agent(one, (tasks, clients, keys), chunk)

    replicas, common = (algorithms, messages, clients, seeds), (evaluation, tasks, first_agent, moment)
    return over_replicas(replica, replicas, common, devices)


def by_agent(f: Callable[..., Any], each: tuple, chunk: int | None) -> Any:
    """Map a function over agents, all at once or at most `chunk` at a time."""
    agents = len(jax.tree.leaves(each)[0])
    if chunk is None or chunk >= agents:
        return jax.vmap(f)(*each)
    # `jax.lax.map` cannot chunk empty arrays, which stand for parameters that agents keep to themselves.
    seen: dict[str, Any] = {}

    def filled(xs: tuple) -> list[Array]:
        seen["leaves"], seen["structure"] = jax.tree.flatten(f(*xs))
        return [x for x in seen["leaves"] if jnp.size(x)]

    made = iter(jax.lax.map(filled, each, batch_size=chunk))

    def empty(x: Any) -> Array:
        return jnp.zeros((agents, *jnp.shape(x)), jnp.result_type(x))

    return jax.tree.unflatten(seen["structure"], [next(made) if jnp.size(x) else empty(x) for x in seen["leaves"]])


def over_replicas(f: Callable[..., Any], replicas: tuple, common: tuple, devices: int) -> Any:
    """Map a function over replicas, spread over devices; arguments of each replica come first, then shared ones."""
    mapped = jax.vmap(f, in_axes=(0,) * len(replicas) + (None,) * len(common))
    if devices > 1:
        mesh = jax.make_mesh(
            (devices,), ("replica",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:devices]
        )
        split, whole = PartitionSpec("replica"), PartitionSpec()
        specs = (split,) * len(replicas) + (whole,) * len(common)
        mapped = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
    return mapped(*replicas, *common)


advance_replicas = jit(_advance, static_argnames=("chunk", "devices", "participants"))
measure_replicas = jit(_measure, static_argnames=("how", "chunk", "devices"))
