"""Policies with a context: what the inner policy and the model see, and the error of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.policies import Contextual, GaussianMLP, MLPSoftmax, Normalized, context_mlp
from perfedrl.policies.mlp import MLPFactored, forward
from perfedrl.types import Trajectory

KINDS = {
    "gaussian": Contextual(GaussianMLP((5, 4, 2)), 3, 2, (6,), 0.5),
    "softmax": Contextual(MLPSoftmax((5, 4, 3)), 3, 2, (6,), 0.5),
    "several components": Contextual(MLPFactored((5, 4, 5), (2, 3)), 3, 2, (6,), 0.5),
}


def parameters(policy):
    """Parameters away from the start, so that the context is not 0."""
    rng, start = np.random.default_rng(0), policy.init(jax.random.key(0))
    return jax.tree.map(lambda x: np.asarray(x + rng.uniform(0.1, 0.5, x.shape), np.float32), start)


def batch_of(policy, params, m=4, T=6):
    """Random observations, actions drawn by the policy, and episodes of different lengths."""
    rng = np.random.default_rng(1)
    obs, u = rng.normal(size=(m, T, 3)).astype(np.float32), rng.random((m, T, policy.noise), np.float32)
    action = jax.vmap(jax.vmap(lambda obs, u: policy.sample(params, obs, u)))(obs, u)
    mask = (np.arange(T) < np.asarray([6, 3, 1, 5])[:m, None]).astype(np.float32)
    return Trajectory(obs, action, rng.normal(size=(m, T)).astype(np.float32) * mask, mask)


def features(name, action):
    """An action as the numbers that the model sees, written out."""
    if name == "gaussian":
        return action
    if name == "softmax":
        return np.eye(3)[int(action)]
    return np.concatenate([np.eye(2)[int(action[0])], np.eye(3)[int(action[1])]])


@pytest.mark.parametrize("name", KINDS)
def test_the_inner_policy_sees_the_observation_and_then_the_context(name):
    policy = KINDS[name]
    params, obs = parameters(policy), np.asarray([0.3, -1.0, 2.0], np.float32)
    longer, inner = jnp.append(obs, params["context"]), policy.policy  # bits depend on where an array lies in memory
    u = jnp.full(policy.noise, 0.3)
    action = policy.sample(params, obs, u)
    np.testing.assert_array_equal(action, inner.sample(params["policy"], longer, u))
    assert policy.log_prob(params, obs, action) == inner.log_prob(params["policy"], longer, action)
    assert policy.entropy(params, obs) == inner.entropy(params["policy"], longer)
    same = jax.tree.map(np.array_equal, policy.distribution(params, obs), inner.distribution(params["policy"], longer))
    assert all(jax.tree.leaves(same))
    np.testing.assert_array_equal(policy.init(jax.random.key(3))["context"], np.zeros(2))


@pytest.mark.parametrize("name", KINDS)
def test_the_error_of_the_model_is_a_mean_over_the_decisions_of_all_episodes(name):
    """Decision by decision, in a loop; rewards and changes are in units of the scale, 0.5.

    The model sees each component of an observation in units of its root mean square over decisions.
    """
    policy = KINDS[name]
    params = parameters(policy)
    batch = batch_of(policy, params)
    rewards, changes = [], []
    unit = np.sqrt(np.mean(np.asarray(batch.obs)[np.asarray(batch.mask) == 1] ** 2, axis=0))
    for i in range(4):
        for t in range(int(batch.mask[i].sum())):
            inputs = [batch.obs[i, t] / unit, features(name, np.asarray(batch.action[i, t])), params["context"]]
            found = np.asarray(forward(params["model"], jnp.asarray(np.concatenate(inputs), jnp.float32)))
            rewards.append((found[0] - batch.reward[i, t] / 0.5) ** 2)
            if t + 1 < batch.mask[i].sum():
                change = (batch.obs[i, t + 1] - batch.obs[i, t]) / 0.5
                changes.append(np.mean((found[1:] - change) ** 2))
    assert (len(rewards), len(changes)) == (15, 11)
    assert policy.model_fit(params, batch, "reward") == pytest.approx(-np.mean(rewards), rel=1e-5)
    assert policy.model_fit(params, batch, "dynamics") == pytest.approx(-np.mean(changes), rel=1e-5)


def test_the_context_is_the_only_parameter_that_is_called_one():
    policy = KINDS["gaussian"]
    params = policy.init(jax.random.key(0))
    marked = policy.is_context(params)
    assert jax.tree.structure(marked) == jax.tree.structure(params)
    assert marked["context"] is True
    assert sum(jax.tree.leaves(marked)) == 1


def test_through_normalization_the_model_sees_normalized_observations():
    inner = KINDS["gaussian"]
    policy = Normalized(inner, size=3)
    params = parameters(policy)
    params["normalizer"]["observations"]["square"] = np.asarray([4.0, 5.0, 6.0], np.float32)
    batch = batch_of(policy, params)
    seen = batch._replace(obs=policy.seen(params, batch.obs))
    for target in ("reward", "dynamics"):
        assert policy.model_fit(params, batch, target) == inner.model_fit(params["policy"], seen, target)
    marked = policy.is_context(params)
    assert jax.tree.structure(marked) == jax.tree.structure(params)
    assert marked["policy"]["context"] is True
    assert sum(jax.tree.leaves(marked)) == 1


def test_a_fleet_says_which_kind_of_policy_it_takes():
    pendulum, arc = (
        context_mlp(pf.pendulum(agents=1, held_out=0), (8,)),
        context_mlp(pf.arc(2, 0), (8,), context_size=2),
    )
    assert (pendulum.policy.widths, pendulum.model_widths) == ((3 + 4, 8, 1), (3 + 1 + 4, 32, 1 + 3))
    assert (arc.policy.widths, arc.model_widths) == ((2 + 2, 8, 8), (2 + 8 + 2, 32, 1 + 2))
    gaussian = context_mlp(pf.pendulum(agents=1, held_out=0), initial_std=2.0, last_scale=0.0, least_std=0.3).policy
    assert (gaussian.initial_std, gaussian.last_scale, gaussian.least_std) == (2.0, 0.0, 0.3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"context_size": 0}, "context_size must be a whole number >= 1"),
        ({"context_size": -9}, "context_size must be a whole number >= 1"),
        ({"model_scale": 0.0}, "model_scale must be a finite number > 0"),
        ({"model_hidden": (0,)}, "an MLP needs at least two widths"),
    ],
)
def test_bad_settings_are_one_sentence(settings, said):
    with pytest.raises(pf.UserError, match=said):
        context_mlp(pf.arc(2, 0), **settings)


def test_numbered_states_are_rejected():
    with pytest.raises(pf.UserError, match="the policy 'context-mlp' needs observations that are vectors"):
        context_mlp(pf.gridworld(width=2))
