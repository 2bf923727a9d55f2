"""First-order fixed points: the residual identity, all digits of the witness, and points that are not fixed."""

import numpy as np
import pytest
from enumeration import fleets
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from tiers import examples

import perfedrl as pf
from perfedrl import exact, theory
from perfedrl.algorithms import PerFedAvgPG
from perfedrl.envs.bandits import WITNESS_FEATURES, WITNESS_REWARDS, bandits
from perfedrl.envs.tabular import unstack
from perfedrl.policies import LogLinearSoftmax
from perfedrl.theory.first_order_fixed_points import FirstOrderDynamics, fixed_points
from perfedrl.theory.witness import ALPHAS, agreements, attracting_witness, continued, paper_witness

close = {"rtol": 0, "atol": 1e-10}


def scalar_bandits(seed: int) -> tuple[pf.Fleet, LogLinearSoftmax]:
    """Two or three bandits with random rewards under a scalar policy."""
    rng = np.random.default_rng(seed)
    rewards = rng.uniform(size=(rng.integers(2, 4), 3))
    return bandits(tuple(map(tuple, rewards))), LogLinearSoftmax(np.asarray([WITNESS_FEATURES]))


@examples(12)
@given(fleets(), st.sampled_from((0.1, 1.0)))
def test_the_meta_gradient_is_the_first_order_direction_and_curvature_times_it__prop_2(problem, alpha):
    """Grad F = D + (alpha / n) sum_i H_i v_i at every theta, to 1e-10."""
    mdps, theta, policy, _ = problem
    d = theta.size
    H = [exact.hessian(mdp, theta, policy).reshape(d, d) for mdp in mdps]
    v = [exact.gradient(m, theta + alpha * exact.gradient(m, theta, policy), policy).ravel() for m in mdps]
    C = np.mean([h @ x for h, x in zip(H, v, strict=True)], axis=0)
    D = exact.first_order_direction(mdps, theta, alpha, policy).ravel()
    np.testing.assert_allclose(exact.meta_gradient(mdps, theta, alpha, policy).ravel(), D + alpha * C, **close)


@examples(6, fast=3)
@given(st.integers(0, 10**6), st.sampled_from((0.05, 0.5)))
def test_at_fixed_points_the_residual_is_the_sum_of_the_agents_shares_and_bounded__prop_2(seed, alpha):
    fleet, policy = scalar_bandits(seed)
    bound = theory.residual(theory.constants(fleet, policy, alpha))
    for point in fixed_points(fleet, policy, alpha):
        direction = exact.first_order_direction(fleet, point.theta, alpha, policy)
        np.testing.assert_allclose(direction, 0, **close)
        np.testing.assert_allclose(exact.meta_gradient(fleet, point.theta, alpha, policy), point.meta_gradient, **close)
        assert point.residual <= bound
        np.testing.assert_allclose(point.v.sum(axis=0), 0, atol=1e-9)
        ahead = [exact.first_order_direction(fleet, point.theta + e, alpha, policy)[0] for e in (-1e-4, 1e-4)]
        assert point.attracting == (ahead[0] > 0 > ahead[1])


def test_the_witness_to_all_printed_digits__prop_2():
    agreed = agreements()
    assert len(agreed) == 9
    for number in agreed:
        assert number.agrees, number
    assert {a.paper for a in agreed} >= {-0.5555031, -0.3195682, -0.2568571, 0.4999539, 0.0604632, 0.1571893}


@pytest.mark.parametrize("alpha", ALPHAS)
def test_D_has_a_zero_at_every_listed_alpha_and_the_residual_is_not_zero__prop_2(alpha):
    point = continued(*paper_witness(), alpha)
    assert point.direction <= 1e-11
    assert point.residual > 0.07 * alpha
    assert abs(point.limit.theta[0] + 0.2310491) < 1e-7


def test_the_papers_witness_repels_and_one_with_rewards_turned_attracts():
    """First-order ascent does not converge to the paper's fixed point, but to that of the rewards 1 - r."""
    for make, attracts in ((paper_witness, False), (attracting_witness, True)):
        fleet, policy = make()
        point = continued(fleet, policy, 0.25)
        assert point.attracting == attracts
        assert point.limit.slope == pytest.approx(0.1571893, abs=1e-7)
        theta = point.theta + 0.01
        for _ in range(400):
            theta = theta + 0.5 * exact.first_order_direction(fleet, theta, 0.25, policy)
        assert (abs(theta - point.theta).item() < 1e-6) == attracts
    # The simulator's noiseless first-order dynamics ends there too, with a meta-gradient that is not zero.
    algorithm = PerFedAvgPG(0.25, 0.5, local_steps=1, variant="first-order")
    run = pf.simulate(fleet, policy, algorithm, rounds=600, seeds=[0], every=600, noiseless=True)
    assert run.params[0] == pytest.approx(point.theta, abs=1e-6)
    assert abs(exact.meta_gradient(fleet, run.params[0], 0.25, policy).item()) == pytest.approx(0.0290392, abs=1e-6)


