"""Mountain car: a weak car must swing itself out of a valley. Agents differ in motor, gravity and goal."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from perfedrl.envs.base import Polyline
from perfedrl.envs.control.actuator import ActuatedTask
from perfedrl.envs.control.physics import Constant, check_physics, family, like, over, score
from perfedrl.errors import UserError
from perfedrl.types import Array, Noise, Trajectory

Body = Float[Array, " 2"]
"""Position and velocity."""
State = Float[Array, " s"]
"""The body's, followed by the actuator's where it has one."""

START = (-0.6, -0.4)
SIGNED = ("min_position", "max_position", "goal_position", "goal_velocity", "gravity")


class Car(ActuatedTask):
    """What both cars share: the valley, the wall, the goal, and how a push moves them."""

    min_position: Constant = -1.2
    max_position: Constant = 0.6
    max_speed: Constant = 0.07
    goal_position: Constant = 0.5
    goal_velocity: Constant = 0.0
    gravity: Constant = 0.0025
    horizon: int = eqx.field(static=True, default=199)
    discount: float = eqx.field(static=True, default=0.99)

    reset_noise = 1
    step_noise = 0

    interval = 1.0
    """Time has no unit here: a lag is a number of decisions."""

    def __check_init__(self) -> None:
        check_valley(self)

    def reset(self, u: Noise) -> State:
        return self.at_rest(start(u))

    def observe(self, state: State) -> Body:
        return self.body(state)

    def pushed(self, state: State, action: Array) -> tuple[State, Bool[Array, ""]]:
        """Return the state after a decision, and whether the car is at the goal."""
        its = like(self, state)
        followed = its.followed(state, its.command(action))
        body, done = roll(its, its.body(state), its.effort(followed))
        return its.moved(body, followed), done

    def outcomes(self, episode: Trajectory) -> dict[str, Float[Array, ""]]:
        """The score, and success: the car came to the goal."""
        return {"score": score(episode), "success": over(self, episode).astype(episode.reward.dtype)}

    def sketch(self, obs: Body) -> list[Polyline]:
        return valley(self, obs)


class MountainCar(Car):
    """Gymnasium's MountainCar-v0: push left, not at all or right; reward -1 until the car is at the goal."""

    force: Constant = 0.001

    actions = 3
    reward_bound = 1.0

    @property
    def largest_command(self) -> Constant:
        return self.force

    def command(self, action: Int[Array, ""]) -> Float[Array, ""]:
        return (action - 1) * self.force

    def step(self, state: State, action: Int[Array, ""], u: Noise) -> tuple[State, Float[Array, ""], Bool[Array, ""]]:
        state, done = self.pushed(state, action)
        return state, -jnp.ones((), state.dtype), done


class MountainCarContinuous(Car):
    """Gymnasium's MountainCarContinuous-v0: a push in [-1, 1] times `power`; 100 at the goal, minus squared actions.

    An action outside [-1, 1] is clipped for the push, and not clipped for its cost.
    """

    goal_position: Constant = 0.45
    horizon: int = eqx.field(static=True, default=998)
    power: Constant = 0.0015

    action_size = 1

    @property
    def largest_command(self) -> Constant:
        return self.power

    def command(self, action: Float[Array, " 1"]) -> Float[Array, ""]:
        return jnp.clip(action[0], -1, 1) * self.power

    def step(
        self, state: State, action: Float[Array, " 1"], u: Noise
    ) -> tuple[State, Float[Array, ""], Bool[Array, ""]]:
        state, done = self.pushed(state, action)
        return state, (jnp.where(done, 100, 0) - 0.1 * action[0] ** 2).astype(state.dtype), done


def start(u: Noise) -> Body:
    """Return the initial state: at rest near the bottom of the valley."""
    return jnp.stack([START[0] + (START[1] - START[0]) * u[0], jnp.zeros((), u.dtype)])


def roll(car: Any, body: Body, push: Float[Array, ""]) -> tuple[Body, Bool[Array, ""]]:
    """Move a car in the valley sin(3 x) by one step; return its state and whether it is at the goal.

    The wall on the left stops the car.
    """
    position, velocity = body
    velocity = jnp.clip(velocity + push - car.gravity * jnp.cos(3 * position), -car.max_speed, car.max_speed)
    position = jnp.clip(position + velocity, car.min_position, car.max_position)
    velocity = jnp.where((position <= car.min_position) & (velocity < 0), 0, velocity)
    return jnp.stack([position, velocity]), (position >= car.goal_position) & (velocity >= car.goal_velocity)


def valley(car: Any, obs: Body) -> list[Polyline]:
    """Draw the hillside, the flag at the goal, and the car."""

    def height(x):
        return 0.45 * np.sin(3 * x) + 0.55

    x = np.linspace(float(car.min_position), float(car.max_position), 60)
    flag, here = float(car.goal_position), float(obs[0])
    box = np.asarray([[-0.05, 0.02], [0.05, 0.02], [0.05, 0.07], [-0.05, 0.07], [-0.05, 0.02]])
    return [
        np.stack([x, height(x)], axis=-1),
        np.asarray([[flag, height(flag)], [flag, height(flag) + 0.2]]),
        box + np.asarray([here, height(here)]),
    ]


def check_valley(car: Any) -> None:
    """Check that the walls enclose the goal and the initial positions."""
    check_physics(car, SIGNED)
    low, goal, high = car.min_position, car.goal_position, car.max_position
    if any(isinstance(x, jax.Array) for x in (low, goal, high)):
        return
    if not np.all((np.asarray(low) <= START[0]) & (START[1] < np.asarray(goal)) & (np.asarray(goal) <= high)):
        raise UserError(
            f"cars start from {START[0]} to {START[1]}: min_position must not lie above that, and goal_position must "
            f"lie between that and max_position; they are {low}, {goal} and {high}"
        )


mountain_car = family(
    MountainCar,
    vary="force",
    usual=dict.fromkeys(("force", "gravity"), (0.7, 1.3)),
    doc="""Mountain cars as in Gymnasium, with three actions; motor and gravity usually vary by three tenths.""",
)
mountain_car_continuous = family(
    MountainCarContinuous,
    vary="power",
    usual=dict.fromkeys(("power", "gravity"), (0.7, 1.3)),
    doc="""Mountain cars as in Gymnasium, with an accelerator; motor and gravity usually vary by three tenths.""",
)
