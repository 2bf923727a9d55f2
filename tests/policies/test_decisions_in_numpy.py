"""Decisions in NumPy (`in_numpy`) equal those of `sample`, also in another process."""

import pickle

import jax
import numpy as np
import pytest

from perfedrl.policies import ActorCritic, Contextual, GaussianMLP, MLPSoftmax
from perfedrl.policies.mlp import MLPFactored
from perfedrl.policies.normalized import Normalized
from perfedrl.policies.sighted import SightedPolicy

POLICIES = {
    "softmax": MLPSoftmax((3, 5, 4)),
    "linear softmax": MLPSoftmax((3, 4)),
    "several components": MLPFactored((3, 5, 7), (2, 4, 1)),
    "gaussian": GaussianMLP((3, 5, 2), 0.7),
    "actor-critic": ActorCritic(MLPSoftmax((3, 5, 4)), (4, 3, 1)),
    "context": Contextual(GaussianMLP((5, 5, 2), 0.7), 3, 2),
    "normalized": Normalized(GaussianMLP((3, 5, 2)), size=3),
    "normalized rewards": Normalized(MLPSoftmax((3, 5, 4)), rewards=True),
    "sighted": SightedPolicy(Normalized(MLPSoftmax((5, 4)), size=3), np.asarray([0.5, -1.5])),
}


@pytest.mark.parametrize("name", POLICIES)
def test_decisions_in_numpy_equal_sample(name):
    policy, rng = POLICIES[name], np.random.default_rng(0)
    drawn = policy.init(jax.random.key(0))
    params = jax.tree.map(lambda x: np.asarray(x + rng.uniform(0, 0.5, x.shape), np.float32), drawn)
    obs, u = rng.normal(0, 3, (200, 3)).astype(np.float32), rng.random((200, policy.noise), np.float32)
    expected = jax.jit(jax.vmap(lambda obs, u: policy.sample(params, obs, u)))(obs, u)
    decide = policy.in_numpy(params)
    got = decide(obs, u)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(decide))(obs, u), got)  # as worker processes get it
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_decisions_are_finite_at_the_edges_of_the_uniforms():
    policy = GaussianMLP((3, 5, 2))
    edges = np.asarray([[0.0, np.nextafter(np.float32(1), np.float32(0))]], np.float32)
    assert np.isfinite(policy.in_numpy(policy.init(jax.random.key(0)))(np.zeros((1, 3), np.float32), edges)).all()


def test_components_are_independent_and_their_probabilities_sum_to_one():
    policy, obs = POLICIES["several components"], np.asarray([0.3, -1.0, 2.0], np.float32)
    params = policy.init(jax.random.key(1))
    every = np.stack(np.meshgrid(*map(np.arange, policy.actions), indexing="ij"), axis=-1).reshape(-1, 3)
    log_prob = jax.vmap(lambda a: policy.log_prob(params, obs, a))(every)
    assert float(np.sum(np.exp(log_prob))) == pytest.approx(1, abs=1e-6)
    entropy = -np.sum(np.exp(log_prob) * log_prob)
    assert float(policy.entropy(params, obs)) == pytest.approx(float(entropy), abs=1e-6)
