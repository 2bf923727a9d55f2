"""What client sampling costs Per-FedAvg-PG on the paper's gridworld, and what control variates give back.

A study beside the paper, which treats full participation and names the correction as an extension.
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
BESIDE = 0.1
"""Standard deviation of what a symmetric start is moved by."""
MODES: tuple[Literal["round", "step"], ...] = ("round", "step")
GRAIN = np.float32(2**-13)
"""Returns are kept in steps of this, which take little room."""
LAST, FAST = "round-remembering-one", "round-before-a-fast-server"


class Sampling(NamedTuple):
    """One method at some rounds: the mean over agents of the return after adaptation."""

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
    """Full participation for `rounds` rounds, and a share of the agents for as many trajectories per agent.

    By "full" and the names of `sampled`. `m` trajectories per batch of the exact variant, or exact gradients where it
    is None. All begin from the policy's start, or from where `rested` noiseless rounds of everybody lead from beside
    it: there full participation has little more to gain, and what others lose is the penalty. `forms` are those of the
    estimators.
    """
    fleet, batch = fleet or gridworld(), BATCH if m is None else m
    inner = PerFedAvgPG(ALPHA, beta, local_steps, batch, batch, batch)
    theta = None if not rested else rest(fleet, inner, rested)
    run = lambda algorithm, share: followed(  # noqa: E731
        simulation_of(fleet, algorithm, seeds, None if m is None else forms, share), round(rounds / share), stops, theta
    )
    some = sampled(inner, fleet.agents, share, memory)
    return {"full": run(inner, 1.0)} | {name: run(algorithm, share) for name, algorithm in some.items()}


def sampled(inner: Algorithm, agents: int, share: float, memory: float) -> dict[str, Algorithm]:
    """What goes with a share of the agents: nothing ("plain"), a slower server ("slow"), control variates besides.

    With a share of the agents there are as many more rounds, so a server that goes that share of the way makes as much
    of a trajectory as with all of them. As published, control variates remember one round alone and the server goes
    all the way; those of rounds also with only one of the two.
    """
    slow = FedOpt(inner, "sgd", share)
    ours: dict[str, Algorithm] = {mode: ControlVariate(slow, mode, agents, memory) for mode in MODES}
    published = {as_published(mode): ControlVariate(inner, mode, agents, 1.0) for mode in MODES}
    parts = {LAST: ControlVariate(slow, "round", agents, 1.0), FAST: ControlVariate(inner, "round", agents, memory)}
    return {"plain": inner, "slow": slow, **ours, **published, **parts}


def as_published(mode: str) -> str:
    """The name of a control variate with its paper's memory, before a server without a rate."""
    return f"{mode}-as-published"


def rest(fleet: Fleet, algorithm: Algorithm, rounds: int) -> Params:
    """Where noiseless rounds of everybody lead; from beside the start, whose symmetry they would keep for ever."""
    simulation = simulation_of(fleet, algorithm, [0], None, 1.0)
    state = simulation.start()
    aside = BESIDE * np.random.default_rng(0).normal(size=state.server.message.shape)
    state = state._replace(server=state.server._replace(message=state.server.message + aside))
    return simulation.advance(state, 0, rounds).server.message[0]


def followed(simulation: Simulation, rounds: int, stops: int, theta: Params | None) -> Sampling:
    """One method from given parameters, or from the policy's start, looked at `stops` times at even distances."""
    fleet, algorithm, seeds = simulation.fleet, simulation.algorithms[0], simulation.seeds
    state, policy = simulation.start(), simulation.policy
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
    policy = TableSoftmax(fleet.train.states, fleet.train.actions)
    agent = Exact(policy) if forms is None else Sampled(policy, **forms)
    return Simulation(Experiment(fleet, policy, algorithm, agent, participation=share), list(seeds))
