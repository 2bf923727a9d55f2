"""Limits of an algorithm's noiseless rounds, and the gradient of the mean return that remains there.

A shared policy is stationary for the fleet if the agents' gradients sum to zero. Local steps that differ between agents
can converge to another point; this is the heterogeneity bias.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float

from perfedrl.algorithms import Algorithm
from perfedrl.compilation import jit
from perfedrl.envs import Fleet
from perfedrl.exact.tabular import Exact
from perfedrl.simulation.compiled import fleet_round
from perfedrl.simulation.keys import agent_keys
from perfedrl.simulation.run_state import FleetState
from perfedrl.theory.fleet_problem import first_parameters
from perfedrl.types import Array, Params

MOST_ROUNDS, CONVERGED = 20_000, 1e-13
"""Largest number of rounds, and the distance of two rounds below which they have converged."""


class NoiselessLimit(NamedTuple):
    """Shared parameters to which noiseless rounds converge, or those after the last round."""

    theta: Params
    rounds: int
    moved: float
    """Distance moved in the last two rounds; some algorithms need two rounds for one update."""
    gradient: Float[np.ndarray, " d"]
    """Mean of the agents' gradients, flattened."""
    value: float
    """Mean return of the agents."""

    @property
    def bias(self) -> float:
        """Length of the remaining gradient."""
        return float(np.linalg.norm(self.gradient))


def noiseless_limit(
    fleet: Fleet, policy: Any, algorithm: Algorithm, most: int = MOST_ROUNDS, converged: float = CONVERGED
) -> NoiselessLimit:
    """Repeat noiseless rounds from the policy's initial parameters until two of them move at most `converged`."""
    with jax.enable_x64(True):
        server, client = algorithm.init(jax.tree.map(lambda x: jnp.asarray(x, float), first_parameters(policy, 0)))
        clients = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x)[None], fleet.agents, axis=0), client)
        state, rounds, moved = _until(
            algorithm, Exact(policy), fleet.train, FleetState(server, clients), most, converged
        )
        theta = algorithm.shared(state.server.message)
        values, gradients = jax.vmap(lambda task: _value_and_gradient(Exact(policy)(task), theta))(fleet.train)
        theta, gradient = jax.tree.map(np.asarray, (theta, jnp.mean(gradients, axis=0)))
        return NoiselessLimit(theta, int(rounds), float(moved), gradient, float(jnp.mean(values)))


def _value_and_gradient(objective: Any, theta: Params) -> tuple[Any, Any]:
    key = jax.random.key(0)
    return objective.value(theta, key, 1), ravel_pytree(objective.gradient(theta, key, 1))[0]


@jit
def _until(
    algorithm: Any, agent: Any, tasks: Any, state: FleetState, most: Any, converged: Any
) -> tuple[Any, Any, Any]:
    keys = agent_keys(0, tasks)

    def shared(state: FleetState) -> Float[Array, " d"]:
        return ravel_pytree(algorithm.shared(state.server.message))[0]

    def pair(carry: tuple) -> tuple:
        state, k, _ = carry
        after = fleet_round(algorithm, agent, tasks, state, keys, k)
        after = fleet_round(algorithm, agent, tasks, after, keys, k + 1)
        return after, k + 2, jnp.linalg.norm(shared(after) - shared(state))

    return jax.lax.while_loop(lambda carry: (carry[1] < most) & (carry[2] > converged), pair, (state, 0, jnp.inf))
