"""The motion of a planar body: equations of motion, and the two methods of integration that MuJoCo's bodies have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.envs.locomotion.planar.constraints import constrained, constraints, forces, violations
from perfedrl.envs.locomotion.planar.gpu_kernel import has_kernels, in_one_kernel
from perfedrl.envs.locomotion.planar.model import PlanarModel, Varied, read_model
from perfedrl.envs.locomotion.planar.tree import (
    Matrix,
    Pose,
    Scalar,
    Six,
    factored,
    generalized,
    plus,
    pose,
    projected,
    rotate,
    solved,
    swung,
)
from perfedrl.envs.locomotion.tasks import RUNGE_KUTTA, BodyState, Physics
from perfedrl.errors import UserError
from perfedrl.gym_environment import mujoco_worlds as worlds
from perfedrl.types import Array, Whole

PLANAR = ("half-cheetah", "walker")
MULTIPLIED = ("mass", "inertia", "damping", "friction")

State = tuple[tuple[Scalar, ...], tuple[Scalar, ...]]
"""Positions and velocities."""


class PlanarPhysics(Physics):
    """One agent's planar body: a body by name, and the numbers that differ between agents; None where none do."""

    body: str = eqx.field(static=True)
    varied: Varied | None = None

    @property
    def rest(self) -> Float[np.ndarray, " nq"]:
        return np.asarray(plain(self.body).rest)

    @property
    def velocities(self) -> int:
        return plain(self.body).dofs

    @property
    def motors(self) -> int:
        return len(plain(self.body).gears)

    @property
    def timestep(self) -> float:
        return plain(self.body).timestep

    @property
    def model(self) -> PlanarModel:
        """The body with this agent's numbers."""
        return plain(self.body) if self.varied is None else plain(self.body)._replace(varied=self.varied)

    @property
    def settings(self) -> dict[str, Any]:
        """The numbers of the body that factors multiply, where it has any."""
        if self.varied is None:
            return {}
        return {name: value for name, value in self.varied._asdict().items() if name in MULTIPLIED}

    def start(self, qpos: Float[Array, " nq"], qvel: Float[Array, " nv"]) -> BodyState:
        return BodyState(qpos, qvel)

    def advance(self, state: BodyState, control: Float[Array, " motors"], steps: int) -> BodyState:
        kind = state.qpos.dtype
        if has_kernels(kind):
            moved = in_one_kernel(BodyEquations(self.body, steps), 2 * self.velocities)
            own = [jnp.asarray(x, kind) for x in self.varied or ()]
            qpos, qvel = jnp.split(moved(jnp.concatenate([state.qpos, state.qvel, control, *own])), 2)
        else:
            model = in_precision(self.model, kind)
            found = advanced(model, tuple(state.qpos), tuple(state.qvel), tuple(control), steps)
            qpos, qvel = map(jnp.stack, found)
        return self.anew_where_invalid(BodyState(qpos, qvel))


@dataclass(frozen=True)
class BodyEquations:
    """The motion of a body over some steps, from its numbers in a row to its positions and velocities in a row.

    A row has positions, velocities and controls, and for an agent with a model of its own the numbers of `Varied`.
    """

    body: str
    steps: int

    def __call__(self, row: list[Scalar]) -> tuple[Scalar, ...]:
        model = plain(self.body)
        numbers = iter(row)
        q, v, control = (tuple(islice(numbers, n)) for n in (model.dofs, model.dofs, len(model.gears)))
        if own := list(numbers):
            rest = iter(own)
            model = model._replace(varied=Varied(*(tuple(islice(rest, len(x))) for x in model.varied)))
        q, v = advanced(model, q, v, control, self.steps)
        return *q, *v


def advanced(
    model: PlanarModel, q: tuple[Scalar, ...], v: tuple[Scalar, ...], control: Sequence[Scalar], steps: int
) -> State:
    """Positions and velocities after some steps of the physics under constant control."""
    step = runge_kutta if model.runge_kutta else euler
    motors = [0.0] * model.dofs
    for (dof, gear), u in zip(model.gears, control, strict=True):
        motors[dof] = gear * u

    def once(_: Whole, now: State) -> State:
        return step(model, *now, motors)

    return jax.lax.fori_loop(0, steps, once, (q, v))


def in_precision(model: PlanarModel, kind: Any) -> PlanarModel:
    """Convert the numbers that differ between agents to a precision; plain numbers take that of the state."""
    return model._replace(varied=Varied(*(x if isinstance(x, tuple) else jnp.asarray(x, kind) for x in model.varied)))


class Motion(NamedTuple):
    """The forces and accelerations of a body in one state."""

    mass: Matrix
    force: list[Scalar]
    """All forces on the degrees of freedom: of motors, springs, damping, gravity, turning, floor and limits."""
    acceleration: tuple[Scalar, ...]


