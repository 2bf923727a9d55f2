"""A sampled batch answers for any parameters: its gradient, ratios, clipped surrogate and divergence."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.estimators import Sampled

FLEET, POLICY = pf.gridworld(width=3, horizon=4), pf.TableSoftmax(9, 4)
THETA, OTHER = (jax.random.normal(jax.random.key(i), (9, 4)) for i in (1, 2))


@pytest.fixture(scope="module")
def sampled():
    agent = Sampled(POLICY, advantage="gae", entropy=0.1)(FLEET.task(1))
    return agent, agent.batch(THETA, jax.random.key(0), 6)


def test_at_the_parameters_of_sampling_its_gradient_is_the_agents(sampled):
    agent, batch = sampled
    expected = agent.gradient(THETA, jax.random.key(0), 6)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(batch.gradient(THETA), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: batch.surrogate(x, 0.2))(THETA), expected, rtol=1e-4, atol=1e-6)


def test_ratios_and_the_clipped_surrogate_by_hand():
    batch = Sampled(POLICY)(FLEET.task(1)).batch(THETA, jax.random.key(0), 6)
    A = np.random.default_rng(0).normal(size=batch.advantage.shape).astype(np.float32)
    batch = eqx.tree_at(lambda b: b.advantage, batch, A)
    old, new = (np.log(np.asarray(jax.nn.softmax(x))) for x in (THETA, OTHER))
    s, a = np.asarray(batch.trajectories.obs), np.asarray(batch.trajectories.action)
    ratios = np.exp(new[s, a] - old[s, a])
    np.testing.assert_allclose(batch.ratios(OTHER), ratios, rtol=1e-5)
    clipped = np.where(A > 0, np.minimum(ratios, 1.2), np.maximum(ratios, 0.8))
    assert all((clipped != ratios)[sign].any() for sign in (A > 0, A < 0))
    np.testing.assert_allclose(batch.surrogate(OTHER, 0.2), (clipped * A).sum() / 6, rtol=1e-5)
    np.testing.assert_allclose(batch.surrogate(OTHER), (ratios * A).sum() / 6, rtol=1e-5)


def test_the_divergence_is_the_mean_over_visited_states(sampled):
    _, batch = sampled
    old, new = (np.asarray(jax.nn.log_softmax(x)) for x in (THETA, OTHER))
    apart = (np.exp(old) * (old - new)).sum(axis=1)
    np.testing.assert_allclose(batch.divergence(OTHER), apart[np.asarray(batch.trajectories.obs)].mean(), rtol=1e-5)
    assert batch.divergence(THETA) == pytest.approx(0, abs=1e-6)


def test_decisions_after_the_end_of_an_episode_do_not_count():
    fleet = pf.cart_pole(agents=1, held_out=0, horizon=99)
    policy = pf.policies.mlp(fleet, (4,))
    agent = Sampled(policy, advantage="gae")(fleet.task(0))
    params = policy.init(jax.random.key(0))
    batch = agent.batch(params, jax.random.key(1), 3)
    mask = batch.trajectories.mask
    assert 0 < mask.sum() < mask.size
    changed = jax.tree.map(lambda x: x + 0.5, params)
    rest = batch.trajectories._replace(obs=jnp.where(mask[..., None] > 0, batch.trajectories.obs, 7.0))
    weights = jnp.where(mask > 0, batch.advantage, 7.0)
    other = eqx.tree_at(lambda b: (b.trajectories, b.advantage), batch, (rest, weights))
    assert float(batch.surrogate(changed, 0.2)) == float(other.surrogate(changed, 0.2))
    assert float(batch.divergence(changed)) == float(other.divergence(changed))


def test_a_policy_without_a_divergence_is_rejected():
    class Plain(pf.TableSoftmax):
        divergence = None

    with pytest.raises(pf.UserError, match="Plain has no divergence"):
        Sampled(Plain(9, 4))(FLEET.task(0)).batch(THETA, jax.random.key(0), 2)
