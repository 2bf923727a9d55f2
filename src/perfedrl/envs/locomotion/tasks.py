"""Locomotion tasks in JAX: observations, rewards, starts and falls of Gymnasium's environments (v5), on any physics.

A task holds the physics of its agent's body, an object with the members of `Physics`, and asks it for nothing but the
state after a decision. So the definitions here are written once for all engines that JAX can trace.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PyTree, Shaped

from perfedrl.contracts import default_property, undefined
from perfedrl.envs.base import Task, leaves_by_path
from perfedrl.envs.inverse_transform import standard_normal
from perfedrl.envs.locomotion.outcomes import arriving, running, upright, walking
from perfedrl.gym_environment import mujoco_worlds as worlds
from perfedrl.types import Array, Noise, Trajectory

Scalar = Float[Array, ""]

SURVIVAL = 1.0
"""Reward of a decision after which a body that can fall has not fallen."""

EFFORT = {"ant": 0.5, "hopper": 1e-3, "walker": 1e-3}
"""Gymnasium's cost of squared actions; `worlds.CONTROL` has the others."""

LARGEST = 1e10
"""MuJoCo starts anew from rest where a number of a state is larger, or none; so do bodies here, after each decision."""

CONTACT = 5e-4
"""Cost of squared contact forces, each clipped to [-1, 1]."""


RUNGE_KUTTA = ((0.0, 1 / 6), (0.5, 1 / 3), (0.5, 1 / 3), (1.0, 1 / 6))
"""The classical method of fourth order: how far each stage goes along the slope of the previous one, and its weight."""


class BodyState(NamedTuple):
    """The state of a body between two decisions."""

    qpos: Float[Array, " nq"]
    """MuJoCo's positions: of the root first, then the angles of the joints."""
    qvel: Float[Array, " nv"]
    solver: PyTree[Array] = ()
    """What the physics keeps for its next step, such as a first guess of its solver."""
    torso: Float[Array, " 3"] | None = None
    """Ants only: the torso's place as MuJoCo has it after a step, where it was when forces were last computed."""
    contact_forces: Float[Array, "bodies 6"] | None = None
    """Ants only: MuJoCo's `cfrc_ext`, torques and forces on the bodies, the world first."""


class Physics(eqx.Module):
    """The physics of one agent's body. Array fields may differ between agents; static fields are shared."""

    @default_property
    def rest(self) -> Float[np.ndarray, " nq"]:
        """The positions at rest, around which episodes start. Required."""
        raise undefined(self, "rest", "perfedrl.envs.locomotion.tasks.Physics")

    @default_property
    def velocities(self) -> int:
        """The number of velocities. Required."""
        raise undefined(self, "velocities", "perfedrl.envs.locomotion.tasks.Physics")

    @default_property
    def motors(self) -> int:
        """The number of motors, each controlled by a number in [-1, 1]. Required."""
        raise undefined(self, "motors", "perfedrl.envs.locomotion.tasks.Physics")

    @default_property
    def timestep(self) -> float:
        """The seconds of one step of the physics. Required."""
        raise undefined(self, "timestep", "perfedrl.envs.locomotion.tasks.Physics")

    @property
    def settings(self) -> dict[str, Any]:
        """The numbers that describe this body in tables, by name."""
        return leaves_by_path(self)

    @abstractmethod
    def start(self, qpos: Float[Array, " nq"], qvel: Float[Array, " nv"]) -> BodyState:
        """Return the state at the start of an episode, in the precision of `qpos`."""

    @abstractmethod
    def advance(self, state: BodyState, control: Float[Array, " motors"], steps: int) -> BodyState:
        """Return the state after some steps under constant control, with the structure and precision of `state`."""

    def anew_where_invalid(self, state: BodyState) -> BodyState:
        """Return a state, or one at rest where a number of it is too large or none."""
        numbers = jnp.concatenate([state.qpos, state.qvel, *jax.tree.leaves(state.solver)])
        anew = self.start(jnp.asarray(self.rest, state.qpos.dtype), jnp.zeros_like(state.qvel))
        valid = jnp.all(jnp.abs(numbers) <= LARGEST)
        return jax.tree.map(lambda x, y: jnp.where(valid, x, y), state, anew)


