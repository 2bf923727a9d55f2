"""Moments of the meta-gradient estimate: the finite sums equal the sums over all batches fed to the estimators."""

import jax
import numpy as np
import pytest
from enumeration import batch, enumerate_trajectories, law, local_estimates, problems
from hypothesis import given
from hypothesis import strategies as st
from per_trajectory import per_trajectory_gradients, per_trajectory_matrices
from tiers import examples, some_slow

import perfedrl as pf
from perfedrl import exact
from perfedrl.envs import TabularMDP
from perfedrl.studies.theory.study import Curve
from perfedrl.theory import Batches
from perfedrl.theory.estimate import enumerated, moments, sampled, shared_mean
from perfedrl.theory.trajectory_enumeration import batches, per_trajectory, possible_trajectories

close = {"rtol": 0, "atol": 1e-10}


def fork() -> TabularMDP:
    """A two-step MDP with four trajectories: the first action picks the second state."""
    P = np.zeros((3, 2, 3))
    P[0, 0, 1] = P[0, 1, 2] = P[1, :, 1] = P[2, :, 2] = 1
    return TabularMDP(P, [[0.0, 0.2], [1.0, -0.5], [0.4, 0.0]], [1, 0, 0], horizon=1, discount=0.9)


@examples(10)
@given(problems())
def test_enumeration_finds_every_possible_trajectory__eq_1_to_3(problem):
    mdp, theta, _ = problem
    policy, t = exact.softmax_of(mdp), enumerate_trajectories(mdp)
    at = possible_trajectories(mdp)
    order = {tuple(np.ravel(x)): i for i, x in enumerate(np.stack([t.states, t.actions], axis=-1))}
    found = [order[tuple(np.ravel(x))] for x in np.stack([at.states, at.actions], axis=-1)]
    assert sorted(found) == list(np.flatnonzero(t.dynamics)), "all that can happen, once each"
    with jax.enable_x64(True):
        ours = jax.jit(per_trajectory)(policy, at, theta)
        q, b = np.asarray(law(policy, theta, t)), batch(t)
        g = np.asarray(per_trajectory_gradients(policy, theta, b, mdp.discount)).reshape(len(q), -1)
        u = np.asarray(per_trajectory_matrices(policy, theta, b, mdp.discount))
    np.testing.assert_allclose(ours.q, q[found], **close)
    np.testing.assert_allclose(ours.g, g[found], **close)
    np.testing.assert_allclose(ours.u, u[found], **close)


@pytest.mark.parametrize(("n", "m"), [(1, 3), (4, 1), (3, 5)])
def test_batches_are_all_multisets_with_their_multiplicity(n, m):
    counts, coefficients = batches(n, m)
    real = np.isfinite(coefficients)
    assert (counts[real].sum(axis=1) == m).all()
    assert len(np.unique(counts[real], axis=0)) == real.sum()
    assert np.exp(coefficients[real]).sum() == pytest.approx(n**m)


@pytest.mark.parametrize("variant", ["exact", "first-order"])
@pytest.mark.parametrize(
    ("sizes", "alpha", "seed"),
    some_slow([((1, 1, 1), 1.5, 0), ((2, 1, 2), 0.3, 1), ((1, 2, 1), 1.5, 2)], [((2, 1, 2), 0.3, 1)]),
)
def test_moments_are_those_of_every_estimate_there_is__lemma_3(sizes, alpha, seed, variant):
    mdp = pf.envs.random_mdps(agents=1, states=1, actions=3, horizon=0, discount=0.0, seed=seed).task(0)
    policy, theta = pf.TableSoftmax(1, 3), np.random.default_rng(seed).normal(size=(1, 3))
    target = exact.meta_gradient([mdp], theta, alpha)
    with jax.enable_x64(True):
        weights, estimates = map(np.asarray, jax.jit(local_estimates(mdp, policy, alpha, variant, sizes))(theta))
    assert np.sum(weights) == pytest.approx(1)
    bias = np.linalg.norm(np.einsum("b,bsa->sa", weights, estimates) - target)
    square = np.sum(weights * np.sum((estimates - target) ** 2, axis=(1, 2)))
    found = enumerated(mdp, policy, theta, alpha, Batches(*sizes), variant)
    np.testing.assert_allclose([found.bias, found.second_moment], [bias, square], **close)


