"""Divergences of policies are the means of differences of their log-probabilities."""

import jax
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.policies.linear_gaussian import LinearGaussian
from perfedrl.policies.mlp import GaussianMLP, MLPFactored, MLPSoftmax

FINITE = {
    "table": (pf.TableSoftmax(3, 4), np.array(1), [np.array(a) for a in range(4)]),
    "mlp": (MLPSoftmax((2, 3, 4)), np.array([0.3, -1.0], np.float32), [np.array(a) for a in range(4)]),
    "factored": (
        MLPFactored((2, 5), (2, 3)),
        np.array([0.3, -1.0], np.float32),
        [np.array([a, b], np.int32) for a in range(2) for b in range(3)],
    ),
}


def two_parameters(policy):
    first = policy.init(jax.random.key(0))
    noise = jax.tree.map(lambda x: np.random.default_rng(1).normal(size=np.shape(x)).astype(np.float32), first)
    return jax.tree.map(lambda x, z: x + 0.3 * z, first, noise), jax.tree.map(lambda x, z: x - 0.2 * z, first, noise)


@pytest.mark.parametrize("name", FINITE)
def test_over_finitely_many_actions_it_is_the_sum_over_all(name):
    policy, obs, actions = FINITE[name]
    one, other = two_parameters(policy)
    logp, new = (np.array([policy.log_prob(params, obs, a) for a in actions]) for params in (one, other))
    assert np.exp(logp).sum() == pytest.approx(1, abs=1e-5)
    found = policy.divergence(policy.distribution(one, obs), policy.distribution(other, obs))
    assert found == pytest.approx((np.exp(logp) * (logp - new)).sum(), rel=1e-4)
    assert found > 0.01


GAUSSIANS = {
    "gaussian-mlp": (GaussianMLP((2, 3, 2)), np.array([0.3, -1.0], np.float32)),
    "with a least std": (GaussianMLP((2, 3, 2), least_std=0.4), np.array([0.3, -1.0], np.float32)),
    "linear-gaussian": (LinearGaussian(np.eye(2), 0.5, learn_std=True), np.array([0.3, -1.0], np.float32)),
}


@pytest.mark.parametrize("name", GAUSSIANS)
def test_of_gaussians_it_is_the_integral(name):
    """Gauss-Hermite quadrature, which is exact for the polynomials that differences of log-densities are."""
    policy, obs = GAUSSIANS[name]
    one, other = two_parameters(policy)
    mean, std = policy.distribution(one, obs)
    z, w = np.polynomial.hermite_e.hermegauss(5)
    total = 0.0
    for i, x in enumerate(z):
        for j, y in enumerate(z):
            action = np.asarray(mean + std * np.array([x, y], np.float32))
            apart = policy.log_prob(one, obs, action) - policy.log_prob(other, obs, action)
            total += w[i] * w[j] / w.sum() ** 2 * float(apart)
    found = policy.divergence(policy.distribution(one, obs), policy.distribution(other, obs))
    assert found == pytest.approx(total, rel=1e-3)
    assert policy.variance(one) == pytest.approx(np.mean(np.asarray(std) ** 2), rel=1e-5)


def test_a_least_standard_deviation_is_never_left_and_starts_at_the_initial_one():
    policy = GaussianMLP((1, 1), initial_std=1.0, least_std=0.2)
    params = policy.init(jax.random.key(0))
    assert policy.distribution(params, np.zeros(1, np.float32))[1][0] == pytest.approx(1.0, rel=1e-6)
    narrow = {**params, "log_std": params["log_std"] - 50.0}
    assert policy.variance(narrow) == pytest.approx(0.04, rel=1e-5)
    slope = jax.grad(lambda p: policy.variance(p))(params)["log_std"]
    assert float(slope[0]) > 0


def test_divergences_go_through_value_networks_and_normalization():
    fleet = pf.pendulum(agents=1, held_out=0)
    actor = pf.policies.actor_critic(fleet)
    for policy, inner, part in (
        (actor, actor.actor, "actor"),
        (pf.policies.normalized(fleet, actor, True, False, 1.0), actor, "policy"),
    ):
        params, obs = policy.init(jax.random.key(0)), np.array([0.1, 0.2, 0.3], np.float32)
        for x, y in zip(policy.distribution(params, obs), inner.distribution(params[part], obs), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5)
        assert policy.variance(params) == inner.variance(params[part])
        assert policy.divergence(policy.distribution(params, obs), policy.distribution(params, obs)) == 0


@pytest.mark.parametrize("least_std", [-0.1, 1.0, float("nan")])
def test_a_least_standard_deviation_lies_below_the_initial_one(least_std):
    with pytest.raises(pf.UserError, match="least_std must lie in"):
        GaussianMLP((1, 1), 1.0, least_std=least_std)
