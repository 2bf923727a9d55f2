"""Environments for agents: a sampler in plain Python, episode by episode, as for a robot, and invalid ones."""

import time
from pathlib import Path

import jax
import numpy as np

from perfedrl.envs import gridworld
from perfedrl.policies import TableSoftmax
from perfedrl.rollout import PythonSampler
from perfedrl.types import Trajectory


class Robot(PythonSampler):
    """Walks a small grid by a table of preferences, one decision at a time."""

    discount = 0.9

    def __init__(self, policy, pause, spoilt, calls):
        self.task, self.pause, self.spoilt, self.calls = gridworld(width=3).task(1), pause, spoilt, calls
        self.next, self.start = self.task.P.argmax(-1), np.flatnonzero(self.task.mu)

    def sample(self, params, key, m):
        if self.calls:
            with open(self.calls, "a") as file:
                file.write(f"{m}\n")
        time.sleep(self.pause)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        episodes = [self.play(np.asarray(params, float), rng) for _ in range(m)]
        obs, action, reward = (np.asarray(x) for x in zip(*episodes, strict=True))
        if self.spoilt:
            reward = reward * np.nan if self.spoilt == "nan" else reward[:, :-1]
        return Trajectory(obs, action, reward, np.ones(reward.shape))

    def play(self, theta, rng):
        states, actions, rewards = [], [], []
        state = rng.choice(self.start)
        for _ in range(self.task.horizon + 1):
            p = np.exp(theta[state] - theta[state].max())
            action = rng.choice(len(p), p=p / p.sum())
            states.append(state)
            actions.append(action)
            rewards.append(self.task.r[state, action])
            state = self.next[state, action]
        return states, actions, rewards


def robot(policy, pause: float = 0.0, spoilt: str = "", calls: str = ""):
    assert isinstance(policy, TableSoftmax)
    return Robot(policy, pause, spoilt, calls)


def sampler_that_is_none(policy):
    return object()


def nothing():
    return 3


def single_task():
    return gridworld(width=3).task(1)


def imported():
    """Create a file, so that a test can check whether this was called."""
    Path("imported").touch()
    raise AssertionError