class LocomotionTask(Task):
    """One agent's body and its reward; a subclass defines `observe`, `reward` and, where it can fall, `fallen`.

    A decision lasts `frame_skip` steps of the physics. Actions are clipped to [-1, 1], as Gymnasium's box clips them.
    """

    physics: Physics
    frame_skip: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)
    discount: float = eqx.field(static=True)

    step_noise = 0
    start_spread = 0.1
    """Positions start within this distance of rest."""
    normal_start = True
    """Whether starting velocities are normal with standard deviation `start_spread`, or uniform within it."""

    @property
    def reset_noise(self) -> int:
        return len(self.physics.rest) + self.physics.velocities

    @property
    def action_size(self) -> int:
        return self.physics.motors

    @property
    def seconds(self) -> float:
        """The duration of a decision."""
        return self.frame_skip * self.physics.timestep

    @property
    def settings(self) -> dict[str, Any]:
        """What the agent is asked to do, and the numbers that describe its body."""
        own = {name: x for name, x in leaves_by_path(self).items() if not name.startswith("physics.")}
        return {**own, **self.physics.settings}

    def reset(self, u: Noise) -> BodyState:
        rest = jnp.asarray(self.physics.rest, u.dtype)
        place, speed = u[: len(rest)], u[len(rest) :]
        qvel = self.start_spread * (standard_normal(speed) if self.normal_start else 2 * speed - 1)
        return self.physics.start(rest + self.start_spread * (2 * place - 1), qvel)

    def step(
        self, state: BodyState, action: Float[Array, " motors"], u: Noise
    ) -> tuple[BodyState, Scalar, Bool[Array, ""]]:
        control = jnp.clip(action, -1, 1)
        after = self.physics.advance(state, control.astype(state.qpos.dtype), self.frame_skip)
        return after, self.reward(state, after, control), self.fallen(after)

    @abstractmethod
    def reward(self, before: BodyState, after: BodyState, control: Float[Array, " motors"]) -> Scalar:
        """Return the reward of a decision."""

    def fallen(self, state: BodyState) -> Bool[Array, ""]:
        """Return whether the episode is over."""
        return jnp.asarray(False)

    def forward_velocity(self, before: BodyState, after: BodyState) -> Scalar:
        """The mean velocity of the root along x over a decision."""
        return (after.qpos[0] - before.qpos[0]) / self.seconds

    def outcomes(self, episode: Trajectory) -> dict[str, Array]:
        """The undiscounted return, as "score", and what is measured of this body."""
        return {"score": jnp.sum(episode.reward), **self.measured(episode)}

    def measured(self, episode: Trajectory) -> dict[str, Array]:
        """Return the outcomes beside the score."""
        return {}


class Cheetah(LocomotionTask):
    """A half-cheetah: it observes its positions but x, and its velocities times `velocity_scale`; it cannot fall."""

    velocity_scale: float = eqx.field(static=True, default=1.0)

    def observe(self, state: BodyState) -> Float[Array, " 17"]:
        return jnp.concatenate([state.qpos[1:], self.velocity_scale * state.qvel])

    def measured(self, episode: Trajectory) -> dict[str, Array]:
        return running(self.velocity_scale, episode)


class CheetahDirection(Cheetah):
    """A half-cheetah that runs forward (1) or backward (-1): direction * v - 0.05 |a|^2."""

    direction: Any = 1.0

    def reward(self, before: BodyState, after: BodyState, control: Float[Array, " motors"]) -> Scalar:
        effort = worlds.CONTROL["cheetah"] * jnp.sum(control**2)
        return self.direction * self.forward_velocity(before, after) - effort


class CheetahVelocity(Cheetah):
    """A half-cheetah that runs at a velocity of its own: -|v - velocity| - 0.05 |a|^2."""

    velocity: Any = 0.0

    def reward(self, before: BodyState, after: BodyState, control: Float[Array, " motors"]) -> Scalar:
        effort = worlds.CONTROL["cheetah"] * jnp.sum(control**2)
        return -jnp.abs(self.forward_velocity(before, after) - self.velocity) - effort


