"""Enumeration of all trajectories and batches of a small MDP, so that expectations are finite sums."""

from itertools import combinations_with_replacement
from math import comb
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float
from scipy.special import gammaln

from perfedrl.envs import TabularMDP
from perfedrl.errors import UserError
from perfedrl.policies import TablePolicy
from perfedrl.types import Array, Params

MOST_TRAJECTORIES, MOST_BATCHES = 4096, 200_000
PADDED = 1024
"""Lists of batches are padded with batches of probability zero to a multiple of this, to limit recompilation."""


class PossibleTrajectories(NamedTuple):
    """The N possible trajectories of an MDP, each of T = H + 1 decisions.

    `dynamics` is the factor of their probability that does not depend on the policy, `reward_to_go` the R^h of eq. (2).
    """

    states: np.ndarray
    actions: np.ndarray
    dynamics: Float[np.ndarray, " N"]
    reward_to_go: Float[np.ndarray, "N T"]


def possible_trajectories(mdp: TabularMDP, most: int = MOST_TRAJECTORIES) -> PossibleTrajectories:
    """Enumerate the trajectories of positive probability under some policy; raises `UserError` above `most`."""
    P, r = mdp.P, np.asarray(mdp.r)
    states, actions = np.flatnonzero(np.asarray(mdp.mu))[:, None], np.empty((0, 0), int)
    dynamics = np.asarray(mdp.mu)[states[:, 0]]
    A = mdp.actions
    for t in range(mdp.horizon + 1):
        if len(states) * A > most:
            raise UserError(f"the MDP has more than {most} trajectories: too many to list")
        chosen = np.tile(np.arange(A), len(states))
        actions = np.column_stack([np.repeat(actions.reshape(len(states), t), A, axis=0), chosen])
        states, dynamics = np.repeat(states, A, axis=0), np.repeat(dynamics, A)
        if t == mdp.horizon:
            break
        before, after = np.nonzero(P[states[:, t], actions[:, t]])
        dynamics = dynamics[before] * P[states[before, t], actions[before, t], after]
        states, actions = np.column_stack([states[before], after]), actions[before]
    discounted = r[states, actions] * mdp.discount ** np.arange(mdp.horizon + 1)
    return PossibleTrajectories(states, actions, dynamics, discounted[:, ::-1].cumsum(axis=1)[:, ::-1])


class PerTrajectory(NamedTuple):
    """q, g and u of eqs. (1)-(3) for every trajectory, with parameters flattened to d numbers."""

    q: Float[Array, " N"]
    g: Float[Array, "N d"]
    u: Float[Array, "N d d"]


def per_trajectory(
    policy: TablePolicy, at: PossibleTrajectories, theta: Params, curvature: bool = True
) -> PerTrajectory:
    """Compute probability, policy gradient and Hessian term of every trajectory; traceable by JAX."""
    flat, unravel = ravel_pytree(theta)

    def table(x):
        return jnp.log(policy.probabilities(unravel(x)))

    def pick(x):
        return x[at.states, at.actions]

    q = at.dynamics * jnp.exp(jnp.sum(pick(table(flat)), axis=1))
    psi = pick(jax.jacobian(table)(flat))
    g = jnp.einsum("nt,ntd->nd", at.reward_to_go, psi)
    if not curvature:
        return PerTrajectory(q, g, jnp.zeros((len(q), 0, 0)))
    second = jnp.einsum("nt,ntde->nde", at.reward_to_go, pick(jax.hessian(table)(flat)))
    return PerTrajectory(q, g, jnp.einsum("nd,ne->nde", g, jnp.sum(psi, axis=1)) + second)


def batches(n: int, m: int, most: int = MOST_BATCHES) -> tuple[np.ndarray, np.ndarray]:
    """Enumerate batches of m draws from n trajectories up to order: counts [B, n], log multinomial coefficients [B].

    The last rows are padding with multinomial coefficient 0.
    """
    if comb(n + m - 1, m) > most:
        raise UserError(f"there are more than {most} batches of {m} from {n} trajectories: too many to list")
    bars = np.asarray(list(combinations_with_replacement(range(m + 1), n - 1)), int)
    edges = np.column_stack([np.zeros(len(bars), int), bars, np.full(len(bars), m)])
    counts = np.diff(edges, axis=1)
    coefficients = gammaln(m + 1) - gammaln(counts + 1).sum(axis=1)
    missing = -len(counts) % PADDED
    return np.pad(counts, [(0, missing), (0, 0)]), np.pad(coefficients, (0, missing), constant_values=-np.inf)
