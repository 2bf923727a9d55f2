"""Random keys of a run: one per agent, and the draw of a round's participants."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Integer, Key, PRNGKeyArray

from perfedrl.key_domains import PARTICIPATION, START
from perfedrl.types import Array, Whole


def start_key(number: int) -> PRNGKeyArray:
    """The key that draws the parameters which training starts from."""
    return jax.random.fold_in(jax.random.key(number), START)


def agent_key(seed: Whole, agent: Whole) -> PRNGKeyArray:
    """The key of one agent for a whole run; it does not depend on the other agents or on the engine.

    In each round the agent works with `fold_in(key, round)`, so it can derive its randomness without the server.
    """
    return jax.random.fold_in(jax.random.key(seed), agent)


def agent_keys(seed: Whole, tasks: Any, first: Whole = 0) -> Key[Array, " n"]:
    """The keys of all agents in a stack of tasks, numbered from `first`: held-out agents follow the training agents."""
    return jax.vmap(lambda i: agent_key(seed, i))(first + jnp.arange(len(jax.tree.leaves(tasks)[0])))


def draw_participants(seed: Whole, round_: Whole, agents: int, count: int) -> Integer[Array, " k"]:
    """The participants of a round: `count` agents, sampled uniformly without replacement, in fleet order.

    The draw depends on the seed and the round alone, so every engine draws the same agents.
    """
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), PARTICIPATION), round_)
    return jnp.sort(jax.random.permutation(key, agents)[:count])
