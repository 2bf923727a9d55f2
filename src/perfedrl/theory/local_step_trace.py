"""Training with every local step recorded: the parameters of every agent after every local step."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from perfedrl.algorithms import average
from perfedrl.compilation import jit
from perfedrl.envs import Fleet
from perfedrl.estimators import PAPER, Objective, Sampled, StepKeys
from perfedrl.simulation.keys import agent_keys
from perfedrl.theory.fleet_problem import first_parameters, settings
from perfedrl.types import Params, Whole


class Trace(NamedTuple):
    """Parameters theta_i^{k,t} with leading axes [round k, local step t = 0 .. tau, agent i]."""

    params: Params

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(jax.tree.leaves(self.params)[0])

    @property
    def server(self) -> Params:
        """Parameters theta^0 .. theta^{K-1} that the server broadcast."""
        return jax.tree.map(lambda x: x[:, 0, 0], self.params)

    @property
    def mean(self) -> Params:
        """Virtual averages over agents of Section 4, [round, local step t = 0 .. tau]."""
        return jax.tree.map(lambda x: x.mean(axis=2), self.params)


def trace(
    fleet: Fleet, policy: Any, algorithm: Any, rounds: int, seed: int = 0, start: int = 0, agent: Any = None
) -> Trace:
    """Record the steps that `simulate` takes with these arguments, with the paper's estimators or those of `agent`."""
    settings(algorithm)
    theta = first_parameters(policy, start)
    agent = Sampled(policy, **PAPER) if agent is None else agent
    taken = _trace(algorithm, agent, fleet.train, theta, seed, rounds)
    return Trace(jax.tree.map(np.asarray, taken))


@partial(jit, static_argnums=(5,))
def _trace(algorithm: Any, agent: Any, tasks: Any, theta: Params, seed: Whole, rounds: int) -> Params:
    keys = agent_keys(seed, tasks)

    def local(objective: Objective, theta: Params, key) -> tuple[Params, Params]:
        def step(carry, k):
            return algorithm.step(objective, carry, StepKeys(*k)), carry[0]

        keys = jax.random.split(key, (algorithm.local_steps, len(StepKeys._fields)))
        (last, _), path = jax.lax.scan(step, (theta, ()), keys)
        return last, path

    def one_round(theta: Params, k):
        last, path = jax.vmap(lambda task, key: local(agent(task), theta, jax.random.fold_in(key, k)))(tasks, keys)
        path = jax.tree.map(lambda x, y: jnp.concatenate([jnp.swapaxes(x, 0, 1), y[None]]), path, last)
        return average(last, jnp.ones(len(keys))), path

    return jax.lax.scan(one_round, theta, jnp.arange(rounds))[1]
