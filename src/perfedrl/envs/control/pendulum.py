"""Pendulum: swing a rod up and hold it there with a motor too weak to lift it. Agents differ in the rod or gravity."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.envs.base import Polyline
from perfedrl.envs.control.actuator import ActuatedTask
from perfedrl.envs.control.physics import Constant, check_physics, family, like, score
from perfedrl.types import Array, Noise, Trajectory

State = Float[Array, " s"]
"""Angle from the upright, not wrapped, and angular velocity; then the actuator's state where it has one."""

UPRIGHT = np.cos(np.pi / 12)


class Pendulum(ActuatedTask):
    """Gymnasium's Pendulum-v1: a torque, clipped; reward minus squared angle, speed and torque; no end before H.

    The torque that the reward counts is the one asked for, whatever the actuator makes of it.
    """

    g: Constant = 10.0
    m: Constant = 1.0
    l: Constant = 1.0  # noqa: E741
    dt: Constant = 0.05
    max_speed: Constant = 8.0
    max_torque: Constant = 2.0
    horizon: int = eqx.field(static=True, default=199)
    discount: float = eqx.field(static=True, default=0.99)

    reset_noise = 2
    step_noise = 0
    action_size = 1

    def __check_init__(self) -> None:
        check_physics(self, signed=["g"])

    @property
    def largest_command(self) -> Constant:
        return self.max_torque

    @property
    def interval(self) -> Constant:
        return self.dt

    def command(self, action: Float[Array, " 1"]) -> Float[Array, ""]:
        return jnp.clip(action[0], -self.max_torque, self.max_torque)

    def reset(self, u: Noise) -> State:
        return self.at_rest((2 * u - 1) * jnp.asarray([np.pi, 1.0], u.dtype))

    def observe(self, state: State) -> Float[Array, " 3"]:
        return jnp.stack([jnp.cos(state[0]), jnp.sin(state[0]), state[1]])

    def step(self, state: State, action: Float[Array, " 1"], u: Noise) -> tuple[State, Float[Array, ""], bool]:
        its = like(self, state)
        theta, speed = its.body(state)
        asked = its.command(action)
        followed = its.followed(state, asked)
        torque = its.effort(followed)
        angle = jnp.mod(theta + np.pi, 2 * np.pi) - np.pi
        cost = angle**2 + 0.1 * speed**2 + 0.001 * asked**2
        acceleration = 3 * its.g / (2 * its.l) * jnp.sin(theta) + 3 / (its.m * its.l**2) * torque
        speed = jnp.clip(speed + acceleration * its.dt, -its.max_speed, its.max_speed)
        return its.moved(jnp.stack([theta + speed * its.dt, speed]), followed), -cost, False

    def outcomes(self, episode: Trajectory) -> dict[str, Float[Array, ""]]:
        """The score, and the share of decisions with the rod within 15 degrees of the upright."""
        upright = (episode.obs[:, 0] >= UPRIGHT).astype(episode.reward.dtype)
        return {"score": score(episode), "upright": jnp.mean(upright)}

    def sketch(self, obs: Float[Array, " 3"]) -> list[Polyline]:
        """Draw the rod."""
        return [float(self.l) * np.asarray([[0.0, 0.0], [float(obs[1]), float(obs[0])]])]


pendulum = family(
    Pendulum,
    vary="l",
    usual=dict.fromkeys(("g", "m", "l"), (0.5, 1.5)),
    doc="""Pendulums as in Gymnasium; gravity `g`, mass `m` and length `l` usually vary by half.""",
)
