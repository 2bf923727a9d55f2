"""Every bound of Sections 2 and 3 against enumerated trajectories: none is ever violated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import batch, enumerate_trajectories, law, problems
from hypothesis import given, settings
from hypothesis import strategies as st
from test_estimators import per_trajectory_gradients, per_trajectory_matrices

import perfedrl as pf
from perfedrl import exact
from perfedrl.algorithms import PerFedAvgPG
from perfedrl.policies import LogLinearSoftmax
from perfedrl.theory import Constants, constants

slack = 1 + 1e-9


def test_constants_of_the_gridworld_by_hand__eq_4():
    fleet = pf.gridworld()
    c = constants(fleet.train, pf.TableSoftmax(25, 4))
    assert c == Constants(R_max=1.0, gamma=0.9, H=15, G=2.0, M=4.0, Lambda=8.0)
    assert pytest.approx(10) == c.R_bar
    assert pytest.approx(200) == c.G_J
    assert pytest.approx((16 * 4 + 4) * 100) == c.L_J
    assert pytest.approx(16 * 2 * (6800 + 400) + 16 * 4 * 200 + 800) == c.rho_J
    assert c.G_F(0.0) == c.G_J
    assert c.L_F(0.0) == c.L_J
    assert c.bias(0.0, 10) == 0


def test_bounds_of_the_estimate_by_hand__lemma_3_and_prop_1():
    c = Constants(R_max=1.0, gamma=0.0, H=0, G=1.0, M=1.0, Lambda=1.0)
    assert (c.G_J, c.L_J, c.rho_J) == (1, 2, 1 * (2 + 1) + 1 * 1 + 1)
    # alpha = 1/2: alpha L_J = 1, so 1 + alpha L_J = 2.
    assert c.bias(0.5, 4) == pytest.approx(2 * 1 * 1 / 2)
    assert c.sharp_bias(0.5, 4) == pytest.approx(2 * 0.25 * 5 * 1 / (2 * 4))
    assert c.second_moment(0.5, m_in=4, m_h=2, m_out=8) == pytest.approx(3 * (1 / 2 + 4 / 8 + 4 * 1 / 4))
    assert c.G_F(0.5) == 2
    assert c.L_F(0.5) == pytest.approx(4 * 2 + 0.5 * 5)


@given(problems())
def test_trajectories_obey_the_uniform_bounds__lemma_1(problem):
    mdp, theta, rng = problem
    policy, t = exact.softmax_of(mdp), enumerate_trajectories(mdp)
    c = constants(mdp, policy)
    with jax.enable_x64(True):
        g = np.asarray(per_trajectory_gradients(policy, theta, batch(t), mdp.discount)).reshape(len(t.states), -1)
        u = np.asarray(per_trajectory_matrices(policy, theta, batch(t), mdp.discount))
    assert abs(exact.expected_return(mdp, theta)) <= c.R_bar * slack
    assert np.linalg.norm(g, axis=1).max() <= c.G_J * slack
    assert np.linalg.norm(u, axis=(1, 2)).max() <= c.L_J * slack
    other = theta + rng.normal(size=theta.shape)
    change = (exact.hessian(mdp, theta) - exact.hessian(mdp, other)).reshape(theta.size, -1)
    assert np.linalg.norm(change, ord=2) <= c.rho_J * np.linalg.norm(theta - other) * slack


@settings(max_examples=10)
@given(problems(), st.sampled_from((0.1, 2.0)))
def test_meta_objective_obeys_its_bounds__lemma_2(problem, alpha):
    mdp, theta, rng = problem
    c = constants(mdp, exact.softmax_of(mdp))
    other = theta + rng.normal(size=theta.shape)
    here, there = (exact.meta_gradient([mdp], x, alpha) for x in (theta, other))
    assert abs(exact.meta_objective([mdp], theta, alpha)) <= c.R_bar * slack
    assert np.linalg.norm(here) <= c.G_F(alpha) * slack
    assert np.linalg.norm(here - there) <= c.L_F(alpha) * np.linalg.norm(theta - other) * slack


@settings(max_examples=10)
@given(problems(), st.sampled_from((0.05, 1.0)))
def test_estimate_obeys_its_bounds_at_batch_size_1__lemma_3_and_prop_1(problem, alpha):
    mdp, theta, _ = problem
    policy, t = exact.softmax_of(mdp), enumerate_trajectories(mdp)
    c, d = constants(mdp, policy), theta.size
    with jax.enable_x64(True):
        b = batch(t)
        q = np.asarray(law(policy, theta, t))
        g = np.asarray(per_trajectory_gradients(policy, theta, b, mdp.discount))
        u = np.asarray(per_trajectory_matrices(policy, theta, b, mdp.discount))
        outer_mean = sum(q[i] * exact.gradient(mdp, theta + alpha * g[i]) for i in range(len(q)) if q[i] > 0)
        adapted = jnp.asarray(theta + alpha * g[int(q.argmax())])
        outer = np.asarray(per_trajectory_gradients(policy, adapted, b, mdp.discount)).reshape(len(q), d)
    realizations = outer @ (np.eye(d) + alpha * u).transpose(0, 2, 1)
    assert np.linalg.norm(realizations, axis=-1).max() <= c.G_F(alpha) * slack
    mean = (np.eye(d) + alpha * exact.hessian(mdp, theta).reshape(d, d)) @ outer_mean.ravel()
    bias = np.linalg.norm(mean - exact.meta_gradient([mdp], theta, alpha).ravel())
    assert bias <= c.bias(alpha, 1) * slack
    assert bias <= c.sharp_bias(alpha, 1) * slack


def test_drift_within_a_round_is_bounded__lemma_4():
    fleet, alpha, beta, tau = pf.gridworld(horizon=5), 2.0, 0.3, 7
    policy = pf.TableSoftmax(25, 4)
    agent = pf.estimators.Sampled(policy)(fleet.task(0))
    c = constants(fleet.train, policy)
    upload, _ = PerFedAvgPG(alpha, beta, local_steps=tau, m_in=2, m_h=2, m_out=2).client(
        jnp.zeros((25, 4)), (), agent, jax.random.key(0)
    )
    assert 0 < np.linalg.norm(upload) <= beta * tau * c.G_F(alpha)


@settings(max_examples=10)
@given(problems(), st.sampled_from((0.01, 0.5)))
def test_small_adaptation_stays_near_the_shared_objective__prop_3(problem, alpha):
    mdp, theta, _ = problem
    c = constants(mdp, exact.softmax_of(mdp))
    gap = np.linalg.norm(exact.meta_gradient([mdp], theta, alpha) - exact.gradient(mdp, theta))
    assert gap <= 2 * alpha * c.L_J * c.G_J * slack
    before, after = exact.returns([mdp], theta, alpha)
    assert abs(after - before).max() <= alpha * c.G_J**2 * slack


@given(st.integers(0, 2**31))
def test_log_linear_policies_obey_their_constants__example_1(seed):
    rng = np.random.default_rng(seed)
    policy = LogLinearSoftmax(rng.normal(size=(1, 3, 2)))
    theta, other = rng.normal(size=(2, 2))
    with jax.enable_x64(True):
        logp = lambda t: jnp.stack([policy.log_prob(t, jnp.asarray(0), jnp.asarray(a)) for a in range(3)])  # noqa: E731
        scores, here, there = jax.jacobian(logp)(theta), jax.hessian(logp)(theta), jax.hessian(logp)(other)
    assert np.linalg.norm(scores, axis=1).max() <= policy.G * slack
    assert np.linalg.norm(here, axis=(1, 2)).max() <= policy.M * slack
    change = np.linalg.norm(here - there, axis=(1, 2)).max()
    assert change <= policy.Lambda * np.linalg.norm(theta - other) * slack
