"""Acrobot: two hanging links, a motor at the joint between them; swing the tip up. Agents differ in their links."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from perfedrl.envs.base import Polyline
from perfedrl.envs.control.actuator import ActuatedTask
from perfedrl.envs.control.physics import Constant, check_physics, family, like, score
from perfedrl.types import Array, Noise, Trajectory

Body = Float[Array, " 4"]
"""Angle of the first link from hanging, of the second from the first, and their velocities."""
State = Float[Array, " s"]
"""The body's, followed by the actuator's where it has one."""


class Acrobot(ActuatedTask):
    """Gymnasium's Acrobot-v1, with the book's equations: reward -1 until the tip is high enough.

    The center of a link's mass is given as a share of its length, so that it moves along when the length changes. The
    tip is high enough where -cos(theta_1) - cos(theta_1 + theta_2) > 1, which depends on the angles alone, as in
    Gymnasium.
    """

    link_length_1: Constant = 1.0
    link_length_2: Constant = 1.0
    link_mass_1: Constant = 1.0
    link_mass_2: Constant = 1.0
    link_com_1: Constant = 0.5
    link_com_2: Constant = 0.5
    link_moi: Constant = 1.0
    gravity: Constant = 9.8
    torque: Constant = 1.0
    max_vel_1: Constant = 4 * np.pi
    max_vel_2: Constant = 9 * np.pi
    dt: Constant = 0.2
    horizon: int = eqx.field(static=True, default=499)
    discount: float = eqx.field(static=True, default=0.99)

    reset_noise = 4
    step_noise = 0
    actions = 3
    reward_bound = 1.0

    def __check_init__(self) -> None:
        check_physics(self, signed=["gravity"])

    @property
    def link_com_pos_1(self) -> Constant:
        return self.link_com_1 * self.link_length_1

    @property
    def link_com_pos_2(self) -> Constant:
        return self.link_com_2 * self.link_length_2

    @property
    def largest_command(self) -> Constant:
        return self.torque

    @property
    def interval(self) -> Constant:
        return self.dt

    def command(self, action: Int[Array, ""]) -> Float[Array, ""]:
        return (action - 1) * self.torque

    def reset(self, u: Noise) -> State:
        return self.at_rest(0.2 * u - 0.1)

    def observe(self, state: State) -> Float[Array, " 6"]:
        cos, sin = jnp.cos(state[:2]), jnp.sin(state[:2])
        return jnp.stack([cos[0], sin[0], cos[1], sin[1], state[2], state[3]])

    def step(self, state: State, action: Int[Array, ""], u: Noise) -> tuple[State, Float[Array, ""], Bool[Array, ""]]:
        its = like(self, state)
        followed = its.followed(state, its.command(action))
        torque = its.effort(followed)
        slope, half = lambda body: its.derivative(body, torque), its.dt / 2
        body = its.body(state)
        k1 = slope(body)
        k2 = slope(body + half * k1)
        k3 = slope(body + half * k2)
        k4 = slope(body + its.dt * k3)
        body = body + its.dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        angles = body[:2] - 2 * np.pi * jnp.ceil((body[:2] - np.pi) / (2 * np.pi))
        limit = jnp.stack([its.max_vel_1, its.max_vel_2])
        body = jnp.concatenate([angles, jnp.clip(body[2:], -limit, limit)])
        done = -jnp.cos(body[0]) - jnp.cos(body[0] + body[1]) > 1
        return its.moved(body, followed), jnp.where(done, 0, -1).astype(state.dtype), done

    def derivative(self, body: Body, torque: Float[Array, ""]) -> Body:
        """Return the time derivative of the body's state, with d, phi and the accelerations as in Sutton and Barto."""
        theta1, theta2, speed1, speed2 = body
        m1, m2, l1, I, g = self.link_mass_1, self.link_mass_2, self.link_length_1, self.link_moi, self.gravity  # noqa: E741
        c1, c2 = self.link_com_pos_1, self.link_com_pos_2
        cos, sin = jnp.cos(theta2), jnp.sin(theta2)
        d1 = m1 * c1**2 + m2 * (l1**2 + c2**2 + 2 * l1 * c2 * cos) + 2 * I
        d2 = m2 * (c2**2 + l1 * c2 * cos) + I
        phi2 = m2 * c2 * g * jnp.sin(theta1 + theta2)
        swing = m2 * l1 * c2 * sin
        phi1 = -swing * speed2**2 - 2 * swing * speed1 * speed2 + (m1 * c1 + m2 * l1) * g * jnp.sin(theta1) + phi2
        acc2 = (torque + d2 / d1 * phi1 - swing * speed1**2 - phi2) / (m2 * c2**2 + I - d2**2 / d1)
        return jnp.stack([speed1, speed2, -(d2 * acc2 + phi1) / d1, acc2])

    def outcomes(self, episode: Trajectory) -> dict[str, Float[Array, ""]]:
        """The score, and success: the tip came up, which is the only decision without a cost."""
        free = (episode.reward > -0.5) & (episode.mask > 0)
        return {"score": score(episode), "success": jnp.any(free).astype(episode.reward.dtype)}

    def sketch(self, obs: Float[Array, " 6"]) -> list[Polyline]:
        """Draw the two links."""
        one, two = np.arctan2(float(obs[1]), float(obs[0])), np.arctan2(float(obs[3]), float(obs[2]))

        def along(length, angle):
            return float(length) * np.asarray([np.sin(angle), -np.cos(angle)])

        joint = along(self.link_length_1, one)
        return [np.stack([np.zeros(2), joint]), np.stack([joint, joint + along(self.link_length_2, one + two)])]


acrobot = family(
    Acrobot,
    vary="link_length_2",
    usual=dict.fromkeys(("link_length_1", "link_length_2", "link_mass_1", "link_mass_2", "link_moi"), (0.5, 1.5)),
    doc="""Acrobots as in Gymnasium; lengths, masses and inertia of the links usually vary by half.""",
)
