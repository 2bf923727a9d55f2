"""Softmax-FedPG: FedAvg-PG's local steps, on a return that includes entropy, with parameters that stay bounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import batch, enumerate_trajectories, law, random_mdp
from simulations import simulation_of

import perfedrl as pf
from perfedrl.algorithms import SoftmaxFedPG
from perfedrl.algorithms.softmax_fedpg import regularized_gradient, regularized_of_batch
from perfedrl.estimators import Sampled, forms
from perfedrl.exact.tabular import Exact
from perfedrl.theory.noiseless_limits import noiseless_limit

FLEET, POLICY = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)


def final(algorithm):
    simulation = simulation_of(FLEET, POLICY, [algorithm] * 2, [0, 1])
    return simulation.advance(simulation.start(), 0, 2).server.message


def test_without_entropy_and_bound_it_is_fedavg_pg_bit_for_bit():
    softmax, plain = SoftmaxFedPG(1.0, 0.5, local_steps=3, m=5), pf.FedAvgPG(1.0, 0.5, local_steps=3, m=5)
    one, other = final(softmax), final(plain)
    assert np.abs(one).max() > 0.01
    np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))
    assert softmax.trajectories_per_round == plain.trajectories_per_round


def test_in_bandits_the_regularized_optimum_is_the_softmax_of_the_mean_reward_over_lambda():
    """Max over pi of pi . r + lambda H(pi) is at pi proportional to exp(r / lambda), r the agents' mean."""
    rewards, weight = np.asarray([[1.0, 0.0, 0.3], [0.2, 0.8, 0.1]]), 0.4
    fleet, policy = pf.envs.bandits(rewards.tolist()), pf.TableSoftmax(1, 3)
    found = noiseless_limit(fleet, policy, SoftmaxFedPG(1.0, 1.0, local_steps=1, regularization=weight))
    optimum = np.exp(rewards.mean(axis=0) / weight)
    np.testing.assert_allclose(policy.probabilities(found.theta)[0], optimum / optimum.sum(), rtol=1e-6)


def test_the_estimate_is_unbiased_for_the_return_with_every_state_s_entropy__by_enumeration(x64):
    mdp = random_mdp(np.random.default_rng(4), (2, 2, 2), 0.8)
    policy, weight, theta = pf.TableSoftmax(2, 2), 0.7, jnp.asarray([[0.5, -0.2], [0.1, 0.9]])
    listed = enumerate_trajectories(mdp)
    decay = 0.8 ** np.arange(3)

    def value(theta):
        entropy = -jnp.sum(policy.probabilities(theta) * jax.nn.log_softmax(theta), axis=-1)
        return jnp.sum(law(policy, theta, listed) * ((listed.rewards + weight * entropy[listed.states]) @ decay))

    truth = jax.jit(jax.grad(value))(theta)
    assert np.abs(truth).max() > 0.05
    plain = forms(baseline="none")
    of_one = lambda one: regularized_of_batch(policy, plain, 0.8, theta, jax.tree.map(lambda x: x[None], one), weight)  # noqa: E731
    estimates = jax.jit(jax.vmap(of_one))(batch(listed))
    mean = np.tensordot(law(policy, theta, listed), estimates, 1)
    np.testing.assert_allclose(mean, truth, rtol=0, atol=1e-12)
    exact = jax.jit(lambda theta: regularized_gradient(Exact(policy)(mdp), theta, weight, jax.random.key(0), 1))
    np.testing.assert_allclose(exact(theta), truth, rtol=0, atol=1e-12)


def test_a_regularized_round_is_steps_along_the_estimate_from_the_keys_of_fedavg_pg():
    softmax = SoftmaxFedPG(1.0, 0.5, local_steps=2, m=4, regularization=0.3)
    agent, theta = Sampled(POLICY)(FLEET.task(0)), jax.random.normal(jax.random.key(1), (9, 4))
    came, _ = jax.jit(lambda theta: softmax.client(theta, (), agent, jax.random.key(0)))(theta)
    for keys in jax.random.split(jax.random.key(0), (2, 3)):
        theta = theta + 0.5 * regularized_gradient(agent, theta, 0.3, keys[2], 4)
    np.testing.assert_allclose(came, theta, rtol=0, atol=1e-6)


def test_the_server_keeps_every_parameter_within_the_bound():
    softmax = SoftmaxFedPG(1.0, 0.5, largest=1.5)
    server, _ = softmax.init(jnp.zeros((1, 3)))
    uploads = jnp.asarray([[[4.0, -9.0, 1.0]], [[0.0, -1.0, 1.0]]])
    np.testing.assert_allclose(softmax.server(server, uploads, jnp.ones(2)).message, [[1.5, -1.5, 1.0]])


def test_policies_that_are_no_softmax_table_are_refused_with_what_works_instead():
    fleet = pf.arc(2, 0)
    with pytest.raises(pf.UserError, match="fedavg-pg"):
        simulation_of(fleet, pf.GaussianMLP((2, 4, 2)), [SoftmaxFedPG(1.0, 0.5)], [0])
    SoftmaxFedPG(1.0, 0.5).check_supports(FLEET, POLICY)


@pytest.mark.parametrize("change", [{"regularization": -0.1}, {"largest": 0.0}, {"beta": 0.0}, {"m": 0}])
def test_bad_settings_are_refused(change):
    with pytest.raises(pf.UserError, match=next(iter(change))):
        SoftmaxFedPG(**{"alpha": 1.0, "beta": 0.5, **change})
