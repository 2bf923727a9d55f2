"""Neural policies: derivatives against finite differences and explicit matrices, sampling against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from scipy.special import ndtri
from scipy.stats import norm
from tiers import examples, some_slow

import perfedrl as pf
from perfedrl.estimators import PAPER, Credit, Sampled, log_probs, reward_to_go
from perfedrl.estimators.curvature.pairs import score, score_matrix
from perfedrl.policies import POLICIES, Policy
from perfedrl.rollout import RolloutSampler

TASKS = {"softmax": pf.arc(horizon=3).task(0), "gaussian": pf.point_navigation(horizon=3).task(0)}
KINDS = {"softmax": pf.MLPSoftmax, "gaussian": pf.GaussianMLP}
OUTPUTS = {"softmax": 8, "gaussian": 2}

networks = st.tuples(st.sampled_from(list(KINDS)), st.lists(st.integers(1, 6), max_size=2), st.integers(0, 2**31 - 1))


def random_network(kind, hidden, seed):
    """A policy with all parameters random, biases too, and a batch of its own episodes."""
    policy = KINDS[kind]((2, *hidden, OUTPUTS[kind]))
    flat, unravel = ravel_pytree(policy.init(jax.random.key(seed)))
    params = unravel(jax.random.normal(jax.random.key(seed + 1), flat.shape) * 0.7)
    batch = RolloutSampler(TASKS[kind], policy).sample(params, jax.random.key(seed + 2), 3)
    return policy, params, batch


@examples(20)
@given(networks)
def test_score_gradients_agree_with_finite_differences(network):
    with jax.enable_x64(True):
        policy, params, batch = random_network(*network)
        flat, unravel = ravel_pytree(params)
        total = jax.jit(lambda theta: jnp.sum(log_probs(policy.log_prob, unravel(theta), batch)))
        step, eye = 1e-5, np.eye(flat.size)
        central = np.asarray([(total(flat + step * e) - total(flat - step * e)) / (2 * step) for e in eye])
        np.testing.assert_allclose(jax.grad(total)(flat), central, rtol=6e-7, atol=6e-7)


@pytest.mark.slow
@examples(12)
@given(networks)
def test_the_matrix_free_curvature_product_equals_the_explicit_one(network):
    with jax.enable_x64(True):
        policy, params, batch = random_network(*network)
        flat, unravel = ravel_pytree(params)
        weights = jax.random.normal(jax.random.key(5), batch.reward.shape)
        v = jax.random.normal(jax.random.key(6), flat.shape)
        matrix, product = jax.jit(
            lambda params, v: (
                score_matrix(policy, params, batch, Credit(weights)),
                score(policy, params, batch, Credit(weights), v),
            )
        )(params, unravel(v))
        bound = 1e-10 * max(1, np.abs(matrix).max())
        np.testing.assert_allclose(ravel_pytree(product)[0], matrix @ v, rtol=1e-10, atol=bound)


@pytest.mark.parametrize("m", some_slow([99, 100, 101, 250], [101]))
def test_a_large_curvature_batch_in_slices_equals_the_whole_batch(x64, m):
    """A CPU works on it slice by slice, with a rest where it does not divide."""
    task, policy = TASKS["softmax"], pf.MLPSoftmax((2, 4, 8))
    params, key = policy.init(jax.random.key(0)), jax.random.key(1)
    v = jax.tree.map(jnp.ones_like, params)
    sliced = Sampled(policy, **PAPER)(task).curvature(params, v, key, m)
    batch = RolloutSampler(task, policy).sample(params, key, m)
    at_once = score(policy, params, batch, Credit(reward_to_go(batch, task.discount)), v)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-13), sliced, at_once)


def test_the_papers_network_has_360_parameters__appendix_c():
    policy = POLICIES["mlp"](fleet=pf.arc())
    assert policy.widths == (2, 32, 8)
    assert ravel_pytree(policy.init(jax.random.key(0)))[0].size == 360
    assert isinstance(policy, Policy)


def test_deeper_networks_start_with_activations_of_order_one():
    policy = pf.MLPSoftmax((2, 64, 64, 64, 8))
    params = policy.init(jax.random.key(0))
    assert [float(np.std(layer["weight"])) for layer in params] == pytest.approx(
        [0.5, 1 / np.sqrt(128), 1 / np.sqrt(128), 0.1], rel=0.2
    )


def test_the_softmax_draws_by_inverse_cdf_and_its_log_probabilities_sum_to_one():
    policy, params, batch = random_network("softmax", [5], 3)
    obs = batch.obs[0, 0]
    logp = jax.vmap(lambda a: policy.log_prob(params, obs, a))(jnp.arange(8))
    assert np.exp(logp).sum() == pytest.approx(1, abs=1e-6)
    cdf = np.cumsum(np.exp(logp))
    for u in np.linspace(0, 0.999, 41, dtype=np.float32):
        drawn = int(policy.sample(params, obs, jnp.asarray([u])))
        assert drawn == min(int((u >= cdf[:-1]).sum()), 7)


def test_gaussian_actions_and_log_probabilities_match_the_normal_distribution(x64):
    policy, params, batch = random_network("gaussian", [4], 11)
    obs, u = batch.obs[0, 1], jnp.asarray([0.2, 0.93])
    mean = policy.sample(params, obs, jnp.full(2, 0.5))
    std = np.exp(params["log_std"])
    np.testing.assert_allclose(policy.sample(params, obs, u), mean + std * ndtri(u), rtol=1e-12)
    action = jnp.asarray([0.3, -1.2])
    assert float(policy.log_prob(params, obs, action)) == pytest.approx(norm.logpdf(action, mean, std).sum(), rel=1e-12)
    assert np.isfinite(policy.sample(params, obs, jnp.asarray([0.0, 1 - 2**-53]))).all()
    fresh = pf.GaussianMLP((2, 3, 2), initial_std=0.25).init(jax.random.key(0))
    np.testing.assert_allclose(np.exp(fresh["log_std"]), 0.25)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pf.MLPSoftmax((2,)), "at least two widths"),
        (lambda: pf.MLPSoftmax((2, 0, 8)), "each from 1"),
        (lambda: pf.GaussianMLP((2, 2), initial_std=0.0), "initial_std"),
        (lambda: POLICIES["mlp"](fleet=pf.point_navigation()), "'gaussian-mlp'"),
        (lambda: POLICIES["gaussian-mlp"](fleet=pf.arc()), "'mlp'"),
        (lambda: POLICIES["mlp"](fleet=pf.gridworld()), "'table'"),
        (lambda: POLICIES["table"](fleet=pf.arc()), "finitely many states"),
    ],
)
def test_policies_that_do_not_fit_are_rejected(make, words):
    with pytest.raises(pf.UserError, match=words):
        make()