def test_moments_where_the_hessian_terms_are_not_symmetric__lemma_3():
    mdp, policy, theta, sizes = fork(), pf.TableSoftmax(3, 2), np.random.default_rng(3).normal(size=(3, 2)), (1, 2, 1)
    t = enumerate_trajectories(mdp)
    possible = np.flatnonzero(t.dynamics)
    assert len(possible) == 4
    target = exact.meta_gradient([mdp], theta, 2.0)
    with jax.enable_x64(True):
        estimates = local_estimates(mdp, policy, 2.0, sizes=sizes, among=possible)
        weights, found = map(np.asarray, jax.jit(estimates)(theta))
    square = np.sum(weights * np.sum((found - target) ** 2, axis=(1, 2)))
    assert np.sum(weights) == pytest.approx(1)
    assert enumerated(mdp, policy, theta, 2.0, Batches(*sizes)).second_moment == pytest.approx(square, abs=1e-10)


def test_enumeration_that_would_not_fit_into_memory_is_refused():
    mdp, policy = pf.gridworld(horizon=2).task(0), pf.TableSoftmax(25, 4)
    with pytest.raises(pf.UserError, match="too many to list"):
        enumerated(mdp, policy, np.zeros((25, 4)), 1.0, Batches(1, 1, 1))


@examples(8)
@given(problems(), st.sampled_from((0.1, 1.0)))
def test_the_mean_factors__proof_of_lemma_3(problem, alpha):
    """E estimate = (I + alpha grad^2 J) E grad J(theta~), to 1e-10."""
    mdp, theta, _ = problem
    policy, at = exact.softmax_of(mdp), possible_trajectories(mdp)
    with jax.enable_x64(True):
        q, g, _ = map(np.asarray, jax.jit(per_trajectory)(policy, at, theta))
        gradients = jax.vmap(jax.grad(lambda x: exact.J(policy, mdp, x)))(theta + alpha * g.reshape(-1, *theta.shape))
        inner = q @ np.asarray(gradients).reshape(len(q), -1)
    jacobian = np.eye(theta.size) + alpha * exact.hessian(mdp, theta).reshape(theta.size, -1)
    np.testing.assert_allclose(shared_mean(mdp, policy, theta, alpha, 1, "nothing"), jacobian @ inner, **close)


def test_the_bias_falls_with_the_inverse_of_the_inner_batch__prop_1():
    mdp, policy, theta = fork(), pf.TableSoftmax(3, 2), np.zeros((3, 2))
    sizes = np.asarray([8, 16, 32, 64])
    for alpha in (0.5, 1.0, 2.0):
        found = [enumerated(mdp, policy, theta, alpha, Batches(int(m), 1, 1)).bias for m in sizes]
        assert Curve(sizes, np.asarray(found)).slope == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize("shared", ["inner", "outer"])
