"""Exact evaluation against full enumeration, finite differences and known values."""

import jax
import numpy as np
import pytest
from enumeration import (
    enumerate_trajectories,
    enumerated_meta_objective,
    enumerated_return,
    fleets,
    problems,
    random_mdp,
    value_gradient_hessian,
)
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

import perfedrl as pf
from perfedrl import exact
from perfedrl.envs import WITNESS_FEATURES, bandits, unstack
from perfedrl.policies import LogLinearSoftmax, TableSoftmax

oracle_J = value_gradient_hessian(enumerated_return)
oracle_F = value_gradient_hessian(enumerated_meta_objective)
close = {"rtol": 0, "atol": 1e-12}


@examples(20, fast=3)
@given(problems())
def test_return_gradient_and_hessian_equal_enumeration__eq_2_and_3(problem):
    mdp, theta, _ = problem
    with jax.enable_x64(True):
        J, g, H = oracle_J(exact.softmax_of(mdp), theta, enumerate_trajectories(mdp), mdp.discount)
    np.testing.assert_allclose(exact.expected_return(mdp, theta), J, **close)
    np.testing.assert_allclose(exact.gradient(mdp, theta), g, **close)
    np.testing.assert_allclose(exact.hessian(mdp, theta), H, **close)


@examples(8, fast=2)
@given(problems(), st.sampled_from((0.0, 0.5, 2.0)))
def test_meta_objective_gradient_and_hessian_equal_enumeration__eq_5_and_6(problem, alpha):
    mdp, theta, rng = problem
    mdps = [mdp, random_mdp(rng, (mdp.states, mdp.actions, mdp.horizon), mdp.discount)]
    with jax.enable_x64(True):
        agents = [enumerate_trajectories(mdp) for mdp in mdps]
        F, g, H = oracle_F(exact.softmax_of(mdp), theta, agents, mdp.discount, alpha)
    np.testing.assert_allclose(exact.meta_objective(mdps, theta, alpha), F, **close)
    np.testing.assert_allclose(exact.meta_gradient(mdps, theta, alpha), g, **close)
    np.testing.assert_allclose(exact.meta_hessian(mdps, theta, alpha), H, **close)


def central_difference(f, x, step=1e-5):
    """df/dx by central differences, with the axes of x last."""
    columns = []
    for i in range(x.size):
        e = np.zeros(x.size)
        e[i] = step
        e = e.reshape(x.shape)
        columns.append((f(x + e) - f(x - e)) / (2 * step))
    return np.stack(columns, axis=-1).reshape(*np.shape(columns[0]), *x.shape)


def test_derivatives_agree_with_central_differences_to_5e_8():
    fleet = pf.gridworld()
    theta = np.random.default_rng(0).normal(size=(25, 4))
    mdp, tolerance = fleet.task(0), {"rtol": 0, "atol": 5e-8}

    def J(t):
        return exact.expected_return(mdp, t)

    def F(t):
        return exact.meta_objective(fleet, t, 2.0)

    np.testing.assert_allclose(exact.gradient(mdp, theta), central_difference(J, theta), **tolerance)
    np.testing.assert_allclose(exact.meta_gradient(fleet, theta, 2.0), central_difference(F, theta), **tolerance)
    small = unstack(pf.envs.random_mdps(agents=3, states=3, actions=2, horizon=3).train)
    theta = theta[:3, :2]

    def grad_J(t):
        return exact.gradient(small[0], t)

    def grad_F(t):
        return exact.meta_gradient(small, t, 2.0)

    np.testing.assert_allclose(exact.hessian(small[0], theta), central_difference(grad_J, theta), **tolerance)
    np.testing.assert_allclose(exact.meta_hessian(small, theta, 2.0), central_difference(grad_F, theta), **tolerance)


def test_meta_gradient_is_curvature_times_adapted_gradient__eq_6():
    mdps = unstack(pf.envs.random_mdps(agents=3, states=3, actions=2, horizon=4).train)
    theta, alpha = np.random.default_rng(1).normal(size=(3, 2)), 0.7
    chained = []
    for mdp in mdps:
        v = exact.gradient(mdp, theta + alpha * exact.gradient(mdp, theta))
        H = exact.hessian(mdp, theta).reshape(6, 6)
        chained.append(((np.eye(6) + alpha * H) @ v.ravel()).reshape(3, 2))
    np.testing.assert_allclose(exact.meta_gradient(mdps, theta, alpha), np.mean(chained, axis=0), **close)


@examples(10)
@given(fleets(), st.sampled_from((0.05, 0.7, 2.0)))
def test_meta_gradient_is_curvature_times_adapted_gradient_on_any_fleet__eq_6(problem, alpha):
    mdps, theta, policy, _ = problem
    d, chained = theta.size, []
    for mdp in mdps:
        v = exact.gradient(mdp, theta + alpha * exact.gradient(mdp, theta, policy), policy).ravel()
        chained.append(v + alpha * exact.hessian(mdp, theta, policy).reshape(d, d) @ v)
    meta = exact.meta_gradient(mdps, theta, alpha, policy).ravel()
    np.testing.assert_allclose(meta, np.mean(chained, axis=0), rtol=0, atol=1e-10)


def test_gridworld_values_of_the_protocol():
    fleet = pf.gridworld()
    uniform = np.zeros((25, 4))
    assert exact.meta_objective(fleet, uniform, 0.0) == pytest.approx(0.243870, abs=5e-7)
    optimal = [exact.optimal_return(fleet.task(i)) for i in range(8)]
    assert np.mean(optimal) == pytest.approx(4.994935, abs=5e-7)


