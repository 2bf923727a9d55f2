"""Test oracle that enumerates every trajectory of a small MDP with its probability and return."""

import itertools
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from tiers import runs_slow_tests

from perfedrl.envs import TabularMDP
from perfedrl.estimators import PAPER, PolicyObjective, StepKeys, first_order_gradient, forms, meta_gradient
from perfedrl.policies import LogLinearSoftmax, TableSoftmax
from perfedrl.types import Trajectory

SHAPES = ((2, 2, 1), *(((1, 3, 0), (3, 2, 2), (2, 3, 1)) if runs_slow_tests() else ()))
"""(S, A, H): few, in `make test` one, so that compiled programs are shared between examples."""

FLEETS = (
    (((1, 3, 0), 0.0, 3), ((2, 2, 1), 0.9, 2), ((3, 2, 2), 0.5, 2)) if runs_slow_tests() else (((2, 2, 1), 0.9, 2),)
)
"""((S, A, H), discount, number of agents): few for the same reason."""


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


@st.composite
def fleets(draw):
    """Two or three small random MDPs, from equal to unrelated; parameters, a policy (either kind), a generator."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape, discount, n = draw(st.sampled_from(FLEETS))
    heterogeneity = draw(st.sampled_from((0.0, 0.3, 1.0)))
    S, A, H = shape
    own = [random_mdp(rng, shape, discount) for _ in range(n)]

    def mixed(name, x):
        return (1 - heterogeneity) * getattr(own[0], name) + heterogeneity * getattr(x, name)

    mdps = [TabularMDP(mixed("P", x), mixed("r", x), mixed("mu", x), H, discount) for x in own]
    if draw(st.booleans()):
        return mdps, rng.normal(size=(S, A)), TableSoftmax(S, A), rng
    return mdps, rng.normal(size=2), LogLinearSoftmax(rng.normal(size=(S, A, 2))), rng


class Trajectories(NamedTuple):
    """All state-action sequences, the factor of their probability that does not depend on the policy, and rewards."""

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


def index_key(i):
    """A key that carries an index, for the sampler below."""
    return jax.random.wrap_key_data(jnp.stack([jnp.zeros((), jnp.uint32), jnp.asarray(i, jnp.uint32)]))


class Listed:
    """A sampler that returns the batch whose number its key carries: its digits are indices into the enumeration."""

    traceable = True

    def __init__(self, trajectories: Trajectory):
        self.trajectories = trajectories

    def sample(self, params, key, m):
        n = len(self.trajectories.reward)
        chosen = jax.random.key_data(key)[1] // n ** np.arange(m) % n
        return jax.tree.map(lambda x: x[chosen.astype(int)], self.trajectories)


def local_estimates(mdp: TabularMDP, policy, alpha, variant="exact", sizes=(1, 1, 1), among=slice(None)):
    """Build a function from parameters to all estimates of one local step and their probabilities.

    The library's estimators are applied to every triple of batches of the given sizes, of some or all trajectories.
    """
    t = Trajectories(*(x[among] for x in enumerate_trajectories(mdp)))
    agent = PolicyObjective(Listed(batch(t)), policy, mdp.discount, forms(**PAPER))
    numbers = [jnp.arange(len(t.states) ** m) for m in sizes]
    digits = [n[:, None] // len(t.states) ** np.arange(m) % len(t.states) for n, m in zip(numbers, sizes, strict=True)]
    m_in, m_h, m_out = sizes

    def estimates(theta):
        q = law(policy, theta, t)

        def inner(i, probability):
            def outer(j, k):
                keys = StepKeys(*map(index_key, (i, j, k)))
                if variant == "first-order":
                    return first_order_gradient(agent, theta, alpha, keys, m_in, m_out)
                return meta_gradient(agent, theta, alpha, keys, m_in, m_h, m_out)

            adapted = theta + alpha * agent.gradient(theta, index_key(i), m_in)
            every = jax.vmap(lambda j: jax.vmap(lambda k: outer(j, k))(numbers[2]))(numbers[1])
            after = jnp.prod(law(policy, adapted, t)[digits[2]], axis=1)
            return probability * jnp.prod(q[digits[1]], axis=1)[:, None] * after, every

        weights, every = jax.vmap(inner)(numbers[0], jnp.prod(q[digits[0]], axis=1))
        return weights.reshape(-1), every.reshape(-1, *theta.shape)

    return estimates
