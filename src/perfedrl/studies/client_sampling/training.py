"""Training of Per-FedAvg-PG on the paper's gridworld with a share of the agents per round, with and without control
variates.

The paper treats full participation and names the correction as an extension.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from perfedrl import exact
from perfedrl.algorithms import Algorithm, ControlVariate, FedOpt, PerFedAvgPG
from perfedrl.algorithms.control_variate import MEMORY
from perfedrl.envs import Fleet, gridworld
from perfedrl.estimators import PAPER, Sampled
from perfedrl.exact.tabular import Exact
from perfedrl.policies import TableSoftmax
from perfedrl.simulation.experiment import Experiment
from perfedrl.simulation.simulator import Simulation
from perfedrl.types import Params

ALPHA, BETA, LOCAL_STEPS, BATCH = 2.0, 0.3, 5, 10
SHARE, ROUNDS, SEEDS = 0.25, 80, 20
PERTURBATION = 0.1
"""Standard deviation of the perturbation of a symmetric start."""
MODES: tuple[Literal["round", "step"], ...] = ("round", "step")
GRAIN = np.float32(2**-13)
"""Returns are rounded to multiples of this, which compress well."""
LAST, FAST = "round-remembering-one", "round-before-a-fast-server"


class Sampling(NamedTuple):
    """The return after adaptation of one method at some rounds, mean over agents.

    The names of the fields are those of the arrays in the measurement files.
    """

    rounds: np.ndarray
    after: Float[np.ndarray, "seed evaluation"]


def sampling(
    beta: float = BETA,
    local_steps: int = LOCAL_STEPS,
    *,
    m: int | None = BATCH,
    share: float = SHARE,
    memory: float = MEMORY,
    rounds: int = ROUNDS,
    seeds: Sequence[int] = range(SEEDS),
    stops: int = 20,
    rested: int = 0,
    fleet: Fleet | None = None,
    forms: Mapping[str, Any] = PAPER,
) -> dict[str, Sampling]:
    """Train with full participation for `rounds` rounds, and with a share of the agents for as many trajectories.

    Results are keyed by "full" and the names of `sampled`. Batches of the exact variant have `m` trajectories; where
    `m` is None gradients are exact. Training begins at the policy's start or, where `rested` is positive, at the limit
    of so many noiseless rounds with full participation, where the loss of the other methods is the cost of sampling.
    `forms` are the forms of the estimators.
    """
    fleet, batch = fleet or gridworld(), BATCH if m is None else m
    inner = PerFedAvgPG(ALPHA, beta, local_steps, batch, batch, batch)
    theta = None if not rested else noiseless_limit(fleet, inner, rested)

    def run(algorithm: Algorithm, share: float) -> Sampling:
        simulation = simulation_of(fleet, algorithm, seeds, None if m is None else forms, share)
        return follow(simulation, round(rounds / share), stops, theta)

    some = sampled(inner, fleet.agents, share, memory)
    return {"full": run(inner, 1.0)} | {name: run(algorithm, share) for name, algorithm in some.items()}


def sampled(inner: Algorithm, agents: int, share: float, memory: float) -> dict[str, Algorithm]:
    """The methods for a share of the agents: "plain", with a slower server ("slow"), and with control variates.

    With a share of the agents there are correspondingly more rounds, so a server rate equal to the share moves as far
    per trajectory as full participation. As published, control variates remember one round only and the server rate
    is 1; for control variates of rounds each of the two changes is also made alone.
    """
    slow = FedOpt(inner, "sgd", share)
    ours: dict[str, Algorithm] = {mode: ControlVariate(slow, mode, agents, memory) for mode in MODES}
    published = {as_published(mode): ControlVariate(inner, mode, agents, 1.0) for mode in MODES}
    parts = {LAST: ControlVariate(slow, "round", agents, 1.0), FAST: ControlVariate(inner, "round", agents, memory)}
    return {"plain": inner, "slow": slow, **ours, **published, **parts}


def as_published(mode: str) -> str:
    """The name of a control variate with its paper's memory and a server rate of 1."""
    return f"{mode}-as-published"


def noiseless_limit(fleet: Fleet, algorithm: Algorithm, rounds: int) -> Params:
    """The parameters after noiseless rounds of all agents from a perturbed start, since the start is symmetric."""
    simulation = simulation_of(fleet, algorithm, [0], None, 1.0)
    state = simulation.start()
    aside = PERTURBATION * np.random.default_rng(0).normal(size=state.server.message.shape)
    state = state._replace(server=state.server._replace(message=state.server.message + aside))
    return simulation.advance(state, 0, rounds).server.message[0]


def follow(simulation: Simulation, rounds: int, stops: int, theta: Params | None) -> Sampling:
    """Run one method from given parameters or from the policy's start, with `stops` evenly spaced evaluations."""
    fleet, algorithm, seeds = simulation.fleet, simulation.algorithms[0], simulation.seeds
    state, policy = simulation.start(), simulation.experiment.policy
    if theta is not None:
        begin = np.repeat(
            np.asarray(theta, np.result_type(*jax.tree.leaves(state.server.message)))[None], len(seeds), 0
        )
        stepped = isinstance(algorithm, ControlVariate) and algorithm.mode == "step"
        message = state.server.message._replace(inner=begin) if stepped else begin
        state = state._replace(server=state.server._replace(message=message))
    at = np.unique(np.linspace(0, rounds, stops + 1).round().astype(int)[1:])
    done, after = 0, []
    for stop in at:
        state, done = simulation.advance(state, done, int(stop) - done), int(stop)
        thetas = np.asarray(jax.vmap(algorithm.shared)(state.server.message), np.float64)
        after.append(exact.returns_of_many(fleet.train, thetas, ALPHA, policy)[:, 1].mean(axis=-1))
    return Sampling(at, np.round(np.stack(after, axis=1).astype(np.float32) / GRAIN) * GRAIN)


def simulation_of(
    fleet: Fleet, algorithm: Algorithm, seeds: Sequence[int], forms: Mapping[str, Any] | None, share: float
) -> Simulation:
    """A simulation with sampled gradients of some forms, or with exact gradients where `forms` is None."""
    policy = TableSoftmax(fleet.train.states, fleet.train.actions)
    agent = Exact(policy) if forms is None else Sampled(policy, **forms)
    return Simulation(Experiment(fleet, policy, algorithm, agent, participation=share), list(seeds))
