"""The Python loop: rounds and measurements of agents that JAX cannot trace, one agent after the other.

Random keys are derived as in the compiled loop, from (seed, agent, round). An agent that cannot play its episodes is
left out of the round, and its measurements are NaN; both are counted.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from perfedrl.algorithms import Algorithm
from perfedrl.contracts import delegated
from perfedrl.envs.base import PlayedTask
from perfedrl.errors import EnvironmentFailureError, UserError
from perfedrl.estimators import Objective
from perfedrl.rollout import OutlineSampler
from perfedrl.simulation.failures import FailureLog
from perfedrl.simulation.keys import agent_key, draw_participants
from perfedrl.simulation.run_state import FleetState

log = logging.getLogger("perfedrl")


def advance(
    algorithms: Sequence[Algorithm],
    state: FleetState,
    seeds: Sequence[int],
    agent: Callable[[Any], Objective],
    tasks: Sequence[Any],
    first: int,
    rounds: int,
    weights: Float[np.ndarray, " n"] | None,
    participants: int | None,
    failures: Sequence[FailureLog],
) -> FleetState:
    """Advance all replicas by `rounds` rounds from round `first`, one replica and one agent after the other."""
    agents, weights = [agent(task) for task in tasks], np.ones(len(tasks)) if weights is None else weights
    done = []
    for i, (algorithm, seed) in enumerate(zip(algorithms, seeds, strict=True)):
        replica = jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), state)
        for k in range(first, first + rounds):
            count = len(tasks)
            who = range(count) if participants is None else draw_participants(seed, k, count, participants).tolist()
            replica = play_round(algorithm, replica, agents, seed, k, weights, who, failures[i])
        done.append(replica)
    return jax.tree.map(lambda *xs: np.stack(xs), *done)


def play_round(
    algorithm: Algorithm,
    state: FleetState,
    agents: Sequence[Objective],
    seed: int,
    round_: int,
    weights: Float[np.ndarray, " n"],
    who: Sequence[int],
    failures: FailureLog,
) -> FleetState:
    """Run one communication round of one replica; the agents `who` participate."""
    uploads, participants, clients = [], [], []
    for i, agent in enumerate(agents):
        client = jax.tree.map(lambda x, i=i: x[i], state.clients)
        if i not in who:
            clients.append(client)
            continue
        key = jax.random.fold_in(agent_key(seed, i), round_)
        try:
            with failures.of(i):
                upload, client = algorithm.client(state.server.message, client, agent, key)
        except EnvironmentFailureError as error:
            log.warning("round %d, seed %d goes on without one agent: %s", round_, seed, error)
            failures.missed_round(i)
            failed = error
        else:
            uploads.append(upload)
            participants.append(i)
        clients.append(client)
    if len(uploads) < algorithm.least_agents:
        raise UserError(f"round {round_} has too few agents left to go on; {failed}")
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *uploads)
    server = algorithm.server(state.server, stacked, jnp.asarray(weights[participants], float))
    return FleetState(server, jax.tree.map(lambda *xs: jnp.stack(xs), *clients))


def measure(
    how: Callable[..., Any],
    algorithms: Sequence[Algorithm],
    messages: PyTree,
    clients: PyTree,
    seeds: Sequence[int],
    evaluation: Any,
    tasks: Sequence[Any],
    first_agent: int,
    moment: int,
    failures: Sequence[FailureLog],
) -> Any:
    """Apply `how`, a function of one agent, to every agent of every replica: arrays [replica, agent, ...].

    An agent that cannot be measured has NaN; so have all, if none of them can be measured.
    """
    rows: list[list[Any]] = []
    for i, (algorithm, seed) in enumerate(zip(algorithms, seeds, strict=True)):
        row = []
        for j, task in enumerate(tasks):
            message = jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), messages)
            client = jax.tree.map(lambda x, i=i, j=j: jnp.asarray(x[i, j]), clients)
            key = jax.random.fold_in(agent_key(seed, first_agent + j), np.uint32(moment))
            try:
                with failures[i].of(first_agent + j):
                    row.append(how(evaluation, algorithm, message, client, task, key))
            except EnvironmentFailureError as error:
                log.warning("seed %d: an agent is not measured, and its values are nan: %s", seed, error)
                failures[i].missed_measurement(first_agent + j)
                shapes = jax.eval_shape(partial(how, evaluation, algorithm, message, client, Outlined(task)), key)
                row.append(jax.tree.map(lambda x: np.full(x.shape, np.nan), shapes))
        rows.append(row)
    return stack(rows)


class Outlined(PlayedTask):
    """A task whose episodes are made up: for the shapes of what is measured, without playing."""

    def __init__(self, task: PlayedTask):
        self._task = task

    horizon = delegated("_task")
    discount = delegated("_task")
    seen = delegated("_task")
    outcomes = delegated("_task")
    outline = delegated("_task")

    def sampler(self, policy: Any) -> Any:
        """Return the sampler of made-up episodes, which JAX can trace."""
        return OutlineSampler(self._task)


def stack(rows: list[list[Any]]) -> Any:
    """Stack the measurements of all agents into arrays [replica, agent, ...]."""
    return jax.tree.map(lambda *xs: np.stack(xs), *(jax.tree.map(lambda *xs: np.stack(xs), *row) for row in rows))
