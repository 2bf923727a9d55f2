"""Infinite-horizon action values of tabular agents, with and without an entropy bonus.

These are the limits of value-based methods. Each is the fixed point of a contraction and is found by iteration, without
a linear solver, so that compiled loops can call it. The horizon of an agent is ignored; only its discount counts. The
functions that JAX can trace come first, then their float64 versions, as in `exact.tabular`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import entr, logsumexp
from jaxtyping import Float

from perfedrl.compilation import jit
from perfedrl.envs import TabularMDP
from perfedrl.errors import UserError
from perfedrl.exact.tabular import float64
from perfedrl.types import Array, Scalar

PRECISION = 1e-16
"""Error of a fixed point relative to the error of the starting point."""

Table = Float[Array, "S A"]


class SoftOptimum(NamedTuple):
    """The policy that maximizes discounted reward plus entropy, and its values: log pi = (q - v) / entropy."""

    q: Table
    v: Float[Array, " S"]
    log_policy: Table


# --- traceable forms, for one agent ---------------------------------------------------------------------------------


def soft_action_values(mdp: TabularMDP, log_policy: Table, entropy: Scalar) -> Table:
    """Compute Q(s, a) = r + gamma E[V(s')] of a policy, with V(s) = E_pi[Q - entropy log pi]."""
    pi = jnp.exp(log_policy)
    bonus = entropy * jnp.sum(entr(pi), axis=-1)
    return _fixed_point(mdp, lambda q: mdp.r + mdp.discount * mdp.backup(jnp.sum(pi * q, axis=-1) + bonus), pi)


def soft_advantages(q: Table, log_policy: Table, entropy: Scalar) -> Table:
    """Compute Q(s, a) - V(s), which equals `entropy` log pi at the optimum."""
    return q - jnp.sum(jnp.exp(log_policy) * (q - entropy * log_policy), axis=-1, keepdims=True)


def soft_optimal_values(mdp: TabularMDP, entropy: Scalar) -> Table:
    """Compute Q* by soft value iteration, with V(s) = entropy log sum exp(Q / entropy)."""

    def bellman(q: Table) -> Table:
        return mdp.r + mdp.discount * mdp.backup(entropy * logsumexp(q / entropy, axis=-1))

    return _fixed_point(mdp, bellman, jnp.asarray(mdp.r))


def sarsa_values(mdp: TabularMDP, temperature: Scalar) -> Table:
    """Compute Q of the policy softmax(Q / temperature), the limit of tabular SARSA with this policy improvement.

    The iteration contracts only at high temperatures; otherwise the result need not be a fixed point.
    """

    def bellman(q: Table) -> Table:
        return mdp.r + mdp.discount * mdp.backup(jnp.sum(jax.nn.softmax(q / temperature) * q, axis=-1))

    return _fixed_point(mdp, bellman, jnp.asarray(mdp.r))


def _fixed_point(mdp: TabularMDP, bellman: Callable[[Table], Table], like: Table) -> Table:
    """Iterate a map that contracts by gamma until only rounding errors remain."""
    count = math.ceil(math.log(PRECISION) / math.log(mdp.discount)) if mdp.discount else 1
    return jax.lax.fori_loop(0, count + 1, lambda _, q: bellman(q), jnp.zeros(mdp.r.shape, like.dtype))


# --- float64 front ------------------------------------------------------------------------------------------------


@float64
def soft_optimum(mdp: TabularMDP, entropy: float) -> SoftOptimum:
    """Compute the entropy-regularized optimum of one agent's MDP; `entropy` is the weight of the bonus."""
    if not 0 < entropy < float("inf"):
        raise UserError(f"entropy must be a finite number > 0: without any, the optimum is no softmax; it is {entropy}")
    return _optimum(mdp, entropy)


@float64
def soft_q(mdp: TabularMDP, probabilities: Table, entropy: float) -> Table:
    """Compute the action values of a policy, given as probabilities [S, A], with `entropy` times its entropy added."""
    if jnp.shape(probabilities) != mdp.r.shape:
        raise UserError(f"probabilities must have shape {mdp.r.shape}; they have shape {jnp.shape(probabilities)}")
    return _values(mdp, probabilities, entropy)


def q_values(mdp: TabularMDP, probabilities: Table) -> Table:
    """Compute the action values of a policy over an infinite horizon, without an entropy bonus."""
    return soft_q(mdp, probabilities, 0.0)


@float64
def sarsa_q(mdp: TabularMDP, temperature: float) -> Table:
    """Compute the fixed point of tabular SARSA under softmax(Q / temperature); raises `UserError` if none is found."""
    q, again = _sarsa(mdp, temperature)
    if not float(jnp.abs(q - again).max()) <= 1e-9 * (1 + float(jnp.abs(q).max())):
        raise UserError(f"SARSA finds no fixed point at temperature {temperature}: choose a higher temperature")
    return q


def _soft_optimum(mdp: TabularMDP, entropy: Scalar) -> SoftOptimum:
    q = soft_optimal_values(mdp, entropy)
    return SoftOptimum(q, entropy * logsumexp(q / entropy, axis=-1), jax.nn.log_softmax(q / entropy))


def _sarsa_twice(mdp: TabularMDP, temperature: Scalar) -> tuple[Table, Table]:
    q = sarsa_values(mdp, temperature)
    v = jnp.sum(jax.nn.softmax(q / temperature) * q, axis=-1)
    return q, mdp.r + mdp.discount * mdp.backup(v)


_optimum = jit(_soft_optimum)
_values = jit(lambda mdp, pi, entropy: soft_action_values(mdp, jnp.log(pi), entropy))
_sarsa = jit(_sarsa_twice)
