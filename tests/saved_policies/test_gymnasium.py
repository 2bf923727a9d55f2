"""Saved policies in a loop of Gymnasium's own: they see its observations and act in its units, as in training."""

import gymnasium as gym
import jax
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.experiments.files import named_leaves
from perfedrl.gym_environment.open_environment import flattened
from perfedrl.policies import gaussian_mlp, mlp
from perfedrl.saved_policies.file import SavedPolicy


class Oven(gym.Env):
    """Observations are a dictionary; actions are a temperature in [100, 250], or one of three trays from 1 on."""

    observation_space = gym.spaces.Dict(
        {"tray": gym.spaces.Discrete(3), "heat": gym.spaces.Box(-np.inf, np.inf, (2, 2), np.float32)}
    )

    def __init__(self, trays=False):
        box = gym.spaces.Box(np.float32([100.0]), np.float32([250.0]))
        self.action_space = gym.spaces.Discrete(3, start=1) if trays else box

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._see(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self._see(), 0.0, False, False, {}

    def _see(self):
        return {"tray": int(self.np_random.integers(3)), "heat": self.np_random.normal(size=(2, 2)).astype(np.float32)}


@pytest.mark.parametrize("trays", [False, True])
@pytest.mark.parametrize("scale", [False, True])
def test_a_saved_policy_acts_as_the_fleet_does_in_training(trays, scale):
    fleet = pf.gymnasium_fleet(Oven, agents=1, horizon=3, options={"trays": trays}, scale_actions=scale)
    task, policy = fleet.task(0), (mlp if trays else gaussian_mlp)(fleet, [4])
    params = jax.tree.map(np.asarray, policy.init(jax.random.key(0)))
    saved = SavedPolicy(policy.description, named_leaves(params), task.environment_spaces)
    env, rng, same = Oven(trays), np.random.default_rng(0), np.random.default_rng(0)
    flat, (obs, _) = flattened(env), env.reset(seed=3)
    for _ in range(10):
        action = saved.act(obs, rng=rng)
        vector = np.asarray(flat.observation(obs), np.float32)[None]
        expected = task.to_actions(policy.in_numpy(params)(vector, same.random((1, policy.noise), np.float32)))[0]
        np.testing.assert_array_equal(action, expected)
        obs, *_ = env.step(action)
        env.step(saved.act(obs, deterministic=True))
    if not trays:
        assert (action == 100.0) != scale, "an unscaled action near 0 is clipped to the box"
    with pytest.raises(pf.UserError, match="the observation does not fit"):
        saved.act({"tray": 7, "heat": np.zeros((2, 2))})
    for wrong, got in ((np.zeros(7), "got ndarray"), ({"tray": 1}, "got the keys \\['tray'\\]")):
        with pytest.raises(pf.UserError, match=f"expected a dictionary with the keys .*, {got}"):
            saved.act(wrong)
