"""Gradient estimators: their expectation, summed over all trajectories, equals the exact quantity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import Listed, batch, enumerate_trajectories, index_key, law, problems
from hypothesis import given
from hypothesis import strategies as st
from jaxprs import sizes
from per_trajectory import per_trajectory_gradients, per_trajectory_matrices, per_trajectory_products
from tiers import examples

import perfedrl as pf
from perfedrl import exact
from perfedrl.estimators import (
    CURVATURES,
    PAPER,
    Credit,
    PolicyObjective,
    StepKeys,
    first_order_gradient,
    forms,
    meta_gradient,
    policy_gradient,
    reward_to_go,
)
from perfedrl.estimators.curvature.pairs import causal, score, score_matrix
from perfedrl.policies import LogLinearSoftmax
from perfedrl.theory import constants, second_moment
from perfedrl.types import Trajectory

close = {"rtol": 0, "atol": 1e-10}
SCORE = CURVATURES["score"]()


def test_reward_to_go_discounts_from_the_start_of_the_episode__eq_2():
    rewards = jnp.asarray([[1.0, 2.0, 4.0]])
    zeros = jnp.zeros((1, 3), dtype=int)
    R = reward_to_go(Trajectory(zeros, zeros, rewards, jnp.ones((1, 3))), 0.5)
    np.testing.assert_allclose(R, [[1 + 2 * 0.5 + 4 * 0.25, 2 * 0.5 + 4 * 0.25, 4 * 0.25]])


@given(problems())
def test_policy_gradient_is_unbiased__eq_2(problem):
    mdp, theta, _ = problem
    policy, t = exact.softmax_of(mdp), enumerate_trajectories(mdp)
    with jax.enable_x64(True):
        g = per_trajectory_gradients(policy, theta, batch(t), mdp.discount)
        mean = jnp.einsum("x,x...->...", law(policy, theta, t), g)
    np.testing.assert_allclose(mean, exact.gradient(mdp, theta), **close)


@given(problems())
def test_hessian_estimate_is_unbiased__eq_3(problem):
    mdp, theta, _ = problem
    policy, t = exact.softmax_of(mdp), enumerate_trajectories(mdp)
    with jax.enable_x64(True):
        u = per_trajectory_matrices(policy, theta, batch(t), mdp.discount)
        mean = jnp.einsum("x,xde->de", law(policy, theta, t), u)
    np.testing.assert_allclose(mean, exact.hessian(mdp, theta).reshape(mean.shape), **close)


@examples(12)
@given(problems())
def test_matrix_free_product_equals_the_matrix_trajectory_by_trajectory(problem):
    mdp, theta, rng = problem
    policy, t = exact.softmax_of(mdp), enumerate_trajectories(mdp)
    v = rng.normal(size=theta.shape)
    with jax.enable_x64(True):
        u = per_trajectory_matrices(policy, theta, batch(t), mdp.discount)
        products = per_trajectory_products(SCORE, policy, theta, batch(t), mdp.discount, v)
    expected = np.einsum("xde,e->xd", u, v.ravel())
    np.testing.assert_allclose(np.reshape(products, expected.shape), expected, **close)


def test_scores_of_a_table_written_out_by_hand__example_1(x64):
    policy = pf.TableSoftmax(1, 3)
    theta = jnp.asarray([[0.3, -0.2, 1.0]])
    pi = np.exp(theta[0]) / np.exp(theta[0]).sum()
    one = Trajectory(jnp.zeros((1, 1), int), jnp.ones((1, 1), int), jnp.ones((1, 1)), jnp.ones((1, 1)))
    g = policy_gradient(policy.log_prob, theta, one, jnp.asarray([[2.0]]))
    np.testing.assert_allclose(g[0], 2 * (np.eye(3)[1] - pi), **close)
    psi, Psi = np.eye(3)[1] - pi, -(np.diag(pi) - np.outer(pi, pi))
    u = score_matrix(policy, theta, one, Credit(jnp.asarray([[2.0]])))
    np.testing.assert_allclose(u, 2 * np.outer(psi, psi) + 2 * Psi, **close)


def test_log_linear_estimates_are_unbiased__eq_2_and_3(x64):
    mdp = pf.envs.random_mdps(agents=1, states=3, actions=2, horizon=2).task(0)
    rng = np.random.default_rng(0)
    policy, theta, v = LogLinearSoftmax(rng.normal(size=(3, 2, 4))), rng.normal(size=4), rng.normal(size=4)
    t = enumerate_trajectories(mdp)
    q = law(policy, theta, t)
    g = per_trajectory_gradients(policy, theta, batch(t), mdp.discount)
    products = per_trajectory_products(SCORE, policy, theta, batch(t), mdp.discount, v)
    np.testing.assert_allclose(q @ g, exact.gradient(mdp, theta, policy), **close)
    np.testing.assert_allclose(q @ products, exact.hessian(mdp, theta, policy) @ v, **close)


def test_decisions_after_the_end_of_an_episode_do_not_count():
    policy = pf.TableSoftmax(2, 2)
    theta = jnp.asarray([[0.1, 0.5], [-0.3, 0.2]])
    long = Trajectory(
        obs=jnp.asarray([[0, 1, 1]]),
        action=jnp.asarray([[1, 0, 1]]),
        reward=jnp.asarray([[1.0, 2.0, 0.0]]),
        mask=jnp.asarray([[1.0, 1.0, 0.0]]),
    )
    short = jax.tree.map(lambda x: x[:, :2], long)
    for estimate in (
        lambda b: policy_gradient(policy.log_prob, theta, b, reward_to_go(b, 0.9)),
        lambda b: score(policy, theta, b, Credit(reward_to_go(b, 0.9)), theta),
        lambda b: causal(policy, theta, b, Credit(reward_to_go(b, 0.9)), theta),
    ):
        np.testing.assert_allclose(estimate(long), estimate(short), rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 3, 0), (2, 2, 0), (2, 2, 1)])
def test_mean_of_the_meta_gradient_factors_over_its_three_batches__eq_7(shape, x64):
    """E[(I + alpha H) g_out] = (I + alpha grad^2 J) E[grad J(theta~)]: only the inner batch causes bias (Lemma 3)."""
    S, A, H = shape
    mdp = pf.envs.random_mdps(agents=1, states=S, actions=A, horizon=H, seed=3).task(0)
    policy, t, alpha = pf.TableSoftmax(S, A), enumerate_trajectories(mdp), 0.8
    theta = jnp.asarray(np.random.default_rng(1).normal(size=(S, A)))
    agent = PolicyObjective(Listed(batch(t)), policy, mdp.discount, forms(**PAPER))
    n = len(t.states)

    @jax.jit
    def estimates(i):
        adapted = theta + alpha * agent.gradient(theta, index_key(i), 1)

        def keys(j, k):
            return StepKeys(*map(index_key, (i, j, k)))

        def exact_form(j, k):
            return meta_gradient(agent, theta, alpha, keys(j, k), 1, 1, 1)

        def first_order(k):
            return first_order_gradient(agent, theta, alpha, keys(0, k), 1, 1)

        every = jnp.arange(n)
        full = jax.vmap(lambda j: jax.vmap(lambda k: exact_form(j, k))(every))(every)
        return adapted, law(policy, adapted, t), full, jax.vmap(first_order)(every)

    q = law(policy, theta, t)
    mean, mean_first_order, mean_outer, error = jnp.zeros((S, A)), jnp.zeros((S, A)), jnp.zeros((S, A)), 0.0
    meta = exact.meta_gradient([mdp], theta, alpha)
    for i in range(n):
        adapted, q_adapted, full, first_order = estimates(i)
        mean += q[i] * jnp.einsum("j,k,jkab->ab", q, q_adapted, full)
        error += q[i] * jnp.einsum("j,k,jk->", q, q_adapted, jnp.sum((full - meta) ** 2, axis=(2, 3)))
        mean_first_order += q[i] * jnp.einsum("k,kab->ab", q_adapted, first_order)
        mean_outer += q[i] * exact.gradient(mdp, adapted)
    hessian = exact.hessian(mdp, theta).reshape(S * A, S * A)
    factored = (np.eye(S * A) + alpha * hessian) @ np.ravel(mean_outer)
    np.testing.assert_allclose(np.ravel(mean), factored, **close)
    np.testing.assert_allclose(mean_first_order, mean_outer, **close)
    assert 0 < error <= second_moment(constants(mdp, policy, alpha), 1, 1, 1), "Lemma 3(iii)"


@given(st.integers(0, 2**31), st.sampled_from((1, 7)))
def test_value_is_the_mean_return_of_the_sampled_episodes(seed, m):
    from perfedrl.estimators import Sampled

    fleet = pf.gridworld(horizon=4)
    agent = Sampled(pf.TableSoftmax(25, 4))(fleet.task(0))
    key, theta = jax.random.key(seed), jnp.zeros((25, 4))
    sampled = agent.sampler.sample(theta, key, m)
    by_hand = (np.asarray(sampled.reward) @ 0.9 ** np.arange(5)).mean()
    assert agent.value(theta, key, m) == pytest.approx(by_hand, rel=1e-5)


def test_no_array_grows_with_batch_times_parameters_or_parameters_squared():
    """The product's memory: d = 400 parameters and m = 50 trajectories, nothing of size d^2 or m d is formed."""
    m, T, d = 50, 3, 400
    policy = pf.TableSoftmax(100, 4)
    b = Trajectory(jnp.zeros((m, T), int), jnp.zeros((m, T), int), jnp.ones((m, T)), jnp.ones((m, T)))

    def product(theta, v):
        return score(policy, theta, b, Credit(b.reward), v)

    program = jax.make_jaxpr(product)(jnp.zeros((100, 4)), jnp.ones((100, 4)))
    assert d <= max(sizes(program.jaxpr)) < m * d
    jacobian = jax.make_jaxpr(lambda t: jax.jit(jax.jacobian(lambda t: (b.reward @ b.reward.T) * t.sum()))(t))(
        jnp.zeros((100, 4))
    )
    assert max(sizes(jacobian.jaxpr)) >= m * d, "the check would see one"
