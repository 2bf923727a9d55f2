"""Gymnasium environments with one fault each, for the tests of `check_env`."""

import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Sound(gym.Env):
    """Walks on a line, away from 0; nothing is wrong with it."""

    observation_space = spaces.Box(-50, 50, (2,), np.float32)
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, size=1.0, render_mode=None):
        self.size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.steps = self.np_random.normal(), 0
        return self.see(), {}

    def step(self, action):
        self.x = 0.9 * self.x + float(np.ravel(action)[0] > 0) + self.np_random.normal()
        self.steps += 1
        return self.see(), self.reward(), self.steps == 5, False, {}

    def see(self):
        return np.clip(np.array([self.x, 1.0], np.float32), -50, 50)

    def reward(self):
        return self.size * float(abs(self.x))


class WithoutActions(gym.Env):
    """Declares no space of actions."""

    observation_space = Sound.observation_space


class DoubleInDict(Sound):
    """Returns doubles where singles are declared, which are converted."""

    observation_space = spaces.Dict({"x": Sound.observation_space})

    def see(self):
        return {"x": super().see().astype(float)}


class FourValues(Sound):
    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, info


class NoInfo(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class NoSeed(Sound):
    def reset(self):
        return super().reset()


class ArrayReward(Sound):
    def reward(self):
        return np.array([1.0])


class TextReward(Sound):
    def reward(self):
        return "much"


class WrongShape(Sound):
    def see(self):
        return np.zeros(3, np.float32)


class WrongType(Sound):
    observation_space = spaces.Box(0, 255, (2,), np.uint8)


class NoArray(Sound):
    def see(self):
        return [0.0, 1.0]


class WrongKeys(Sound):
    observation_space = spaces.Dict({"x": spaces.Box(-50, 50, (2,), np.float32)})

    def see(self):
        return {"y": np.zeros(2, np.float32)}


class NoFlag(Sound):
    def step(self, action):
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, None, truncated, info


class NanReward(Sound):
    def reward(self):
        return float("nan")


class InfiniteObservation(Sound):
    def see(self):
        return np.array([np.inf, 1.0], np.float32)


class Raises(Sound):
    def step(self, action):
        raise OSError("no answer")


class Exits(Sound):
    def step(self, action):
        raise SystemExit(3)


class Sensor(Sound):
    """Reads two numbers from a line, which has another number of them."""

    def __init__(self, line, render_mode=None):
        super().__init__()
        self.line = line

    def step(self, action):
        x, y = self.line.split(",")
        raise AssertionError((x, y))


class Single(Sound):
    """Owns a port that only one can open at a time."""

    owner = None

    def __init__(self, size=1.0, render_mode=None):
        super().__init__(size)
        if Single.owner is not None:
            raise OSError("the port is taken")
        Single.owner = self

    def close(self):
        Single.owner = None


class SeveralLines(Sound):
    def step(self, action):
        raise OSError("no answer\nfrom the robot")


class RaisesSometimes(Sound):
    def step(self, action):
        if self.np_random.random() < 0.08:
            raise OSError("no answer")
        return super().step(action)


class OutOfBounds(Sound):
    observation_space = spaces.Box(-1e-3, 1e-3, (2,), np.float32)


class Unbounded(Sound):
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)


class Wide(Sound):
    action_space = spaces.Box(0, 45, (1,), np.float32)


class Endless(Sound):
    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, False, info


class LargeObservation(Sound):
    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)

    def see(self):
        return np.array([5e4, 1.0], np.float32)


class Unseeded(Sound):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.steps = float(np.random.default_rng(time.perf_counter_ns()).normal()), 0
        return self.see(), {}


class Remembers(Sound):
    """Starts where the last episode ended."""

    last = 0.0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.last = self.last, self.last + 1.0
        return self.see(), {}


class NoEnvironment:
    """Knows nothing of Gymnasium."""
