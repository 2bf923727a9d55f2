"""Policies: sampling and log-probabilities agree, and shapes are checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.policies import POLICIES, Policy, TablePolicy

FLEET = pf.gridworld(width=3)


@pytest.fixture(params=("table", "log-linear"))
def policy(request):
    return POLICIES[request.param](fleet=FLEET)


def test_table_policies_subclass_the_contract(policy):
    assert isinstance(policy, Policy)
    assert isinstance(policy, TablePolicy)
    assert policy.G > 0
    assert policy.M > 0
    assert policy.Lambda > 0
    assert policy.init(jax.random.key(0)).size == 36


def test_log_probabilities_are_the_logarithms_of_the_probabilities(policy):
    theta = jax.random.normal(jax.random.key(1), policy.init(jax.random.key(0)).shape)
    pi = policy.probabilities(theta)
    np.testing.assert_allclose(pi.sum(axis=1), 1, rtol=1e-6)
    logp = jax.vmap(lambda s: jax.vmap(lambda a: policy.log_prob(theta, s, a))(jnp.arange(4)))(jnp.arange(9))
    np.testing.assert_allclose(jnp.exp(logp), pi, rtol=1e-5)


def test_an_action_is_drawn_by_inverse_cdf_of_one_uniform(policy):
    theta = jax.random.normal(jax.random.key(2), policy.init(jax.random.key(0)).shape)
    cdf = np.cumsum(policy.probabilities(theta)[4])
    for u in np.linspace(0, 0.999, 57, dtype=np.float32):
        drawn = int(policy.sample(theta, jnp.asarray(4), jnp.asarray([u])))
        assert drawn == min(int((u >= cdf[:-1]).sum()), 3)


def test_initial_parameters_are_the_uniform_policy(policy):
    np.testing.assert_allclose(policy.probabilities(policy.init(jax.random.key(0))), 0.25)


def test_constants_of_example_1():
    table = pf.TableSoftmax(2, 2)
    assert (table.G, table.M, table.Lambda) == (2, 4, 8)
    linear = pf.LogLinearSoftmax(np.asarray([[[0.0], [1.0], [3.0]]]))
    assert (linear.G, linear.M, linear.Lambda) == (6, 36, 216)


@pytest.mark.parametrize("features", [[[[1.0]]], [[[1.0], [1.0]]] * 3, [[[1.0], [1.0, 2.0]]]])
def test_features_that_do_not_fit_the_fleet_are_rejected(features):
    with pytest.raises(pf.UserError, match="features must"):
        POLICIES["log-linear"](fleet=FLEET, features=features)
