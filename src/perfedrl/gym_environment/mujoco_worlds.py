"""MuJoCo environments of Gymnasium with an agent's own reward or its own body.

Each function makes one environment; it is called once for every parallel episode, possibly in a worker process.
Physics, observations and the definition of a fall are Gymnasium's (v5); the constants of rewards are those of the
papers, see docs/locomotion.md.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from perfedrl.errors import UserError
from perfedrl.gym_environment.recipe import gymnasium

CONTROL = {"cheetah": 0.05, "ant-goal": 0.1}
"""Cost of squared actions, where it is not Gymnasium's 0.5 (ants) or 0.001 (hoppers and walkers)."""

CHEETAH_POSITIONS = 8
"""Number of positions in a cheetah's observation; the forward velocity follows."""

BODIES = {"half-cheetah": "HalfCheetah-v5", "ant": "Ant-v5", "hopper": "Hopper-v5", "walker": "Walker2d-v5"}
"""Gymnasium's environments, by body."""

BODY = ("body_mass", "body_inertia", "dof_damping", "geom_friction")
"""The parts of a body's model that may be multiplied."""

Reward = Callable[[Mapping[str, Any]], float]
"""The reward of a step as a function of Gymnasium's info."""


class Factors(tuple[float, ...]):
    """Factors for the numbers of a model, one each; as a string only their range."""

    def __str__(self) -> str:
        return f"x {min(self):.2g} to {max(self):.2g}"


def mujoco() -> Any:
    """Import the simulator, an optional dependency."""
    try:
        return importlib.import_module("mujoco")
    except ImportError as error:
        raise UserError("locomotion needs MuJoCo, an extra: pip install 'perfedrl[mujoco]'") from error


def make(name: str, reward: Reward | None = None, **arguments: Any) -> Any:
    """Make an environment without a time limit, with its own reward or another one."""
    with silent(mujoco()):
        env = gymnasium().make(name, disable_env_checker=True, **arguments).unwrapped
    return env if reward is None else with_reward(env, reward)


def with_reward(env: Any, reward: Reward) -> Any:
    """Wrap an environment to replace its reward."""
    gym = gymnasium()

    class Rewarded(gym.Wrapper):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            obs, _, terminated, truncated, info = self.env.step(action)
            return obs, reward(info), terminated, truncated, info

    return Rewarded(env)


@contextmanager
def silent(simulator: Any) -> Iterator[None]:
    """Silence the simulator's warnings about Gymnasium's models, on the terminal and in its log file."""
    simulator.set_mju_user_warning(lambda _: None)
    try:
        yield
    finally:
        simulator.set_mju_user_warning(None)


def with_velocity_scale(env: Any, velocity_scale: float, positions: int) -> Any:
    """Wrap an environment to scale the observed velocities, which follow `positions` positions."""
    gym = gymnasium()

    class Seen(gym.ObservationWrapper):
        def observation(self, observation: Any) -> Any:
            return factors * observation

    if velocity_scale == 1:
        return env
    factors = np.ones(env.observation_space.shape)
    factors[positions:] = velocity_scale
    return Seen(env)


def half_cheetah_direction(direction: float, frame_skip: int = 5, velocity_scale: float = 1.0) -> Any:
    """Run forward (1) or backward (-1): direction * v - 0.05 |a|^2."""
    cost = CONTROL["cheetah"]
    env = make(BODIES["half-cheetah"], forward_reward_weight=direction, ctrl_cost_weight=cost, frame_skip=frame_skip)
    return with_velocity_scale(env, velocity_scale, CHEETAH_POSITIONS)


def half_cheetah_velocity(velocity: float, frame_skip: int = 5, velocity_scale: float = 1.0) -> Any:
    """Run at a velocity: -|v - velocity| - 0.05 |a|^2."""

    def reward(info: Mapping[str, Any]) -> float:
        return info["reward_ctrl"] - abs(info["x_velocity"] - velocity)

    env = make(BODIES["half-cheetah"], reward, ctrl_cost_weight=CONTROL["cheetah"], frame_skip=frame_skip)
    return with_velocity_scale(env, velocity_scale, CHEETAH_POSITIONS)


def ant_direction(angle: float) -> Any:
    """Walk along an angle: the velocity that way + 1 for not having fallen - 0.5 |a|^2 - 0.0005 |contact forces|^2."""
    along = np.cos(angle), np.sin(angle)

    def reward(info: Mapping[str, Any]) -> float:
        rest = info["reward_survive"] + info["reward_ctrl"] + info["reward_contact"]
        return along[0] * info["x_velocity"] + along[1] * info["y_velocity"] + rest

    return make(BODIES["ant"], reward)


def ant_to_goal(goal: tuple[float, float]) -> Any:
    """Walk to a goal: -|x - goal|_1 - 0.1 |a|^2 - 0.0005 |contact forces|^2; falls do not end it, and x is observed."""

    def reward(info: Mapping[str, Any]) -> float:
        away = abs(info["x_position"] - goal[0]) + abs(info["y_position"] - goal[1])
        return info["reward_ctrl"] + info["reward_contact"] - away

    cost = CONTROL["ant-goal"]
    return make(
        BODIES["ant"],
        reward,
        ctrl_cost_weight=cost,
        terminate_when_unhealthy=False,
        exclude_current_positions_from_observation=False,
    )


def hopper(**factors: Any) -> Any:
    """Make a hopper with parts of its model multiplied."""
    return with_factors(make(BODIES["hopper"]), factors)


def walker(**factors: Any) -> Any:
    """Make a walker with parts of its model multiplied."""
    return with_factors(make(BODIES["walker"]), factors)


def with_factors(env: Any, factors: Mapping[str, Any]) -> Any:
    """Multiply parts of an environment's model, and update the constants that MuJoCo derives from them."""
    for name, factor in factors.items():
        part = getattr(env.model, name)
        part[:] = part * np.reshape(factor, part.shape)
    mujoco().mj_setConst(env.model, env.data)
    return env
