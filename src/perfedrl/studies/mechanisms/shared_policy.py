"""The rows of Table 1 with one shared policy and a value-based guarantee: FedNPG and FedSARSA, held to their claims.

FedNPG converges geometrically to the entropy-regularized optimum of the mean objective. FedSARSA comes to rest near the
fixed point of the mean MDP: without noise at a distance that grows with heterogeneity, with noise at one that falls
with the number of agents. Functions measure and return arrays; nothing is drawn here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from perfedrl.algorithms import Algorithm, FedNPG, FedSARSA
from perfedrl.envs import Fleet, TabularMDP, gridworld
from perfedrl.envs.random_mdps import random_mdps
from perfedrl.envs.tabular import unstack
from perfedrl.exact.soft import sarsa_q, soft_optimum, soft_q
from perfedrl.exact.tabular import Exact
from perfedrl.policies import TableSoftmax
from perfedrl.simulation.experiment import Experiment
from perfedrl.simulation.simulator import Simulation

ENTROPY = 0.1
SHARES = (1.0, 0.5, 0.2, 0.1)
"""FedNPG's c = beta entropy / (1 - gamma): the share of soft policy iteration that a step takes."""
BATCHES = (2, 10, 50)
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
AGENTS = (1, 2, 4, 8, 16, 32)
TEMPERATURE, BETA, LOCAL_STEPS = 1.0, 4.0, 5
"""FedSARSA's. At half the temperature the policy settles on what rose first, while values grow from 0 to 6."""
TAIL = 0.25
"""The last share of a curve, over which its plateau is the mean."""


class Curves(NamedTuple):
    """Errors by setting and round, one curve per setting; sampled ones have an axis of seeds between."""

    settings: np.ndarray
    rounds: Int[np.ndarray, " R"]
    errors: dict[str, Float[np.ndarray, "setting *seed R"]]


def mean_mdp(fleet: Fleet) -> TabularMDP:
    """The MDP whose arrays are the means of the training agents'."""
    tasks = fleet.train
    P, r, mu = (np.mean(x, axis=0) for x in (tasks.P, tasks.r, tasks.mu))
    return TabularMDP(P, r, mu, tasks.horizon, tasks.discount)


def npg_exact(
    shares: Sequence[float] = SHARES, fleet: Fleet | None = None, entropy: float = ENTROPY, rounds: int = 60
) -> Curves:
    """FedNPG without noise: the largest error of the log-policy ("policy") and of soft action values ("values")."""
    fleet = gridworld() if fleet is None else fleet
    betas = [share * (1 - fleet.train.discount) / entropy for share in shares]
    when, thetas = course(fleet, [FedNPG(0.0, beta, entropy) for beta in betas], [0] * len(betas), rounds, exact=True)
    mean = mean_mdp(fleet)
    best = soft_optimum(mean, entropy)
    log_policies = log_softmax(thetas)
    each = [[soft_q(mean, np.exp(x), entropy) for x in lane] for lane in log_policies]
    errors = {"policy": largest(log_policies - best.log_policy), "values": largest(np.asarray(each) - best.q)}
    return Curves(np.asarray(shares), when, errors)


def npg_sampled(
    batches: Sequence[int] = BATCHES,
    fleet: Fleet | None = None,
    share: float = 0.1,
    entropy: float = ENTROPY,
    rounds: int = 120,
    every: int = 4,
    seeds: int = 4,
) -> Curves:
    """FedNPG from m trajectories a round: the largest error of the log-policy ("policy"), by m and seed."""
    fleet = gridworld() if fleet is None else fleet
    best, beta = soft_optimum(mean_mdp(fleet), entropy), share * (1 - fleet.train.discount) / entropy
    found = [course(fleet, [FedNPG(0.0, beta, entropy, m)] * seeds, range(seeds), rounds, every) for m in batches]
    errors = [largest(log_softmax(thetas) - best.log_policy) for _, thetas in found]
    return Curves(np.asarray(batches), found[0][0], {"policy": np.stack(errors)})