def motion(model: PlanarModel, q: Sequence[Scalar], v: Sequence[Scalar], motors: Sequence[Scalar]) -> Motion:
    """Solve the equations of motion in a state."""
    at, varied = pose(model, q, v), model.varied
    inertias, wrenches = [], []
    for b in range(model.parts):
        inertia, wrench = inertia_and_inertial_wrench(model, at, b)
        inertias.append(inertia)
        wrenches.append(wrench)
    mass = projected(model, at, inertias, model.armature)
    inertial = generalized(model, at, wrenches)
    force = [
        motors[i] - model.stiffness[i] * (q[i] - model.springs[i]) - varied.damping[i] * v[i] - inertial[i]
        for i in range(model.dofs)
    ]
    free = solved(model, factored(model, mass), force)
    rows = constraints(model, at, q, v)
    acceleration = constrained(model, at, mass, inertias, rows, free)
    pushes = forces(model, at, rows, violations(model, at, rows, acceleration))
    return Motion(mass, list(plus(tuple(force), tuple(pushes))), acceleration)


def inertia_and_inertial_wrench(model: PlanarModel, at: Pose, b: int) -> tuple[Six, tuple[Scalar, Scalar, Scalar]]:
    """A part's inertia about the root's hinge, and the wrench of gravity and of its turning."""
    m, arm = model.varied.mass[b], rotate(at.turned[b], model.centres[b])
    x, z = plus(at.hinges[b], arm)
    along, up = swung(at.drag[b], at.turning[b], arm)
    along, up = m * along, m * (up + model.gravity)
    inertia = (model.varied.inertia[b] + m * (x**2 + z**2), m * z, -m * x, m, 0.0, m)
    return inertia, (z * along - x * up, along, up)


def euler(model: PlanarModel, q: Sequence[Scalar], v: Sequence[Scalar], motors: Sequence[Scalar]) -> State:
    """One step of the semi-implicit Euler method, with damping implicit in the velocity."""
    h, now = model.timestep, motion(model, q, v, motors)
    damped = {**now.mass, **{(i, i): now.mass[i, i] + h * model.varied.damping[i] for i in range(model.dofs)}}
    acceleration = solved(model, factored(model, damped), now.force)
    v = moved(v, h, acceleration)
    return moved(q, h, v), v


def runge_kutta(model: PlanarModel, q: Sequence[Scalar], v: Sequence[Scalar], motors: Sequence[Scalar]) -> State:
    """One step of the classical Runge-Kutta method of fourth order; its stages are a loop, compiled once."""
    h, none = model.timestep, tuple(jnp.zeros_like(x) for x in q)

    def stage(k: Whole, carry: tuple[State, State]) -> tuple[State, State]:
        (speed, acceleration), (place, velocity) = carry
        share, weight = (kth_constant(k, column, none[0]) for column in zip(*RUNGE_KUTTA, strict=True))
        now = moved(v, share * h, acceleration)
        slope = now, motion(model, moved(q, share * h, speed), now, motors).acceleration
        return slope, (moved(place, weight * h, slope[0]), moved(velocity, weight * h, slope[1]))

    start = (none, none), (tuple(q), tuple(v))
    return jax.lax.fori_loop(0, len(RUNGE_KUTTA), stage, start)[1]


def kth_constant(k: Whole, numbers: Sequence[float], like: Scalar) -> Scalar:
    """Return number k in the shape of `like`, without an array of all numbers, which a kernel cannot hold."""
    found = like
    for i, x in enumerate(numbers):
        found = jnp.where(k == i, jnp.full_like(like, x), found)
    return found


def moved(x: Sequence[Scalar], length: Scalar, along: Sequence[Scalar]) -> tuple[Scalar, ...]:
    """Return x plus a multiple of a direction."""
    return tuple(one + length * step for one, step in zip(x, along, strict=True))


def planar_physics(body: str, factors: Mapping[str, Any]) -> PlanarPhysics:
    """Make an agent's body, with parts of its model multiplied as `mujoco_worlds.with_factors` does."""
    if body not in PLANAR:
        raise UserError(
            f"engine = 'planar' has bodies of which no part touches another: {', '.join(PLANAR)}; "
            f"for {body} take 'mjx' or 'gymnasium'"
        )
    if not factors:
        return PlanarPhysics(body)
    env = worlds.with_factors(worlds.make(worlds.BODIES[body]), factors)
    varied = read_model(env.model).varied
    env.close()
    return PlanarPhysics(body, Varied(*map(np.asarray, varied)))


@lru_cache
def plain(body: str) -> PlanarModel:
    """The model of a body whose numbers are the same for all agents."""
    env = worlds.make(worlds.BODIES[body])
    env.close()
    return read_model(env.model)
