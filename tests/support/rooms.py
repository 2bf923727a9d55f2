"""Small Gymnasium environments whose every number is known, for the tests of the adapter."""

import os
import sys
import time

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
    """Counts its steps, which are its rewards; ends after `length` of them, or goes wrong at step `trouble`.

    It goes wrong in episodes that start below `below`, a share of them that their seeds determine; the others end after
    `short` steps, where that is given.
    """

    metadata = {"render_modes": []}  # noqa: RUF012
    made, closed = [], []
    scale = 2.0

    def __init__(
        self, length=4, action="discrete", seen="box", trouble=None, how="nan", below=1.0, short=None, render_mode=None
    ):
        self.length, self.trouble, self.how, self.below, self.short = length, trouble, how, below, short
        self.broken = False
        self.weight = 1.0
        self.heavy = 3 * self.weight
        self.action_space, self.observation_space = ACTIONS[action], SEEN[seen]
        self.actions = []
        Room.made.append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.start = 0, float(self.np_random.uniform())
        if self.trouble == 0 and self.start < self.below:
            raise ConnectionError("the door is locked")
        return self._see(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.actions.append(action)
        self.steps += 1
        reward = float(self.steps)
        if self.steps == self.trouble and self.start < self.below:
            if self.how == "raise":
                raise ZeroDivisionError("the floor gave way")
            if self.how == "exit":
                os._exit(3)
            if self.how == "sys.exit":
                sys.exit()
            if self.how == "hang":
                time.sleep(600)
            self.broken = self.how == "stays broken"
            reward = 1e39 if self.how == "huge" else np.nan
        over = self.steps == (self.short if self.short and self.start >= self.below else self.length)
        return self._see(), reward, over, False, {"noise": np.zeros(3)}

    def _see(self):
        if self.broken:
            return np.full(2, np.nan, np.float32)
        if isinstance(self.observation_space, spaces.Dict):
            return {"place": np.asarray([self.steps, self.start], np.float32), "door": self.steps % 3}
        if self.observation_space.dtype == np.uint8:
            return np.full((2, 2), self.steps, np.uint8)
        return np.asarray([self.steps, self.start], np.float32)

    def close(self):
        Room.closed.append(self)
        if self.how == "cannot close":
            raise OSError("the door is stuck")


class Logged(Room):
    """Writes a line to a file when it is closed."""

    def __init__(self, file, **more):
        super().__init__(**more)
        self.file = file

    def close(self):
        with open(self.file, "a") as lines:
            lines.write("closed\n")


UNNAMED = [lambda: Room()][0]


def drawn(length=3):
    """A factory that is a function, not a class."""
    return Room(length)


def leaving():
    """A factory that ends its process, as drivers of robots do."""
    sys.exit(3)


def far(episode):
    return {"far": episode.obs[0, 1]}


def blueprint():
    """A function that makes no environment."""
    return {"walls": 4}
