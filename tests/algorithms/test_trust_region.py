"""Trust-region steps: the Fisher matrix written out, the natural gradient, the limit and the line search."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.algorithms.fednpg import mirror_step
from perfedrl.algorithms.learned_adaptation import Learned, adapted
from perfedrl.algorithms.trust_region import TrustRegion, derivatives, improve, line_search, natural_direction
from perfedrl.compilation import jit
from perfedrl.estimators import Sampled
from perfedrl.estimators.advantages import RewardToGo
from perfedrl.estimators.baselines import Nothing
from perfedrl.estimators.batch import make_batch
from perfedrl.types import Trajectory

GRID, TABLE = pf.gridworld(width=2, horizon=3), pf.TableSoftmax(4, 4)
AGENT = Sampled(TABLE, baseline="leave-one-out")
ALPHA, FACTOR = 0.7, 1.2
improved = jit(improve, static_argnums=0)


def theta():
    return jax.random.normal(jax.random.key(5), (4, 4))


@partial(jit, static_argnums=1)
def two_batches(learned, first_order):
    """A pair of batches of one agent, before and after its adaptation, and the adapted parameters."""
    objective = AGENT(GRID.task(1))
    inner = objective.batch(learned.theta, jax.random.key(1), 12)
    after = adapted(learned, ALPHA, inner, first_order)
    return inner, objective.batch(after, jax.random.key(2), 12), after


@partial(jit, static_argnums=0)
def solved(how, learned, inner, outer):
    """The gradient, the direction, and the direction's product."""
    gradient, product = derivatives(how, learned, ALPHA, inner, outer)
    direction = natural_direction(product, gradient, how.iterations)
    return gradient, direction, product(direction)


def fisher_of_table(batch, params):
    """The mean over a batch's decisions of diag(pi) - pi pi^T, in the rows of the visited states."""
    pi, obs, mask = np.asarray(TABLE.probabilities(params)), np.asarray(batch.obs), np.asarray(batch.mask)
    F = np.zeros((4, 4, 4, 4))
    for s, counts in zip(obs.ravel(), mask.ravel(), strict=True):
        F[s, :, s, :] += counts * (np.diag(pi[s]) - np.outer(pi[s], pi[s])) / mask.sum()
    return F.reshape(16, 16)


def flat(learned):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(learned)])


@pytest.mark.parametrize(("first_order", "factors"), [(True, False), (False, True)])
def test_the_direction_solves_the_damped_fisher_system_written_out(first_order, factors, x64):
    """F from probabilities, the adaptation's Jacobian from a Hessian: conjugate gradients find the same solution."""
    learned = Learned(theta(), jnp.full((4, 4), FACTOR) if factors else ())
    inner, outer, after = two_batches(learned, first_order)
    size = ALPHA * (FACTOR if factors else 1)
    jacobian = np.eye(16)
    if not first_order:
        jacobian = jacobian + size * np.asarray(jit(jax.hessian(inner.surrogate))(learned.theta)).reshape(16, 16)
    if factors:
        jacobian = np.hstack([jacobian, np.diag(ALPHA * np.ravel(inner.gradient(learned.theta)))])
    g = jacobian.T @ np.ravel(outer.gradient(after))
    A = jacobian.T @ fisher_of_table(outer.trajectories, after) @ jacobian + 0.01 * np.eye(len(g))
    gradient, direction, product = map(flat, solved(TrustRegion(0.01, 40, 1, first_order), learned, inner, outer))
    np.testing.assert_allclose(gradient, g, rtol=0, atol=1e-12)
    np.testing.assert_allclose(product, A @ direction, rtol=0, atol=1e-12)
    np.testing.assert_allclose(direction, np.linalg.solve(A, g), rtol=1e-9, atol=1e-9)
    assert np.linalg.norm(g) > 0.1


@partial(jit, static_argnums=(0, 1))
def batch_of(policy, entropy, params, trajectories):
    return make_batch(policy, RewardToGo(), Nothing(), entropy, 0.9, params, trajectories)


def bandit_batch(params, visits, rewards, entropy=0.0):
    """One decision per trajectory; state s takes action a as often as `visits` says."""
    pairs = [(s, a) for (s, a), count in np.ndenumerate(visits) for _ in range(count)]
    obs, action = (jnp.asarray([[pair[i]] for pair in pairs]) for i in (0, 1))
    batch = Trajectory(obs, action, jnp.asarray(rewards)[obs, action], jnp.ones(obs.shape))
    return batch_of(pf.TableSoftmax(*np.shape(visits)), entropy, params, batch)


