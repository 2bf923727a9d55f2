"""Advantages: generalized ones by hand, and by enumeration which of them leave the policy gradient unbiased."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import batch, enumerate_trajectories, law, random_mdp

import perfedrl as pf
from perfedrl import exact
from perfedrl.compilation import jit
from perfedrl.estimators import ADVANTAGES, BASELINES, UNBIASED, Sampled, policy_gradient
from perfedrl.estimators.advantages import GAE, STRENGTH, fitted, normalized, sums_to_go
from perfedrl.experiments.config import make_config
from perfedrl.policies import TableSoftmax
from perfedrl.policies.mlp import GaussianMLP
from perfedrl.types import Trajectory

FAIR = GAE(gae_lambda=1.0, critic="others", normalize=False, discounted=True)
"""Generalized advantages that are unbiased: reward-to-go minus a value that the trajectory itself did not influence."""

BIASED = {
    "gae_lambda below 1 trusts the critic": {"gae_lambda": 0.5},
    "the critic saw the batch that it judges": {"critic": "ridge"},
    "advantages are normalized": {"normalize": True},
    "decisions are not discounted from the start": {"discounted": False},
}


def mean_gradient(form):
    """The mean of the policy gradient over all pairs of trajectories of a small MDP, and the exact gradient."""
    rng = np.random.default_rng(0)
    mdp, policy = random_mdp(rng, (2, 2, 1), 0.6), TableSoftmax(2, 2)
    theta, t = rng.normal(size=(2, 2)), enumerate_trajectories(mdp)
    i, j = np.divmod(np.arange(len(t.states) ** 2), len(t.states))

    def estimate(pair):
        credited = form(BASELINES["leave-one-out"](), policy, theta, pair, mdp.discount)
        return policy_gradient(policy.log_prob, theta, pair, credited.advantage)

    with jax.enable_x64(True):
        q = law(policy, theta, t)
        pairs = jax.tree.map(lambda x: jnp.stack([x[i], x[j]], axis=1), batch(t))
        made = jit(lambda b: jax.vmap(estimate)(b))(pairs)
        return np.asarray(jnp.einsum("x,x...->...", jnp.outer(q, q).ravel(), made)), exact.gradient(mdp, theta)


@pytest.mark.parametrize("form", [ADVANTAGES["reward-to-go"](), FAIR], ids=["reward-to-go", "gae"])
def test_the_policy_gradient_is_unbiased_with_forms_that_say_so__eq_2(form):
    assert form.bias == UNBIASED
    np.testing.assert_allclose(*mean_gradient(form), rtol=0, atol=1e-10)


@pytest.mark.parametrize("cause", BIASED)
def test_every_cause_of_a_bias_is_stated_and_is_one(cause):
    form = dataclasses.replace(FAIR, **BIASED[cause])
    assert form.bias == cause
    mean, true = mean_gradient(form)
    assert np.abs(mean - true).max() > 1e-3


def some_batch(m=3, T=5):
    """Episodes of vectors, of which the second ends early."""
    rng = np.random.default_rng(1)
    mask = np.ones((m, T))
    mask[1, 3:] = 0
    return Trajectory(rng.normal(size=(m, T, 2)), rng.normal(size=(m, T, 1)), rng.normal(size=(m, T)) * mask, mask)


def summed(x, factor):
    """The sums of x_t + factor x_{t+1} + ... of every row, term by term."""
    T = x.shape[1]
    return np.array([[sum(factor**k * row[t + k] for k in range(T - t)) for t in range(T)] for row in x])


def test_generalized_advantages_by_hand():
    """Sums of temporal differences with a critic that is the ridge regression of the returns, solved by NumPy."""
    with jax.enable_x64(True):
        b, policy, gamma, weight = some_batch(), GaussianMLP((2, 1)), 0.9, 0.8
        form = GAE(gae_lambda=weight, normalize=False)
        found = np.asarray(form(BASELINES["none"](), policy, policy.init(jax.random.key(0)), b, gamma).advantage)
        m, T = b.reward.shape
        returns = np.array(
            [[sum(gamma**k * b.reward[i, t + k] for k in range(T - t)) for t in range(T)] for i in range(m)]
        )
        x, y = b.obs[..., 0], b.obs[..., 1]
        phi = np.stack([np.ones((m, T)), x, y, x * x, x * y, y * y], axis=-1)
        left = (1 - np.arange(T) / T)[:, None]
        scale = np.array([sum(gamma**k for k in range(T - t)) for t in range(T)]) * b.mask
        phi = np.concatenate([phi, phi * left], axis=-1) * scale[..., None]
        z = (phi / np.sqrt((phi**2).mean(axis=(0, 1)))).reshape(m * T, -1)
        w = np.linalg.solve(z.T @ z / len(z) + STRENGTH * np.eye(z.shape[1]), z.T @ returns.ravel() / len(z))
        V = (z @ w).reshape(m, T) * b.mask
        following = np.concatenate([V[:, 1:], np.zeros((m, 1))], axis=1)
        delta = (b.reward + gamma * following - V) * b.mask
        expected = [
            [sum((gamma * weight) ** k * delta[i, t + k] for k in range(T - t)) for t in range(T)] for i in range(m)
        ]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


def test_normalized_advantages_have_mean_0_and_variance_1_over_decisions_per_mean_length():
    b = some_batch()
    found = np.asarray(normalized(jnp.asarray(b.reward), jnp.asarray(b.mask)))
    alive = found[b.mask == 1] * b.mask.sum() / len(b.mask)
    assert (alive.mean(), alive.std()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-6))
    assert not found[b.mask == 0].any()
    assert not np.asarray(normalized(jnp.ones((2, 3)), jnp.ones((2, 3)))).any(), "equal advantages are no nan"


def test_sums_to_go_do_not_underflow():
    """Dividing sums from the start by their discount would: 0.5 ** 300 is 0 in single precision."""
    np.testing.assert_allclose(sums_to_go(jnp.ones((1, 300)), 0.5)[0, -3:], [1.75, 1.5, 1.0])


def test_a_fit_predicts_what_is_linear_in_the_features():
    rng = np.random.default_rng(2)
    phi = rng.normal(size=(20, 4, 6)) * 10.0 ** np.arange(-3, 3)
    with jax.enable_x64(True):
        np.testing.assert_allclose(fitted(phi, phi @ np.arange(6.0)), phi @ np.arange(6.0), rtol=1e-2, atol=1e-2)


def test_advantages_in_variances_are_multiples_of_the_policys_variance():
    b, policy = some_batch(), GaussianMLP((2, 1), initial_std=0.5)
    params = policy.init(jax.random.key(0))
    plain, scaled = (
        GAE(times_variance=x)(BASELINES["none"](), policy, params, b, 0.9).advantage for x in (False, True)
    )
    np.testing.assert_allclose(scaled, 0.25 * plain, rtol=1e-6)


def test_a_value_network_is_a_critic():
    """With its values in the unit of rewards and lambda = 0, an advantage is one temporal difference."""
    fleet = pf.pendulum(agents=1, held_out=0, horizon=3)
    policy = pf.policies.actor_critic(fleet)
    params = policy.init(jax.random.key(0))
    b = Sampled(policy)(fleet.task(0)).sampler.sample(params, jax.random.key(1), 2)
    found = GAE(0.0, "network", normalize=False)(BASELINES["none"](), policy, params, b, 0.5).advantage
    V = np.asarray(policy.values(params, b)) * np.array([1.875, 1.75, 1.5, 1.0])
    np.testing.assert_allclose(found, b.reward + 0.5 * np.append(V[:, 1:], np.zeros((2, 1)), axis=1) - V, rtol=1e-4)


def config(**advantage):
    table = {"env": "gridworld", "width": 3, "horizon": 5}
    algorithm = {"name": "fedavg-pg", "alpha": 1.0, "beta": 0.3}
    parts = {
        "fleet": table,
        "policy": {"name": "table"},
        "algorithm": algorithm,
        "advantage": {"name": "gae", **advantage},
    }
    return make_config({"name": "tried", "seeds": 1, "rounds": 1, **parts})


@pytest.mark.parametrize(
    ("advantage", "said"),
    [
        ({"gae_lambda": 1.5}, "gae_lambda must lie in"),
        ({"critic": "none"}, "the critic of gae must be one of ridge, others, network"),
        ({"critic": "network"}, "needs a policy with a value network"),
        ({"times_variance": True}, "times_variance needs a Gaussian policy, and TableSoftmax is none"),
        ({"name": "gea"}, "did you mean 'gae'"),
    ],
)
def test_bad_advantages_are_one_sentence_before_compiling(advantage, said, untyped):
    with pytest.raises(pf.UserError, match=said):
        _ = config(**advantage).experiment


def test_biased_advantages_are_measured_by_episodes_unless_steps_are_sampled():
    assert type(config().experiment.evaluation).__name__ == "MonteCarlo"
    with pytest.raises(pf.UserError, match="exact steps follow the gradient of the return"):
        make_config({**config().table, "evaluation": {"name": "exact"}}).experiment.fleet.close()
    fair = config(gae_lambda=1.0, critic="others", normalize=False, discounted=True)
    assert type(fair.experiment.evaluation).__name__ == "DynamicProgramming"
