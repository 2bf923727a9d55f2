"""Small Gymnasium environments whose every number is known, for the tests of the adapter."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

ACTIONS = {
    "discrete": spaces.Discrete(3, start=-1),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(2),
    "box": spaces.Box(-0.5, 0.5, (2, 1)),
    "text": spaces.Text(3),
}
SEEN = {
    "box": spaces.Box(-10, 10, (2,)),
    "image": spaces.Box(0, 255, (2, 2), np.uint8),
    "dict": spaces.Dict({"place": spaces.Box(-10, 10, (2,)), "door": spaces.Discrete(3)}),
    "sequence": spaces.Sequence(spaces.Discrete(2)),
}


class Room(gym.Env):
    """Counts its steps, which are its rewards; ends after `length` of them, or goes wrong at step `trouble`."""

    metadata = {"render_modes": []}  # noqa: RUF012
    made, closed = [], []
    scale = 2.0

    def __init__(self, length=4, action="discrete", seen="box", trouble=None, how="nan", render_mode=None):
        self.length, self.trouble, self.how = length, trouble, how
        self.weight = 1.0
        self.heavy = 3 * self.weight
        self.action_space, self.observation_space = ACTIONS[action], SEEN[seen]
        self.actions = []
        Room.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.start = 0, float(self.np_random.uniform())
        return self._see(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.actions.append(action)
        self.steps += 1
        reward = float(self.steps)
        if self.steps == self.trouble:
            if self.how == "raise":
                raise ZeroDivisionError("the floor gave way")
            reward = np.nan
        return self._see(), reward, self.steps == self.length, False, {"noise": np.zeros(3)}

    def _see(self):
        if isinstance(self.observation_space, spaces.Dict):
            return {"place": np.asarray([self.steps, self.start], np.float32), "door": self.steps % 3}
        if self.observation_space.dtype == np.uint8:
            return np.full((2, 2), self.steps, np.uint8)
        return np.asarray([self.steps, self.start], np.float32)

    def close(self):
        Room.closed.append(self)


def drawn(length=3):
    """A factory that is a function, not a class."""
    return Room(length)


def far(episode):
    return {"far": episode.obs[0, 1]}
