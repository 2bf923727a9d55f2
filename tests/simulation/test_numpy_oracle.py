"""Tabular policies: the simulator equals an independent NumPy implementation with the same uniforms, up to rounding."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from simulations import simulation_of
from tiers import some_slow

import perfedrl as pf
from perfedrl.envs import unstack
from perfedrl.estimators import PAPER, Sampled, StepKeys
from perfedrl.rollout import noise_size
from perfedrl.simulation.keys import agent_key

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import numpy_peer

FLEETS = {
    "gridworld": pf.gridworld(width=3, horizon=6),
    "random": pf.envs.random_mdps(agents=3, states=4, actions=3, horizon=5),
}
ALGORITHMS = {
    "exact": pf.PerFedAvgPG(1.5, 0.3, local_steps=3, m_in=4, m_h=4, m_out=4),
    "first-order": pf.PerFedAvgPG(1.5, 0.3, local_steps=3, m_in=4, m_h=4, m_out=4, variant="first-order"),
    "fedavg-pg": pf.FedAvgPG(1.5, 0.3, local_steps=3, m=12),
}


@pytest.mark.parametrize("variant", ALGORITHMS)
@pytest.mark.parametrize("name", some_slow(FLEETS, list(FLEETS)[:1]))
def test_simulator_equals_numpy_given_the_same_uniforms(name, variant, x64):
    fleet, algorithm, seed = FLEETS[name], ALGORITHMS[variant], 5
    mdps = unstack(fleet.train)
    policy = pf.TableSoftmax(mdps[0].states, mdps[0].actions)

    def uniforms(k, i, t, batch, m):
        """The library's draws: from the key of agent, round, local step and batch, in the layout of an episode."""
        keys = jax.random.split(jax.random.fold_in(agent_key(seed, i), k), (algorithm.local_steps, 3))
        key = getattr(StepKeys(*keys[t]), batch)
        drawn = np.asarray(jax.random.uniform(key, (m, noise_size(policy, mdps[i]))))
        u = np.zeros((m, mdps[i].horizon + 1, 3))
        u[:, 0, 0] = drawn[:, 0]
        steps = drawn[:, 1:].reshape(m, mdps[i].horizon + 1, -1)
        u[..., 1 : 1 + steps.shape[-1]] = steps
        return u

    agents = [numpy_peer.mdp(m.P, m.r, m.mu, m.horizon, m.discount) for m in mdps]
    expected = numpy_peer.train(agents, variant, uniforms, alpha=1.5, beta=0.3, rounds=2, local_steps=3, m=4)
    simulation = simulation_of(fleet, policy, [algorithm], [seed], Sampled(policy, **PAPER))
    theta = simulation.advance(simulation.start(), 0, 2).server.message[0]
    assert np.abs(theta).max() > 0.01
    np.testing.assert_allclose(theta, expected, rtol=0, atol=1e-12)


class NumpySampler:
    """A sampler in Python, such as one for a simulator or a robot that JAX cannot trace."""

    traceable = False

    def __init__(self, mdp):
        self.mdp, self.agent = mdp, numpy_peer.mdp(mdp.P, mdp.r, mdp.mu, mdp.horizon, mdp.discount)

    def sample(self, params, key, m):
        u = np.asarray(jax.random.uniform(key, (m, noise_size(pf.TableSoftmax(9, 4), self.mdp))))
        full = np.zeros((m, self.mdp.horizon + 1, 3))
        full[:, 0, 0], full[..., 1] = u[:, 0], u[:, 1:]
        states, actions, _ = numpy_peer.rollout(numpy_peer.softmax(np.asarray(params)), self.agent, full)
        rewards = self.mdp.r[states, actions].T
        return pf.estimators.Trajectory(states.T, actions.T, rewards, np.ones(rewards.shape))


@pytest.mark.parametrize("variant", ALGORITHMS)
def test_an_algorithm_gives_the_same_result_with_a_python_sampler(variant, x64):
    fleet, algorithm, policy = FLEETS["gridworld"], ALGORITHMS[variant], pf.TableSoftmax(9, 4)
    traced = pf.estimators.Sampled(policy)(fleet.task(0))
    plain = pf.estimators.PolicyObjective(NumpySampler(fleet.task(0)), policy, fleet.train.discount)
    theta, key = np.random.default_rng(0).normal(size=(9, 4)), jax.random.key(7)
    expected, _ = algorithm.client(theta, (), traced, key)
    came, _ = algorithm.client(theta, (), plain, key)
    np.testing.assert_allclose(came, expected, rtol=0, atol=1e-12)
