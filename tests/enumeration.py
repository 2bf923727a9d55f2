"""An oracle that lists every trajectory of a small MDP, with its probability and its return."""

import itertools
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from perfedrl.envs import TabularMDP
from perfedrl.types import Trajectory

SHAPES = ((1, 3, 0), (2, 2, 1), (3, 2, 2), (2, 3, 1))
"""(S, A, H): few, so that compiled programs are shared between examples."""


def random_mdp(rng: np.random.Generator, shape: tuple[int, int, int], discount: float) -> TabularMDP:
    """A random MDP; about a third of all transitions are impossible, and rewards have both signs."""
    S, A, H = shape
    P = rng.dirichlet(np.ones(S), size=(S, A)) * (rng.uniform(size=(S, A, S)) > 0.33)
    P[P.sum(-1) == 0] = np.eye(S)[0]
    return TabularMDP(P / P.sum(-1, keepdims=True), rng.uniform(-1, 1, (S, A)), rng.dirichlet(np.ones(S)), H, discount)


@st.composite
def problems(draw) -> tuple[TabularMDP, np.ndarray, np.random.Generator]:
    """A small random MDP, softmax parameters for it, and a generator for whatever else a test needs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mdp = random_mdp(rng, draw(st.sampled_from(SHAPES)), draw(st.sampled_from((0.0, 0.5, 0.9))))
    return mdp, rng.normal(size=(mdp.states, mdp.actions)), rng


class Trajectories(NamedTuple):
    """All state-action sequences, the part of their probability that is not the policy's, and their rewards."""

    states: np.ndarray
    actions: np.ndarray
    dynamics: np.ndarray
    rewards: np.ndarray


def enumerate_trajectories(mdp: TabularMDP) -> Trajectories:
    """List all (S A)^(H+1) sequences, impossible ones included."""
    pairs = list(itertools.product(range(mdp.states), range(mdp.actions)))
    sequences = np.asarray(list(itertools.product(pairs, repeat=mdp.horizon + 1)))
    s, a = sequences[..., 0], sequences[..., 1]
    dynamics = mdp.mu[s[:, 0]] * np.prod(mdp.P[s[:, :-1], a[:, :-1], s[:, 1:]], axis=1)
    return Trajectories(s, a, dynamics, mdp.r[s, a])


def batch(t: Trajectories) -> Trajectory:
    """The list as one batch of trajectories."""
    return Trajectory(jnp.asarray(t.states), jnp.asarray(t.actions), jnp.asarray(t.rewards), jnp.ones(t.states.shape))


def law(policy, theta, t: Trajectories) -> jax.Array:
    """q(xi; theta) of every trajectory, eq. (1), written out as a product."""
    return t.dynamics * jnp.prod(policy.probabilities(theta)[t.states, t.actions], axis=1)


def enumerated_return(policy, theta, t: Trajectories, discount) -> jax.Array:
    """J(theta) as the sum of q(xi) R(xi) over all trajectories."""
    R = jnp.sum(t.rewards * discount ** jnp.arange(t.rewards.shape[1]), axis=1)
    return jnp.sum(law(policy, theta, t) * R)


def enumerated_meta_objective(policy, theta, agents: list[Trajectories], discount, alpha) -> jax.Array:
    """F(theta) from enumerated returns alone."""
    grad = jax.grad(enumerated_return, argnums=1)
    adapted = [theta + alpha * grad(policy, theta, t, discount) for t in agents]
    returns = [enumerated_return(policy, x, t, discount) for x, t in zip(adapted, agents, strict=True)]
    return sum(returns) / len(returns)


def value_gradient_hessian(f):
    """Compile a function of (policy, theta, ...) together with its first two derivatives in theta."""
    return jax.jit(lambda *args: (f(*args), jax.grad(f, argnums=1)(*args), jax.hessian(f, argnums=1)(*args)))
