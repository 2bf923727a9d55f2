"""One agent's world: a MuJoCo environment of Gymnasium with the agent's own reward or its own body.

Each function makes an environment, as often as there are episodes side by side, also in a process of its own. Physics,
observations and what a fall is are Gymnasium's (v5); the constants of rewards are the papers', see docs/locomotion.md.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from perfedrl.envs.gym.making import gymnasium
from perfedrl.errors import UserError

CONTROL = {"cheetah": 0.05, "ant-goal": 0.1}
"""What a unit of squared action costs, where it is not Gymnasium's 0.5 (ants) or 0.001 (hoppers and walkers)."""

CHEETAH_POSITIONS = 8
"""Of an observation; the forward velocity comes next."""

BODY = ("body_mass", "body_inertia", "dof_damping", "geom_friction")
"""Of a body's model: what may be multiplied."""

Reward = Callable[[Mapping[str, Any]], float]
"""A decision's reward, from what Gymnasium says of the step."""


def mujoco() -> Any:
    """The simulator, where it is installed."""
    try:
        return importlib.import_module("mujoco")
    except ImportError as error:
        raise UserError("locomotion needs MuJoCo, an extra: pip install 'perfedrl[mujoco]'") from error


def made(name: str, reward: Reward | None = None, **arguments: Any) -> Any:
    """A bare environment, of no length of its own, with its own reward or another one."""
    with silent(mujoco()):
        env = gymnasium().make(name, disable_env_checker=True, **arguments).unwrapped
    return env if reward is None else rewarded(env, reward)


def rewarded(env: Any, reward: Reward) -> Any:
    """The environment, paid otherwise."""
    gym = gymnasium()

    class Rewarded(gym.Wrapper):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            obs, _, terminated, truncated, info = self.env.step(action)
            return obs, reward(info), terminated, truncated, info

    return Rewarded(env)


@contextmanager
def silent(simulator: Any) -> Iterator[None]:
    """Without what the simulator says of Gymnasium's models: a line for every one, to the terminal and into a file."""
    simulator.set_mju_user_warning(lambda _: None)
    try:
        yield
    finally:
        simulator.set_mju_user_warning(None)


def seen(env: Any, velocity_scale: float, positions: int) -> Any:
    """The environment with velocities in another unit, where they follow `positions` positions."""
    gym = gymnasium()

    class Seen(gym.ObservationWrapper):
        def observation(self, observation: Any) -> Any:
            return np.r_[observation[:positions], velocity_scale * observation[positions:]]

    return env if velocity_scale == 1 else Seen(env)


def half_cheetah_direction(direction: float, frame_skip: int = 5, velocity_scale: float = 1.0) -> Any:
    """Run forward (1) or backward (-1): direction * v - 0.05 |a|^2."""
    cost = CONTROL["cheetah"]
    env = made("HalfCheetah-v5", forward_reward_weight=direction, ctrl_cost_weight=cost, frame_skip=frame_skip)
    return seen(env, velocity_scale, CHEETAH_POSITIONS)


def half_cheetah_velocity(velocity: float, frame_skip: int = 5, velocity_scale: float = 1.0) -> Any:
    """Run at a velocity: -|v - velocity| - 0.05 |a|^2."""

    def reward(info: Mapping[str, Any]) -> float:
        return info["reward_ctrl"] - abs(info["x_velocity"] - velocity)

    env = made("HalfCheetah-v5", reward, ctrl_cost_weight=CONTROL["cheetah"], frame_skip=frame_skip)
    return seen(env, velocity_scale, CHEETAH_POSITIONS)


def ant_direction(angle: float) -> Any:
    """Walk along an angle: the velocity that way + 1 for not having fallen - 0.5 |a|^2 - 0.0005 |contact forces|^2."""
    along = np.cos(angle), np.sin(angle)

    def reward(info: Mapping[str, Any]) -> float:
        rest = info["reward_survive"] + info["reward_ctrl"] + info["reward_contact"]
        return along[0] * info["x_velocity"] + along[1] * info["y_velocity"] + rest

    return made("Ant-v5", reward)


def ant_to_goal(goal: tuple[float, float]) -> Any:
    """Walk to a goal: -|x - goal|_1 - 0.1 |a|^2 - 0.0005 |contact forces|^2; a fall does not end it, and x is seen."""

    def reward(info: Mapping[str, Any]) -> float:
        away = abs(info["x_position"] - goal[0]) + abs(info["y_position"] - goal[1])
        return info["reward_ctrl"] + info["reward_contact"] - away

    cost = CONTROL["ant-goal"]
    return made(
        "Ant-v5",
        reward,
        ctrl_cost_weight=cost,
        terminate_when_unhealthy=False,
        exclude_current_positions_from_observation=False,
    )


def hopper(**factors: Any) -> Any:
    """A hopper, parts of whose model are multiplied."""
    return multiplied(made("Hopper-v5"), factors)


def walker(**factors: Any) -> Any:
    """A walker, parts of whose model are multiplied."""
    return multiplied(made("Walker2d-v5"), factors)


def multiplied(env: Any, factors: Mapping[str, Any]) -> Any:
    """The environment with parts of its model multiplied, and the constants that MuJoCo derives from them renewed."""
    for name, factor in factors.items():
        part = getattr(env.model, name)
        part[:] = part * np.reshape(factor, part.shape)
    mujoco().mj_setConst(env.model, env.data)
    return env
