"""Lemma 5 and Theorem 1, with every expectation computed as a finite sum over all batches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import fleets, local_estimates, random_mdp
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples, some_slow

import perfedrl as pf
from perfedrl import exact, theory
from perfedrl.envs.tabular import unstack
from perfedrl.theory.fleet_problem import first_parameters, problem
from perfedrl.theory.fleet_problem import settings as settings_of
from perfedrl.theory.local_step_trace import Trace
from perfedrl.theory.realized_bounds import squared_meta_gradients

slack = 1 + 1e-9


@jax.jit
def values_and_squares(policy, mdps, points, alpha):
    """F and |grad F|^2 at many points."""

    def F(theta):
        return jnp.mean(jax.vmap(lambda mdp: exact.F(policy, mdp, theta, alpha))(mdps))

    value, gradient = jax.vmap(jax.value_and_grad(F))(points)
    return value, jnp.sum(gradient**2, axis=(1, 2))


def bandit_pair(seed: int, arms: int) -> pf.Fleet:
    rng = np.random.default_rng(seed)
    return pf.Fleet(exact.stacked([random_mdp(rng, (1, arms, 0), 0.0) for _ in range(2)]))


@examples(8)
@given(st.integers(0, 1000), st.sampled_from((0.05, 0.5)), st.sampled_from(("exact", "first-order")), st.integers(0, 3))
def test_one_step_gains_at_least_what_it_must__lemma_5(seed, alpha, variant, t):
    fleet, policy, rng = bandit_pair(seed, 3), pf.TableSoftmax(1, 3), np.random.default_rng(seed + 1)
    p = problem(fleet, policy, pf.PerFedAvgPG(alpha, 1.0, variant=variant))
    c = p.constants
    beta = theory.ceiling(c) * rng.uniform(0.1, 1)
    # Agents as far apart as t local steps can carry them: theta_1 = mean + d, theta_2 = mean - d.
    mean, way = rng.normal(size=(1, 3)), rng.normal(size=(1, 3))
    way *= theory.drift(c, beta, t) / np.linalg.norm(way)
    with jax.enable_x64(True):
        (w1, g1), (w2, g2) = (
            jax.jit(local_estimates(mdp, policy, alpha, variant))(jnp.asarray(theta))
            for mdp, theta in zip(unstack(fleet.train), (mean + way, mean - way), strict=True)
        )
        points = mean + beta * (g1[:, None] + g2[None, :]).reshape(-1, 1, 3) / 2
        after, _ = values_and_squares(policy, fleet.train, points, alpha)
        (before,), (square,) = values_and_squares(policy, fleet.train, jnp.asarray(mean)[None], alpha)
        weights, after, before = np.outer(w1, w2).ravel(), np.asarray(after), float(before)
    assert weights.sum() == pytest.approx(1)
    for kind in ("crude", "sharp"):
        gain = theory.one_step_progress(
            c, beta, t, 2, float(square), p.bias(1, kind), p.second_moment(1, 1 if variant == "exact" else 0, 1)
        )
        assert weights @ after - before >= gain - 1e-12


@pytest.mark.parametrize("variant", ["exact", "first-order"])
@pytest.mark.parametrize(("rounds", "tau"), some_slow([(1, 3), (3, 1)], [(1, 3)]))
def test_the_mean_over_all_runs_is_within_the_bound__theorem_1_and_corollary_2(rounds, tau, variant):
    fleet, policy, alpha = bandit_pair(5, 2), pf.TableSoftmax(1, 2), 0.3
    p = problem(fleet, policy, pf.PerFedAvgPG(alpha, 1.0, variant=variant))
    beta = theory.ceiling(p.constants)
    agents = [jax.vmap(local_estimates(mdp, policy, alpha, variant)) for mdp in unstack(fleet.train)]
    with jax.enable_x64(True):
        weights, thetas = jnp.ones(1), jnp.zeros((1, 2, 1, 2))  # [branch, agent, ...]
        squares = []
        for step in range(rounds * tau):
            if step % tau == 0:  # a round begins: all start from the average
                thetas = jnp.broadcast_to(thetas.mean(axis=1, keepdims=True), thetas.shape)
            _, square = values_and_squares(policy, fleet.train, thetas.mean(axis=1), alpha)
            squares.append(float(weights @ square))
            (w1, g1), (w2, g2) = (jax.jit(f)(thetas[:, i]) for i, f in enumerate(agents))
            weights = (weights[:, None, None] * w1[:, :, None] * w2[:, None, :]).ravel()
            one = jnp.broadcast_to((thetas[:, 0, None] + beta * g1)[:, :, None], (*g1.shape[:2], g2.shape[1], 1, 2))
            two = jnp.broadcast_to((thetas[:, 1, None] + beta * g2)[:, None], (*g1.shape[:2], g2.shape[1], 1, 2))
            thetas = jnp.stack([one, two], axis=3).reshape(-1, 2, 1, 2)
    assert np.asarray(weights).sum() == pytest.approx(1)
    m_h = 1 if variant == "exact" else 0
    for kind in ("crude", "sharp"):
        assert np.mean(squares) <= p.guarantee(rounds, tau, beta, 1, m_h, 1, kind).total * slack


@partial(jax.jit, static_argnums=(5, 6, 7))
def noiseless_squares(policy, mdps, theta, alpha, beta, rounds, tau, variant):
    """|grad F|^2 at the virtual averages of a run with exact gradients, [round, local step]."""

    def F(theta):
        return jnp.mean(jax.vmap(lambda mdp: exact.F(policy, mdp, theta, alpha))(mdps))

    def direction(mdp, theta):
        if variant == "first-order":
            return jax.grad(lambda t: exact.J(policy, mdp, t))(exact.adapted(policy, mdp, theta, alpha))
        return jax.grad(lambda t: exact.F(policy, mdp, t, alpha))(theta)

    def local(thetas, _):
        square = jnp.sum(jax.grad(F)(thetas.mean(axis=0)) ** 2)
        return thetas + beta * jax.vmap(direction)(mdps, thetas), square

    def one_round(theta, _):
        thetas, squares = jax.lax.scan(local, jnp.stack([theta] * len(mdps.mu)), length=tau)
        return thetas.mean(axis=0), squares

    return jax.lax.scan(one_round, theta, length=rounds)[1]


@examples(10)
@given(fleets(), st.sampled_from((0.01, 0.3)), st.sampled_from((1, 3)), st.sampled_from(("exact", "first-order")))
def test_a_run_without_noise_is_within_the_bound__theorem_1_and_corollary_2(drawn, alpha, tau, variant):
    """Exact gradients have no variance; their only bias is the curvature term that the first-order variant drops."""
    mdps, _, policy, _ = drawn
    fleet = pf.Fleet(exact.stacked(mdps))
    p = problem(fleet, policy, pf.PerFedAvgPG(alpha, 1.0, variant=variant))
    c = p.constants
    beta, theta = theory.ceiling(c), first_parameters(policy).astype(float)
    with jax.enable_x64(True):
        squares = np.asarray(noiseless_squares(policy, fleet.train, theta, alpha, beta, 20, tau, variant))
    bias = theory.residual(c) if variant == "first-order" else 0.0
    run = {"tau": tau, "beta": beta, "n": len(mdps), "gap": p.gap, "bias": bias, "second_moment": 0.0}
    for rounds in (1, 20):
        assert squares[:rounds].mean() <= theory.convergence(c, rounds=rounds, **run).total * slack


def test_the_bound_is_not_far_above_a_run_without_noise_nor_drift__theorem_1():
    fleet, policy, alpha = bandit_pair(7, 3), pf.TableSoftmax(1, 3), 0.1
    p = problem(fleet, policy, pf.PerFedAvgPG(alpha, 1.0))
    beta = theory.ceiling(p.constants)
    with jax.enable_x64(True):
        squares = np.asarray(noiseless_squares(policy, fleet.train, np.zeros((1, 3)), alpha, beta, 400, 1, "exact"))
    run = {"rounds": 400, "tau": 1, "beta": beta, "n": 2, "gap": p.gap, "bias": 0.0, "second_moment": 0.0}
    assert squares.mean() <= theory.convergence(p.constants, **run).total <= 200 * squares.mean()


def test_the_gap_is_a_bound_on_what_F_can_gain__lemma_2_i():
    fleet, policy = pf.gridworld(width=3, horizon=4), pf.TableSoftmax(9, 4)
    p = problem(fleet, policy, pf.PerFedAvgPG(2.0, 0.3))
    trained = pf.simulate(fleet, policy, pf.PerFedAvgPG(2.0, 0.3), rounds=30, seeds=[0], noiseless=True)
    gained = exact.meta_objective(fleet, trained.params[0], 2.0) - exact.meta_objective(fleet, np.zeros((9, 4)), 2.0)
    assert 0.01 < gained <= p.gap <= 2 * p.constants.R_bar
    assert problem(pf.arc(), pf.MLPSoftmax((2, 4, 8)), pf.PerFedAvgPG(1.0, 0.1), radius=9.0).gap == pytest.approx(20)
    with pytest.raises(pf.UserError, match="the gap"):
        problem(fleet, policy, pf.PerFedAvgPG(2.0, 0.3), gap=-1.0)


def test_settings_read_algorithms_in_the_papers_symbols():
    assert settings_of(pf.PerFedAvgPG(2.0, 0.3, 5, 10, 20, 30)) == (2.0, 0.3, 5, 10, 20, 30, "exact")
    assert settings_of(pf.PerFedAvgPG(2.0, 0.3, variant="first-order")).m_h == 0
    assert settings_of(pf.FedAvgPG(2.0, 0.3, 5, 30)) == (0.0, 0.3, 5, 0, 0, 30, "exact"), "it trains without adaptation"
    with pytest.raises(pf.UserError, match="not LocalPG"):
        settings_of(pf.LocalPG(0.1))


def test_squared_meta_gradients_are_those_at_the_virtual_averages():
    fleet, policy = pf.gridworld(width=3, horizon=4), pf.TableSoftmax(9, 4)
    params = np.random.default_rng(0).normal(size=(2, 3, 8, 9, 4)).astype(np.float32)
    squares = squared_meta_gradients(fleet, policy, Trace(params), 1.5)
    assert squares.shape == (2, 2)
    at = params[1, 1].mean(axis=0)
    assert squares[1, 1] == pytest.approx(np.sum(exact.meta_gradient(fleet, at, 1.5) ** 2), rel=1e-5)