def sarsa_heterogeneity(
    levels: Sequence[float] = LEVELS,
    agents: int = 8,
    rounds: int = 400,
    every: int = 10,
    local_steps: int = LOCAL_STEPS,
) -> Curves:
    """FedSARSA without noise on random MDPs, by heterogeneity: the distance of the weights of Q to a fixed point.

    To that of the mean MDP ("mean"), and to the agents' own, averaged over agents ("own").
    """
    curves: dict[str, list[np.ndarray]] = {"mean": [], "own": []}
    for level in levels:
        fleet = random_mdps(agents, heterogeneity=level)
        when, thetas = course(fleet, [sarsa(local_steps)], [0], rounds, every, exact=True)
        q = TEMPERATURE * thetas[0]
        own = np.stack([sarsa_q(task, TEMPERATURE) for task in unstack(fleet.train)])
        curves["mean"].append(norms(q - sarsa_q(mean_mdp(fleet), TEMPERATURE)))
        curves["own"].append(norms(q[:, None] - own).mean(axis=1))
    return Curves(np.asarray(levels), when, {name: np.stack(x) for name, x in curves.items()})


def sarsa_agents(
    agents: Sequence[int] = AGENTS, m: int = 1, rounds: int = 400, every: int = 10, seeds: int = 8, beta: float = BETA
) -> Curves:
    """FedSARSA from m trajectories a step, by the number of equal agents: the distance to their rest point ("mean")."""
    errors = []
    for n in agents:
        fleet = random_mdps(n, heterogeneity=0.0)
        when, thetas = course(fleet, [sarsa(LOCAL_STEPS, m, beta)] * seeds, range(seeds), rounds, every)
        errors.append(norms(TEMPERATURE * thetas - sarsa_q(fleet.task(0), TEMPERATURE)))
    return Curves(np.asarray(agents), when, {"mean": np.stack(errors)})


def plateau(errors: Float[np.ndarray, "... R"]) -> Float[np.ndarray, "..."]:
    """The root mean square of a curve's last quarter."""
    return np.sqrt(np.mean(errors[..., -max(1, round(TAIL * errors.shape[-1])) :] ** 2, axis=-1))


def sarsa(local_steps: int = LOCAL_STEPS, m: int = 1, beta: float = BETA) -> FedSARSA:
    """The study's FedSARSA; nothing is personalized in it."""
    return FedSARSA(0.0, beta, local_steps, m, TEMPERATURE)


def course(
    fleet: Fleet,
    algorithms: Sequence[Algorithm],
    seeds: Sequence[int],
    rounds: int,
    every: int = 1,
    exact: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The rounds after which a table policy is looked at, and its parameters there, [replica, R, S, A]."""
    policy = TableSoftmax(fleet.train.states, fleet.train.actions)
    agent: Any = Exact(policy) if exact else None
    simulation = Simulation(Experiment(fleet, policy, algorithms[0], agent), list(seeds), algorithms)
    state, when = simulation.start(), np.arange(0, rounds + 1, every)
    kept = [state.server.message]
    for first in when[:-1]:
        state = simulation.advance(state, int(first), every)
        kept.append(state.server.message)
    return when, np.stack(kept, axis=1).astype(np.float64)


def log_softmax(theta: Float[np.ndarray, "... A"]) -> Float[np.ndarray, "... A"]:
    with jax.enable_x64(True):
        return np.asarray(jax.nn.log_softmax(theta))


def largest(x: Float[np.ndarray, "... S A"]) -> Float[np.ndarray, "..."]:
    return np.abs(x).max(axis=(-2, -1))


def norms(x: Float[np.ndarray, "... S A"]) -> Float[np.ndarray, "..."]:
    return np.sqrt(np.sum(x**2, axis=(-2, -1)))
