"""The compiled programs: rounds of one fleet, agents side by side, lanes side by side.

A *lane* is one training run: a seed with its alpha and beta. All lanes advance in one call, spread over the devices
that JAX sees; the same program serves any number of rounds, so a run cut into pieces is bitwise the run in one go.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Float, Integer, Key, PRNGKeyArray, PyTree

from perfedrl.algorithms import Algorithm, ServerState
from perfedrl.compilation import jit
from perfedrl.estimators import Objective
from perfedrl.types import Array, Whole

EVALUATION, DEPLOYMENT = 2**31, 2**31 + 2**30
"""Folded, with the round, into an agent's key: training's rounds stay below them, and below 2**30."""

START, PERSONALIZATION, PARTICIPATION = 2**32 - 1, 2**32 - 2, 2**32 - 3
"""Folded into a seed's key, where training and evaluation fold an agent's number, which stays below them."""


class FleetState(NamedTuple):
    """Everything that a run carries from round to round; `clients` has a leading agent axis."""

    server: ServerState
    clients: PyTree


def agent_key(seed: Whole, agent: Whole) -> PRNGKeyArray:
    """An agent's own key for a whole run; the same in every engine, whatever runs beside it.

    In each round the agent works with `fold_in(key, round)`, so it can derive its randomness without the server.
    """
    return jax.random.fold_in(jax.random.key(seed), agent)


def agent_keys(seed: Whole, tasks: Any, first: Whole = 0) -> Key[Array, " n"]:
    """The keys of all agents in a stack of tasks, numbered from `first`: held-out agents follow the training ones."""
    return jax.vmap(lambda i: agent_key(seed, i))(first + jnp.arange(len(jax.tree.leaves(tasks)[0])))


def taking_part(seed: Whole, round_: Whole, agents: int, present: int) -> Integer[Array, " k"]:
    """Who takes part in a round, in the fleet's order: `present` of the agents, each set of so many alike likely.

    A function of seed and round alone, so every engine draws the same.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), PARTICIPATION), round_)
    return jnp.sort(jax.random.permutation(key, agents)[:present])


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
    """One communication round of one lane: every client, at most `chunk` at a time, then the server.

    Agents count alike in the server's mean, unless they have weights. Where `who` says which agents take part, the
    others neither work nor change.
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


def _advance(algorithms, states, seeds, agent, tasks, first, rounds, weights, chunk, devices, present=None):
    """Advance all lanes by `rounds` rounds from round `first`, with `present` agents in each or with all."""

    def lane(algorithm, state, seed, agent, tasks, first, rounds, weights):
        keys = agent_keys(seed, tasks)

        def body(k, state):
            who = None if present is None else taking_part(seed, k, len(keys), present)
            return fleet_round(algorithm, agent, tasks, state, keys, k, chunk, weights, who)

        return jax.lax.fori_loop(first, first + rounds, body, state)

    return over_lanes(lane, (algorithms, states, seeds), (agent, tasks, first, rounds, weights), devices)


def _measure(algorithms, messages, clients, seeds, evaluation, tasks, first_agent, moment, how, chunk, devices):
    """Apply `how`, a function of one agent, to every agent of every lane, each with its own key for that moment."""

    def lane(algorithm, message, clients, seed, evaluation, tasks, first_agent, moment):
        keys = agent_keys(seed, tasks, first_agent)

        def one(task, client, key):
            return how(evaluation, algorithm, message, client, task, jax.random.fold_in(key, moment))

        return by_agent(one, (tasks, clients, keys), chunk)

    lanes, common = (algorithms, messages, clients, seeds), (evaluation, tasks, first_agent, moment)
    return over_lanes(lane, lanes, common, devices)


def by_agent(f: Callable[..., Any], each: tuple, chunk: int | None) -> Any:
    """Map a function over agents, all at once or at most `chunk` at a time."""
    agents = len(jax.tree.leaves(each)[0])
    if chunk is None or chunk >= agents:
        return jax.vmap(f)(*each)
    # Empty arrays, which stand for what agents keep to themselves, go around `jax.lax.map`, which cannot chunk them.
    seen: dict[str, Any] = {}

    def filled(xs: tuple) -> list[Array]:
        seen["leaves"], seen["structure"] = jax.tree.flatten(f(*xs))
        return [x for x in seen["leaves"] if jnp.size(x)]

    made = iter(jax.lax.map(filled, each, batch_size=chunk))
    empty = lambda x: jnp.zeros((agents, *jnp.shape(x)), jnp.result_type(x))  # noqa: E731
    return jax.tree.unflatten(seen["structure"], [next(made) if jnp.size(x) else empty(x) for x in seen["leaves"]])


def over_lanes(f: Callable[..., Any], lanes: tuple, common: tuple, devices: int) -> Any:
    """Map a function over lanes, spread over devices; its arguments are what each lane has, then what all share."""
    mapped = jax.vmap(f, in_axes=(0,) * len(lanes) + (None,) * len(common))
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("lane",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:devices])
        split, whole = PartitionSpec("lane"), PartitionSpec()
        specs = (split,) * len(lanes) + (whole,) * len(common)
        mapped = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
    return mapped(*lanes, *common)


advance_lanes = jit(_advance, static_argnames=("chunk", "devices", "present"))
measure_lanes = jit(_measure, static_argnames=("how", "chunk", "devices"))