def test_best_response_earns_the_optimal_return():
    mdp = pf.gridworld().task(0)
    actions = exact.best_response(mdp)
    v = np.zeros(mdp.states)
    for t in reversed(range(mdp.horizon + 1)):
        q = mdp.r + mdp.discount * (mdp.P @ v)
        v = q[np.arange(mdp.states), actions[t]]
    assert mdp.mu @ v == pytest.approx(float(exact.optimal_return(mdp)), abs=1e-12)


@given(problems())
def test_no_policy_beats_the_optimal_return(problem):
    mdp, theta, _ = problem
    assert exact.expected_return(mdp, 5 * theta) <= exact.optimal_return(mdp) + 1e-12


def test_one_hot_features_make_the_log_linear_policy_a_table():
    mdp = pf.envs.random_mdps(agents=1, states=3, actions=2).task(0)
    policy = LogLinearSoftmax(np.eye(6).reshape(3, 2, 6))
    theta = np.random.default_rng(2).normal(size=6)
    H = exact.hessian(mdp, theta.reshape(3, 2)).reshape(6, 6)
    np.testing.assert_allclose(exact.hessian(mdp, theta, policy), H, **close)


def test_a_list_a_stack_and_a_fleet_are_the_same_agents():
    fleet = pf.gridworld()
    theta = np.random.default_rng(3).normal(size=(25, 4))
    values = [exact.meta_objective(x, theta, 1.0) for x in (fleet, fleet.train, unstack(fleet.train))]
    assert values[0] == values[1] == values[2]


def test_results_are_float64_numpy_whatever_comes_in():
    mdp = pf.gridworld().task(0)
    for theta in (np.zeros((25, 4), np.float32), jax.numpy.zeros((25, 4))):
        assert exact.gradient(mdp, theta).dtype == np.float64
        assert isinstance(exact.expected_return(mdp, theta), np.ndarray)


def test_witness_of_a_first_order_fixed_point_with_nonzero_meta_gradient__prop_2():
    fleet = bandits()
    policy = LogLinearSoftmax(np.asarray([WITNESS_FEATURES]))
    theta, alpha = np.asarray([-0.5555031]), 0.5
    one, two = unstack(fleet.train)
    v1 = exact.gradient(one, theta + alpha * exact.gradient(one, theta, policy), policy)
    assert exact.first_order_direction(fleet, theta, alpha, policy) == pytest.approx(0, abs=1e-7)
    assert v1 == pytest.approx(-0.3195682, abs=1e-7)
    assert exact.hessian(one, theta, policy).item() == pytest.approx(-0.2568571, abs=1e-7)
    assert exact.hessian(two, theta, policy).item() == pytest.approx(0.4999539, abs=1e-7)
    assert exact.meta_gradient(fleet, theta, alpha, policy) == pytest.approx(0.0604632, abs=1e-7)


def test_first_order_floor_is_order_alpha__prop_2():
    fleet = bandits()
    policy = LogLinearSoftmax(np.asarray([WITNESS_FEATURES]))
    for alpha in (1.0, 0.5, 0.25, 0.1, 0.05, 0.01, 1e-3, 1e-4):
        low, high = -3.0, 3.0
        for _ in range(60):
            middle = (low + high) / 2
            ahead = exact.first_order_direction(fleet, np.asarray([middle]), alpha, policy).item() > 0
            low, high = (low, middle) if ahead else (middle, high)
        residual = abs(exact.meta_gradient(fleet, np.asarray([low]), alpha, policy).item())
        assert residual > 0.05 * alpha
    assert low == pytest.approx(-0.2310491, abs=1e-4)
    assert residual / alpha == pytest.approx(0.1571893, abs=1e-4)


def test_adaptation_at_alpha_0_changes_nothing__prop_3():
    fleet = pf.gridworld()
    theta = np.random.default_rng(4).normal(size=(25, 4))
    before, after = exact.returns(fleet, theta, 0.0)
    np.testing.assert_array_equal(before, after)
    mean_gradient = np.mean([exact.gradient(mdp, theta) for mdp in unstack(fleet.train)], axis=0)
    np.testing.assert_allclose(exact.meta_gradient(fleet, theta, 0.0), mean_gradient, **close)


@pytest.mark.parametrize("shape", [(9, 1), (4,), (1, 4), (4, 9)])
def test_parameters_of_another_shape_are_refused_and_not_broadcast(shape):
    mdp = pf.gridworld(width=3).task(0)
    for call in (exact.expected_return, exact.gradient, exact.hessian):
        with pytest.raises(pf.UserError, match="theta must have shape"):
            call(mdp, np.zeros(shape))
    with pytest.raises(pf.UserError, match="at least one MDP"):
        exact.meta_objective([], np.zeros((9, 4)), 1.0)


def test_exact_objective_offers_what_it_names(x64):
    mdp = pf.envs.random_mdps(agents=1, states=3, actions=2).task(0)
    policy = TableSoftmax(3, 2)
    agent = exact.ExactObjective(mdp, policy)
    theta, v = np.random.default_rng(5).normal(size=(2, 3, 2))
    np.testing.assert_allclose(agent.value(theta), exact.expected_return(mdp, theta), **close)
    np.testing.assert_allclose(agent.gradient(theta), exact.gradient(mdp, theta), **close)
    Hv = np.einsum("abcd,cd->ab", exact.hessian(mdp, theta), v)
    np.testing.assert_allclose(agent.curvature(theta, v), Hv, **close)