class Ant(LocomotionTask):
    """An ant: it observes positions, velocities and clipped contact forces; it stands at torso heights 0.2 to 1."""

    def observe(self, state: BodyState) -> Shaped[Array, " observed"]:
        forces = self.contact_forces(state)[1:].ravel()
        return jnp.concatenate([state.qpos[2:], state.qvel, forces])

    def contact_forces(self, state: BodyState) -> Float[Array, "bodies 6"]:
        """The contact forces, clipped to [-1, 1]."""
        assert state.contact_forces is not None
        return jnp.clip(state.contact_forces, -1, 1)

    def standing(self, state: BodyState) -> Bool[Array, ""]:
        """Whether the torso is at a healthy height."""
        return (state.qpos[2] >= 0.2) & (state.qpos[2] <= 1.0)

    def costs(self, effort: float, after: BodyState, control: Float[Array, " motors"]) -> Scalar:
        """The costs of actions and of contact forces."""
        return effort * jnp.sum(control**2) + CONTACT * jnp.sum(self.contact_forces(after) ** 2)


class AntDirection(Ant):
    """An ant that walks along an angle: the velocity that way + 1 for standing - 0.5 |a|^2 - 0.0005 |c|^2."""

    angle: Any = 0.0

    @property
    def along(self) -> tuple[Array, Array]:
        """The unit vector of the direction."""
        return jnp.cos(self.angle), jnp.sin(self.angle)

    def reward(self, before: BodyState, after: BodyState, control: Float[Array, " motors"]) -> Scalar:
        assert before.torso is not None
        assert after.torso is not None
        x, y, _ = (after.torso - before.torso) / self.seconds
        forward = self.along[0] * x + self.along[1] * y
        return forward + SURVIVAL * self.standing(after) - self.costs(EFFORT["ant"], after, control)

    def fallen(self, state: BodyState) -> Bool[Array, ""]:
        return ~self.standing(state)

    def measured(self, episode: Trajectory) -> dict[str, Array]:
        return walking(self.along, episode)


class AntGoal(Ant):
    """An ant that walks to a goal, observes its place, and goes on after falls: -|x - goal|_1 and the costs."""

    goal: Any = (0.0, 0.0)

    def observe(self, state: BodyState) -> Shaped[Array, " observed"]:
        return jnp.concatenate([state.qpos[:2], super().observe(state)])

    def reward(self, before: BodyState, after: BodyState, control: Float[Array, " motors"]) -> Scalar:
        away = jnp.sum(jnp.abs(after.qpos[:2] - jnp.asarray(self.goal)))
        return -away - self.costs(worlds.CONTROL["ant-goal"], after, control)

    def measured(self, episode: Trajectory) -> dict[str, Array]:
        return arriving(self.goal, episode)


class Upright(LocomotionTask):
    """A hopper or a walker: v + 1 for standing - 0.001 |a|^2; it observes velocities clipped to [-10, 10]."""

    start_spread = 5e-3
    normal_start = False

    def observe(self, state: BodyState) -> Shaped[Array, " observed"]:
        return jnp.concatenate([state.qpos[1:], jnp.clip(state.qvel, -10, 10)])

    def reward(self, before: BodyState, after: BodyState, control: Float[Array, " motors"]) -> Scalar:
        effort = EFFORT["walker"] * jnp.sum(control**2)
        return self.forward_velocity(before, after) + SURVIVAL * ~self.fallen(after) - effort

    def measured(self, episode: Trajectory) -> dict[str, Array]:
        return upright(episode)


class Hopper(Upright):
    """A hopper, which falls below a height of 0.7, beyond an angle of 0.2, or where another number passes 100."""

    def fallen(self, state: BodyState) -> Bool[Array, ""]:
        numbers = jnp.concatenate([state.qpos[2:], state.qvel])
        stands = (state.qpos[1] > 0.7) & (jnp.abs(state.qpos[2]) < 0.2)
        return ~(stands & jnp.all(jnp.abs(numbers) < 100))


class Walker(Upright):
    """A walker, which falls below a height of 0.8, above 2, or beyond an angle of 1."""

    def fallen(self, state: BodyState) -> Bool[Array, ""]:
        height, angle = state.qpos[1], state.qpos[2]
        return ~((height > 0.8) & (height < 2.0) & (jnp.abs(angle) < 1.0))
