"""Training of table policies whose errors against exact solutions are followed by round: FedNPG and FedSARSA."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from perfedrl.algorithms import Algorithm
from perfedrl.envs import Fleet, TabularMDP
from perfedrl.exact.tabular import Exact
from perfedrl.policies import TableSoftmax
from perfedrl.simulation.experiment import Experiment
from perfedrl.simulation.simulator import Simulation


class Curves(NamedTuple):
    """Errors by setting and round, one curve per setting; sampled ones have an axis of seeds in between.

    The names of the fields are those of the arrays in the measurement files.
    """

    settings: np.ndarray
    rounds: Int[np.ndarray, " R"]
    errors: dict[str, Float[np.ndarray, "setting *seed R"]]


def mean_mdp(fleet: Fleet) -> TabularMDP:
    """The MDP whose transitions, rewards and start distribution are the means over training agents."""
    tasks = fleet.train
    P, r, mu = (np.mean(x, axis=0) for x in (tasks.P, tasks.r, tasks.mu))
    return TabularMDP(P, r, mu, tasks.horizon, tasks.discount)


def table_parameters(
    fleet: Fleet,
    algorithms: Sequence[Algorithm],
    seeds: Sequence[int],
    rounds: int,
    every: int = 1,
    exact: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Train a table policy, one seed per algorithm; return each `every`-th round and the parameters [seed, R, S, A]."""
    policy = TableSoftmax(fleet.train.states, fleet.train.actions)
    agent: Any = Exact(policy) if exact else None
    simulation = Simulation(Experiment(fleet, policy, algorithms[0], agent), list(seeds), algorithms)
    state, when = simulation.start(), np.arange(0, rounds + 1, every)
    parameters = [state.server.message]
    for first in when[:-1]:
        state = simulation.advance(state, int(first), every)
        parameters.append(state.server.message)
    return when, np.stack(parameters, axis=1).astype(np.float64)


def log_softmax(theta: Float[np.ndarray, "... A"]) -> Float[np.ndarray, "... A"]:
    """Logarithms of softmax probabilities, in float64."""
    with jax.enable_x64(True):
        return np.asarray(jax.nn.log_softmax(theta))


def largest(x: Float[np.ndarray, "... S A"]) -> Float[np.ndarray, "..."]:
    """The largest absolute entry of a table."""
    return np.abs(x).max(axis=(-2, -1))


def norms(x: Float[np.ndarray, "... S A"]) -> Float[np.ndarray, "..."]:
    """The Euclidean norm of a table."""
    return np.sqrt(np.sum(x**2, axis=(-2, -1)))
