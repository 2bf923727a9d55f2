"""Cart-pole: balance a pole on a cart that is pushed left or right. Agents differ in the pole, the cart or gravity."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from perfedrl.envs.base import Polyline
from perfedrl.envs.control.actuator import ActuatedTask
from perfedrl.envs.control.physics import Constant, check_physics, family, like, over, score
from perfedrl.types import Array, Noise, Trajectory

Body = Float[Array, " 4"]
"""Position, velocity, angle from the vertical, angular velocity."""
State = Float[Array, " s"]
"""The body's, followed by the actuator's where it has one."""


class CartPole(ActuatedTask):
    """Gymnasium's CartPole-v1: reward 1 for every decision until the pole has fallen or the cart has left the track.

    `length` is half the pole's length. A fallen state is never left: Gymnasium does not define steps after the end, and
    masked numbers must not overflow.
    """

    gravity: Constant = 9.8
    masscart: Constant = 1.0
    masspole: Constant = 0.1
    length: Constant = 0.5
    force_mag: Constant = 10.0
    tau: Constant = 0.02
    theta_threshold_radians: Constant = 12 * 2 * np.pi / 360
    x_threshold: Constant = 2.4
    horizon: int = eqx.field(static=True, default=199)
    discount: float = eqx.field(static=True, default=0.99)

    reset_noise = 4
    step_noise = 0
    actions = 2
    reward_bound = 1.0

    def __check_init__(self) -> None:
        check_physics(self, signed=["gravity"])

    @property
    def total_mass(self) -> Constant:
        return self.masspole + self.masscart

    @property
    def polemass_length(self) -> Constant:
        return self.masspole * self.length

    @property
    def largest_command(self) -> Constant:
        return self.force_mag

    @property
    def interval(self) -> Constant:
        return self.tau

    def command(self, action: Int[Array, ""]) -> Float[Array, ""]:
        return jnp.where(action == 1, self.force_mag, -self.force_mag)

    def reset(self, u: Noise) -> State:
        return self.at_rest(0.1 * u - 0.05)

    def observe(self, state: State) -> Body:
        return self.body(state)

    def step(self, state: State, action: Int[Array, ""], u: Noise) -> tuple[State, Float[Array, ""], Bool[Array, ""]]:
        its = like(self, state)
        body = its.body(state)
        _, x_dot, theta, theta_dot = body
        followed = its.followed(state, its.command(action))
        force = its.effort(followed)
        cos, sin = jnp.cos(theta), jnp.sin(theta)
        push = (force + its.polemass_length * theta_dot**2 * sin) / its.total_mass
        theta_acc = (its.gravity * sin - cos * push) / (
            its.length * (4.0 / 3.0 - its.masspole * cos**2 / its.total_mass)
        )
        x_acc = push - its.polemass_length * theta_acc * cos / its.total_mass
        moved = body + its.tau * jnp.stack([x_dot, x_acc, theta_dot, theta_acc])
        body = jnp.where(its.fallen(body), body, moved)
        return its.moved(body, followed), jnp.ones((), state.dtype), its.fallen(body)

    def fallen(self, body: Body) -> Bool[Array, ""]:
        """Whether the pole has fallen or the cart has left the track."""
        return ~((jnp.abs(body[0]) <= self.x_threshold) & (jnp.abs(body[2]) <= self.theta_threshold_radians))

    def outcomes(self, episode: Trajectory) -> dict[str, Float[Array, ""]]:
        """The score, and whether the pole never fell."""
        return {"score": score(episode), "success": 1 - over(self, episode).astype(episode.reward.dtype)}

    def sketch(self, obs: Body) -> list[Polyline]:
        """Draw the track, the cart and the pole."""
        x, theta, far, pole = (float(value) for value in (obs[0], obs[2], self.x_threshold, 2 * self.length))
        cart = x + 0.2 * np.asarray([-1, 1, 1, -1, -1])
        return [
            np.asarray([[-far, 0.0], [far, 0.0]]),
            np.stack([cart, [0.0, 0.0, 0.2, 0.2, 0.0]], axis=-1),
            np.asarray([[x, 0.2], [x + pole * np.sin(theta), 0.2 + pole * np.cos(theta)]]),
        ]


cart_pole = family(
    CartPole,
    vary="length",
    usual={"length": (0.2, 1.8), **dict.fromkeys(("gravity", "masscart", "masspole", "force_mag"), (0.5, 1.5))},
    doc="""Cart-poles as in Gymnasium; usually they differ in the pole's half length, uniform on [0.1, 0.9].""",
)