def test_a_shared_curvature_batch_adds_a_covariance__proof_of_lemma_3_step_3(shared):
    """With H-hat from the inner or the outer batch the mean is the factored one plus alpha Cov(H-hat, g_out)."""
    mdp, policy, alpha, m = fork(), pf.TableSoftmax(3, 2), 4.0, 2
    theta = np.random.default_rng(0).normal(size=(3, 2))
    at, d = possible_trajectories(mdp), theta.size
    numbers = jax.jit(per_trajectory)
    mean, mean_g, mean_H = np.zeros(d), np.zeros(d), np.zeros((d, d))
    with jax.enable_x64(True):
        q, g_in, u = map(np.asarray, numbers(policy, at, theta))
        for i in np.ndindex(*m * [len(q)]):
            tilde = theta + alpha * g_in[list(i)].mean(axis=0).reshape(theta.shape)
            q_out, g_out, _ = map(np.asarray, numbers(policy, at, tilde))
            for k in np.ndindex(*m * [len(q)]):
                weight = q[list(i)].prod() * q_out[list(k)].prod()
                g, H = g_out[list(k)].mean(axis=0), u[list(i if shared == "inner" else k)].mean(axis=0)
                mean += weight * (g + alpha * H @ g)
                mean_g, mean_H = mean_g + weight * g, mean_H + weight * H
    np.testing.assert_allclose(shared_mean(mdp, policy, theta, alpha, m, shared), mean, **close)
    covariance = mean - mean_g - alpha * mean_H @ mean_g
    assert np.linalg.norm(covariance) > 1e-3
    extra = mean - shared_mean(mdp, policy, theta, alpha, m, "nothing")
    shift = alpha * (mean_H - exact.hessian(mdp, theta).reshape(d, d)) @ mean_g
    np.testing.assert_allclose(extra, covariance + shift, **close)
    # The inner batch is drawn from the same law as a fresh one; the outer one is drawn by another policy.
    assert np.linalg.norm(shift) == pytest.approx(0, abs=1e-10) if shared == "inner" else np.linalg.norm(shift) > 1e-4


def test_the_covariance_of_a_shared_inner_batch_vanishes_as_the_batch_grows():
    """The paper states that it does not vanish; it falls as 1 / m."""
    mdp, policy, theta, sizes = fork(), pf.TableSoftmax(3, 2), np.zeros((3, 2)), np.asarray([16, 32, 64])

    def mean(m, s):
        return shared_mean(mdp, policy, theta, 1.0, int(m), s)

    extra = [np.linalg.norm(mean(m, "inner") - mean(m, "nothing")) for m in sizes]
    assert Curve(sizes, np.asarray(extra)).slope == pytest.approx(-1, abs=0.05)


@pytest.mark.slow
def test_sampled_moments_agree_with_enumerated_ones():
    mdp, policy, theta = fork(), pf.TableSoftmax(3, 2), np.asarray([[0.3, -0.2], [0.5, 0.1], [0.0, 0.4]])
    for variant in ("exact", "first-order"):
        sizes = Batches(4, 3, 2)
        ours, true = (f(mdp, policy, theta, 2.0, sizes, variant) for f in (sampled, enumerated))
        assert not ours.enumerated
        assert true.enumerated
        np.testing.assert_allclose(ours[:3], true[:3], rtol=0.15)
        assert ours.bias == pytest.approx(true.bias, rel=0.1)


def test_the_sampled_bias_is_measured_far_below_the_noise_of_a_batch():
    """A thousand estimates have a standard error of 0.01; the bias is a thousand times smaller and known to 20 %."""
    mdp, policy, theta = fork(), pf.TableSoftmax(3, 2), np.asarray([[0.3, -0.2], [0.5, 0.1], [0.0, 0.4]])
    ours, true = (f(mdp, policy, theta, 0.1, Batches(32, 1, 1)) for f in (sampled, enumerated))
    assert true.bias < 1e-5 < 0.01 < np.sqrt(true.second_moment / 1024)
    assert ours.bias == pytest.approx(true.bias, rel=0.2)


def test_moments_are_sampled_where_enumeration_is_impossible():
    mdp, policy = pf.gridworld(width=2, horizon=9).task(0), pf.TableSoftmax(4, 4)
    with pytest.raises(pf.UserError, match="too many to list"):
        possible_trajectories(mdp)
    assert not moments(mdp, policy, np.zeros((4, 4)), 1.0, Batches(2, 2, 2)).enumerated
    with pytest.raises(pf.UserError, match="more than 200000 batches"):
        batches(16, 30)
