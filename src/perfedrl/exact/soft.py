"""Action values of tabular agents over an infinite horizon, with and without a reward for entropy.

What methods that think in action values converge to. Everything is a fixed point of a contraction and is found by
repeating it: no linear solver, so that compiled loops may call it. An agent's horizon is ignored; its discount is what
makes later rewards count less. The traceable forms come first, then the float64 front, as in `exact.py`.
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
"""Of a fixed point, relative to the error of its start."""

Table = Float[Array, "S A"]


class SoftOptimum(NamedTuple):
    """The policy that maximizes discounted reward plus entropy, and its values: log pi = (q - v) / entropy."""

    q: Table
    v: Float[Array, " S"]
    log_policy: Table


# --- traceable forms, for one agent ---------------------------------------------------------------------------------


def soft_action_values(mdp: TabularMDP, log_policy: Table, entropy: Scalar) -> Table:
    """Q(s, a) = r + gamma E[V(s')] of a policy, V(s) = E_pi[Q - entropy log pi]: the next decision's entropy on."""
    pi = jnp.exp(log_policy)
    bonus = entropy * jnp.sum(entr(pi), axis=-1)
    return _fixed_point(mdp, lambda q: mdp.r + mdp.discount * mdp.backup(jnp.sum(pi * q, axis=-1) + bonus), pi)


def soft_advantages(q: Table, log_policy: Table, entropy: Scalar) -> Table:
    """Q(s, a) - V(s); at the optimum it is `entropy` log pi."""
    return q - jnp.sum(jnp.exp(log_policy) * (q - entropy * log_policy), axis=-1, keepdims=True)


def soft_optimal_values(mdp: TabularMDP, entropy: Scalar) -> Table:
    """Q* by soft value iteration: V(s) = entropy log sum exp(Q / entropy)."""
    back = lambda q: mdp.r + mdp.discount * mdp.backup(entropy * logsumexp(q / entropy, axis=-1))  # noqa: E731
    return _fixed_point(mdp, back, jnp.asarray(mdp.r))


def sarsa_values(mdp: TabularMDP, temperature: Scalar) -> Table:
    """Q of the policy softmax(Q / temperature): where tabular SARSA with that policy improvement comes to rest.

    Only a high temperature makes this a contraction; where it is not, the result need not be a fixed point.
    """

    def back(q: Table) -> Table:
        return mdp.r + mdp.discount * mdp.backup(jnp.sum(jax.nn.softmax(q / temperature) * q, axis=-1))

    return _fixed_point(mdp, back, jnp.asarray(mdp.r))


def _fixed_point(mdp: TabularMDP, back: Callable[[Table], Table], like: Table) -> Table:
    """The limit of a map that shrinks distances by gamma: repeated until rounding is all that is left."""
    count = math.ceil(math.log(PRECISION) / math.log(mdp.discount)) if mdp.discount else 1
    return jax.lax.fori_loop(0, count + 1, lambda _, q: back(q), jnp.zeros(mdp.r.shape, like.dtype))


# --- float64 front ------------------------------------------------------------------------------------------------


@float64
def soft_optimum(mdp: TabularMDP, entropy: float) -> SoftOptimum:
    """The entropy-regularized optimum of one agent's MDP, infinite horizon; `entropy` is the bonus's weight."""
    if not 0 < entropy < float("inf"):
        raise UserError(f"entropy must be a finite number > 0: without any, the optimum is no softmax; it is {entropy}")
    return _optimum(mdp, entropy)


@float64
def soft_q(mdp: TabularMDP, probabilities: Table, entropy: float) -> Table:
    """The action values of a policy, given as probabilities [S, A], with `entropy` as the weight of its entropy."""
    if jnp.shape(probabilities) != mdp.r.shape:
        raise UserError(f"probabilities must have shape {mdp.r.shape}; they have shape {jnp.shape(probabilities)}")
    return _values(mdp, probabilities, entropy)


def q_values(mdp: TabularMDP, probabilities: Table) -> Table:
    """The action values of a policy, infinite horizon, without a bonus for entropy."""
    return soft_q(mdp, probabilities, 0.0)


@float64
def sarsa_q(mdp: TabularMDP, temperature: float) -> Table:
    """The rest point of tabular SARSA under softmax(Q / temperature); refused where the iteration finds none."""
    q, again = _sarsa(mdp, temperature)
    if not float(jnp.abs(q - again).max()) <= 1e-9 * (1 + float(jnp.abs(q).max())):
        raise UserError(f"SARSA finds no rest point at temperature {temperature}: choose a higher one")
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