def test_without_damping_the_direction_is_fednpgs_where_the_batch_is_representative(x64):
    """On decisions in proportion to the policy, the natural gradient of a table is its advantages."""
    visits = np.array([[1, 3, 4], [4, 2, 2]])
    params, rewards = jnp.log(visits / 8), np.random.default_rng(0).normal(size=(2, 3))
    _, direction, _ = solved(TrustRegion(0.0, 10, 1), Learned(params, ()), None, bandit_batch(params, visits, rewards))
    found = np.asarray(direction.theta)
    found = found - np.sum(visits / 8 * found, axis=1, keepdims=True)  # a softmax does not see constants
    expected = mirror_step(params, jnp.asarray(rewards), 0.0, 1.0) - params
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("first_order", "delta", "expected"), [(False, 0.01, 0), (True, 1e-3, 1)])
def test_a_step_is_the_longest_half_that_improves_within_the_limit(first_order, delta, expected, x64):
    """Against the search by hand, from the length sqrt(2 delta / x F x)."""
    learned = Learned(theta(), jnp.full((4, 4), FACTOR))
    how = TrustRegion(1e-4, 40, 10, first_order)
    inner, outer, after = two_batches(learned, first_order)
    _, direction, product = map(flat, solved(how, learned, inner, outer))
    full = np.sqrt(2 * delta / (direction @ product)) * direction
    before = float(outer.surrogate(after))

    @jit
    def measured(new):
        after = adapted(new, ALPHA, inner, first_order)
        return outer.surrogate(after), outer.divergence(after)

    def allowed(step):
        moved = Learned(*(part + change.reshape(4, 4) for part, change in zip(learned, np.split(step, 2), strict=True)))
        surrogate, divergence = measured(moved)
        return surrogate > before and divergence <= delta

    halvings = next(k for k in range(11) if allowed(full / 2**k))
    assert halvings == expected
    moved = flat(improved(how, learned, ALPHA, delta, inner, outer)) - flat(learned)
    np.testing.assert_allclose(moved, full / 2**halvings, rtol=1e-9, atol=1e-9)


def searched(allowed, backtracks):
    """The share of a unit step from 0 that the search takes."""
    return float(
        line_search(lambda x: allowed(x.theta), Learned(jnp.zeros(()), ()), Learned(jnp.ones(()), ()), backtracks).theta
    )


def test_the_search_halves_as_often_as_it_may_and_takes_no_step_otherwise():
    assert searched(lambda x: x <= 1, 3) == 1.0
    assert searched(lambda x: x < 0.3, 3) == 0.25
    assert searched(lambda x: x <= 0.125, 3) == 0.125
    assert searched(lambda x: x < 0.125, 3) == 0.0
    assert searched(lambda x: jnp.log(x - 2) < 0, 3) == 0.0, "not a number is no improvement"


def test_without_a_gradient_there_is_no_step():
    batch = bandit_batch(jnp.zeros((1, 2)), np.array([[2, 2]]), np.zeros((1, 2)))
    learned = Learned(jnp.zeros((1, 2)), ())
    after = improved(TrustRegion(0.0, 5, 3), learned, 0.0, 0.01, None, batch)
    np.testing.assert_array_equal(after.theta, learned.theta)


def test_a_step_that_lowers_the_surrogate_is_shortened():
    """Only entropy counts: from odds of e, the full step and its half lead to more uneven odds on the other side."""
    params = jnp.asarray([[1.0, 0.0]])
    batch, learned = bandit_batch(params, np.array([[3, 1]]), np.zeros((1, 2)), entropy=1.0), Learned(params, ())
    after = improved(TrustRegion(0.0, 5, 5), learned, 0.0, 2.0, None, batch).theta[0]
    p = 1 / (1 + np.exp(-1))
    full = np.sqrt(2 * 2 / (p * (1 - p)))  # a distance of the two logits from each other
    apart = [float(batch.divergence(jnp.asarray([[1 - share * full, 0.0]]))) for share in (0.5, 0.25)]
    assert max(apart) <= 2, "the limit allows both"
    np.testing.assert_allclose(after[0] - after[1], 1 - full / 4, rtol=1e-4)
    assert abs(1 - full / 2) > 1