def test_a_stationary_mean_certifies_no_agent__remark_2():
    """Where grad F is zero, the adapted policy of each agent can still be far from stationary."""
    fleet, policy = paper_witness()
    alpha = 1 / (2 * theory.constants(fleet, policy).L_J)

    def slope(x):
        return exact.meta_gradient(fleet, np.asarray([x]), alpha, policy).item()

    theta = np.asarray([brentq(slope, -1.0, 0.0)])
    adapted = [
        exact.gradient(m, theta + alpha * exact.gradient(m, theta, policy), policy) for m in unstack(fleet.train)
    ]
    assert abs(slope(theta.item())) < 1e-9
    assert np.abs(adapted).min() > 0.4


def test_residuals_vanish_for_one_agent_and_for_equal_ones__prop_2():
    policy = LogLinearSoftmax(np.asarray([WITNESS_FEATURES]))
    for rewards in (((0.2, 1.0, 0.0),), ((0.2, 1.0, 0.0),) * 3):
        points = fixed_points(bandits(rewards), policy, 0.5)
        assert points
        assert max(point.residual for point in points) <= 1e-12


def test_the_limit_is_that_of_smaller_and_smaller_alphas():
    fleet, policy = attracting_witness()
    limit = continued(fleet, policy, 0.5).limit
    mdps = unstack(fleet.train)
    np.testing.assert_allclose(np.mean([exact.gradient(m, limit.theta, policy) for m in mdps]), 0, **close)
    for alpha, within in ((1e-2, 0.02), (1e-4, 2e-4)):
        assert continued(fleet, policy, alpha).residual / alpha == pytest.approx(limit.slope, rel=within)


def test_fixed_points_of_tables_are_policies_not_parameters():
    """A table softmax is constant along some directions; a fixed point is counted once per policy."""
    fleet = bandits(((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)))
    policy = pf.TableSoftmax(1, 3)
    points = fixed_points(fleet, policy, 5.0)
    dynamics = FirstOrderDynamics(fleet.train, policy)
    probabilities = [dynamics.probabilities(point.theta) for point in points]
    assert any(np.allclose(p, 1 / 3) for p in probabilities), "by symmetry"
    for i, p in enumerate(probabilities):
        assert all(np.abs(p - q).max() > 1e-6 for q in probabilities[:i])
    residuals = [point.residual for point in points]
    assert residuals == sorted(residuals, reverse=True)


def test_a_zero_on_the_very_grid_of_the_search_is_found():
    """By symmetry D(0) is exactly 0, and 0 is a node."""
    policy = LogLinearSoftmax(np.asarray([[[-1.0], [0.0], [1.0]]]))
    points = fixed_points(bandits(), policy, 0.5)
    assert any(abs(point.theta[0]) < 1e-12 for point in points)


def test_rewards_of_any_size_have_the_same_fixed_points():
    _, policy = paper_witness()
    for scale in (1e-6, 1e6):
        rewards = tuple(tuple(scale * x for x in r) for r in WITNESS_REWARDS)
        point = continued(bandits(rewards), policy, 0.5 / scale)
        assert point.theta[0] == pytest.approx(-0.5555031, abs=1e-7)
        assert point.limit.slope == pytest.approx(0.1571893 * scale**2, rel=1e-6)


def test_where_nothing_moves_nothing_attracts():
    for point in fixed_points(bandits(((1.0, 1.0, 1.0),)), pf.TableSoftmax(1, 3), 0.5):
        assert not point.attracting


def test_points_on_the_way_to_infinity_are_not_fixed_points():
    """With one agent and one best arm, ascent tends to a deterministic policy at infinity."""
    assert fixed_points(bandits(((1.0, 0.0, 0.0),)), pf.TableSoftmax(1, 3), 0.5) == []
    assert fixed_points(pf.gridworld(width=2, horizon=2), pf.TableSoftmax(4, 4), 0.5) == []


def test_invalid_searches_for_fixed_points_are_refused():
    with pytest.raises(pf.UserError, match="finitely many states"):
        fixed_points(pf.arc(), pf.MLPSoftmax((2, 4, 8)), 0.5)
    with pytest.raises(pf.UserError, match="alpha must be"):
        fixed_points(*paper_witness(), 0.0)
    with pytest.raises(pf.UserError, match="continues a stationary point"):
        continued(bandits(((1.0, 0.0, 0.0),)), paper_witness()[1], 0.5)
