"""Episodes: deterministic in their uniforms, of the right law, with ends honoured."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from enumeration import enumerate_trajectories, law

import perfedrl as pf
from perfedrl.envs import Task
from perfedrl.rollout import RolloutSampler, episode, noise_size


def test_an_episode_by_hand():
    """Two states, two actions: action 0 stays, action 1 switches; the reward is the state's number."""
    P = np.asarray([[[1, 0], [0, 1]], [[0, 1], [1, 0]]], dtype=float)
    mdp = pf.TabularMDP(P, [[0, 0], [1, 1]], [0.5, 0.5], horizon=3, discount=0.5)
    policy = pf.TableSoftmax(2, 2)
    assert noise_size(policy, mdp) == 1 + 4
    played = episode(policy, jnp.zeros((2, 2)), mdp, jnp.asarray([0.4, 0.6, 0.2, 0.9, 0.1]))
    assert played.obs.tolist() == [0, 1, 1, 0]
    assert played.action.tolist() == [1, 0, 1, 0]
    assert played.reward.tolist() == [0, 1, 1, 0], "the reward is that of the state before the move"
    assert played.mask.tolist() == [1, 1, 1, 1]


def test_sampled_trajectories_follow_their_law__eq_1():
    """Chi-square against enumerated probabilities; a correct sampler fails one time in 10^4, and the seed is fixed."""
    from scipy import stats

    mdp = pf.envs.random_mdps(agents=1, states=2, actions=2, horizon=1, seed=4).task(0)
    policy, theta, m = pf.TableSoftmax(2, 2), jnp.asarray([[0.5, -0.5], [0.0, 1.0]]), 20_000
    sampled = RolloutSampler(mdp, policy).sample(theta, jax.random.key(0), m)
    t = enumerate_trajectories(mdp)
    code = lambda s, a: (np.asarray(s) * 2 + np.asarray(a)) @ [4, 1]  # noqa: E731
    counts = np.bincount(code(sampled.obs, sampled.action), minlength=16)
    expected = np.zeros(16)
    expected[code(t.states, t.actions)] = m * np.asarray(law(policy, theta, t))
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 1e-4


def test_a_batch_does_not_depend_on_its_size():
    fleet = pf.gridworld()
    sampler = RolloutSampler(fleet.task(0), pf.TableSoftmax(25, 4))
    key, theta = jax.random.key(3), jnp.zeros((25, 4))
    small, large = sampler.sample(theta, key, 3), sampler.sample(theta, key, 8)
    np.testing.assert_array_equal(small.obs, large.obs[:3])


class Countdown(Task):
    """Ends after three steps, each with reward 1."""

    horizon: int = eqx.field(static=True, default=5)
    discount: float = eqx.field(static=True, default=0.9)
    reset_noise = 0
    step_noise = 0

    def reset(self, u):
        return jnp.asarray(0)

    def observe(self, state):
        return state * 0

    def step(self, state, action, u):
        return state + 1, jnp.asarray(1.0), state >= 2


def test_rewards_after_the_end_are_zero_and_masked():
    played = episode(pf.TableSoftmax(1, 2), jnp.zeros((1, 2)), Countdown(), jnp.full(6, 0.3))
    assert played.mask.tolist() == [1, 1, 1, 0, 0, 0]
    assert played.reward.tolist() == [1, 1, 1, 0, 0, 0]
