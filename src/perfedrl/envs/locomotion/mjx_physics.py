"""MuJoCo's physics in JAX: MJX behind the interface of the locomotion tasks.

Bodies are the models of Gymnasium's environments. Constants that MuJoCo derives from masses are computed by MuJoCo
itself when a fleet is made. MJX is imported when it is first needed.
"""

import importlib
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import lru_cache
from io import StringIO
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.envs.locomotion.tasks import RUNGE_KUTTA, BodyState, Physics
from perfedrl.errors import UserError
from perfedrl.gym_environment import mujoco_worlds as worlds
from perfedrl.types import Array

DERIVED = ("body_subtreemass", "body_invweight0", "dof_invweight0")
"""Constants of a model that MuJoCo computes from masses, inertias and damping, and MJX uses."""

EULER, CAPSULE = 0, 3
"""MuJoCo's numbers of the semi-implicit Euler method (other bodies have the Runge-Kutta method) and of a capsule."""

TINY = 1e-6
"""The length below which a vector has no direction."""


def mjx() -> Any:
    """Import MJX, an optional dependency, without what it prints about packages that it does not need."""
    try:
        with redirect_stdout(StringIO()):
            return importlib.import_module("mujoco.mjx")
    except ImportError as error:
        raise UserError("engine = 'mjx' needs MuJoCo's MJX, an extra: pip install 'perfedrl[mjx]'") from error


class MjxPhysics(Physics):
    """One agent's body in MJX: a body by name, and the numbers of its model that may differ between agents."""

    body: str = eqx.field(static=True)
    model: dict[str, Any] = eqx.field(default_factory=dict)
    """The parts of MuJoCo's model that replace those of the body, by name."""

    @property
    def rest(self) -> Float[np.ndarray, " nq"]:
        return plain(self.body).qpos0

    @property
    def velocities(self) -> int:
        return plain(self.body).nv

    @property
    def motors(self) -> int:
        return plain(self.body).nu

    @property
    def timestep(self) -> float:
        return plain(self.body).opt.timestep

    @property
    def settings(self) -> dict[str, Any]:
        """The parts of the model that were multiplied."""
        return {name: np.asarray(x) for name, x in self.model.items() if name not in DERIVED}

    def start(self, qpos: Float[Array, " nq"], qvel: Float[Array, " nv"]) -> BodyState:
        state = BodyState(qpos, qvel, solver=jnp.zeros_like(qvel))
        if self.body != "ant":
            return state
        return state._replace(torso=qpos[:3], contact_forces=jnp.zeros((plain("ant").nbody, 6), qpos.dtype))

    def advance(self, state: BodyState, control: Float[Array, " motors"], steps: int) -> BodyState:
        model, data = traced(self.body)
        model = model.replace(**jax.tree.map(jnp.asarray, self.model))
        step = mjx().step if plain(self.body).opt.integrator == EULER else runge_kutta
        data = data.replace(**as_data(state, control))
        data = jax.lax.fori_loop(0, steps, lambda _, x: step(model, x), data)
        after = BodyState(data.qpos, data.qvel, solver=data.qacc_warmstart)
        if self.body == "ant":
            forces = mjx().rne_postconstraint(model, data)._impl.cfrc_ext
            after = after._replace(torso=data.xpos[1], contact_forces=forces)
        after = jax.tree.map(lambda new, old: new.astype(old.dtype), after, state)
        return self.anew_where_invalid(after)


def mjx_physics(body: str, factors: Mapping[str, Any]) -> MjxPhysics:
    """Make an agent's body, with parts of its model multiplied as `mujoco_worlds.with_factors` does."""
    mjx()
    if not factors:
        return MjxPhysics(body)
    env = worlds.with_factors(worlds.make(worlds.BODIES[body]), factors)
    found = {name: np.array(getattr(env.model, name)) for name in (*factors, *DERIVED)}
    env.close()
    return MjxPhysics(body, found)


@lru_cache
def plain(body: str) -> Any:
    """MuJoCo's model of a body."""
    env = worlds.make(worlds.BODIES[body])
    env.close()
    return env.model


def traced(body: str) -> tuple[Any, Any]:
    """MJX's model of a body and its empty data, in the precision of the caller."""
    return jax.tree.map(jnp.asarray, converted(body, jnp.result_type(float).name))


@lru_cache
def converted(body: str, precision: str) -> tuple[Any, Any]:
    """MJX's model and empty data as NumPy arrays, which any program may use."""
    with jax.enable_x64(precision == "float64"), jax.ensure_compile_time_eval():
        made = mjx().put_model(plain(body), impl="jax"), mjx().make_data(plain(body), impl="jax")
        return jax.tree.map(np.asarray, made)


def as_data(state: BodyState, control: Float[Array, " motors"]) -> dict[str, Array]:
    """The parts of MJX's data that a decision starts from, in the precision of the physics."""
    named = {"qpos": state.qpos, "qvel": state.qvel, "qacc_warmstart": state.solver, "ctrl": control}
    return {name: x.astype(float) for name, x in named.items()}


def runge_kutta(model: Any, data: Any) -> Any:
    """One step of MuJoCo's Runge-Kutta method, fourth order also for the orientation of a free body.

    The slope of an orientation is corrected for the rotation so far (Munthe-Kaas), as MuJoCo does since version 4.
    MJX 3.17 has the method without the correction.
    """
    h, qpos, qvel = model.opt.timestep, data.qpos, data.qvel
    forward, none = (forward_of_a_free_body if free(qpos, qvel) else mjx().forward), jnp.zeros_like(qvel)

    def stage(carry: Any, weights: Any) -> tuple[Any, None]:
        (moving, changing), (moved, changed), data = carry
        a, b = weights
        data = data.replace(qpos=displaced(qpos, h * a * moving), qvel=qvel + h * a * changing)
        data = forward(model, data)
        moving, changing = corrected(qpos, h * a * moving, data.qvel), data.qacc
        return ((moving, changing), (moved + b * moving, changed + b * changing), data), None

    zero = (none, none)
    (_, (moved, changed), data), _ = jax.lax.scan(stage, (zero, zero, data), jnp.asarray(RUNGE_KUTTA, qvel.dtype))
    after = {"qpos": displaced(qpos, h * moved), "qvel": qvel + h * changed, "qacc_warmstart": data.qacc}
    return data.replace(**after)


def forward_of_a_free_body(model: Any, data: Any) -> Any:
    """Compute accelerations as MJX's `forward` does, with friction along and across every capsule, as in MuJoCo.

    MuJoCo's friction cone is a pyramid, and so its orientation matters. MJX turns it to the capsule's axis only where
    the axis is less than 60 degrees from the ground, which makes no difference to a body that stays in a plane.
    """
    data = mjx().fwd_position(model, data)
    data = mjx().make_constraint(model, data.tree_replace({"_impl.contact.frame": aligned_frames(model, data)}))
    for part in (mjx().fwd_velocity, mjx().fwd_actuation, mjx().fwd_acceleration, mjx().solve):
        data = part(model, data)
    return data


def aligned_frames(model: Any, data: Any) -> Float[Array, "contacts 3 3"]:
    """The frames of contacts with the ground: its normal, then the axis of the capsule along the ground."""
    contact = data._impl.contact
    geom = jnp.asarray(contact.geom)[:, 1]
    axis, normal = data.geom_xmat[geom][:, :, 2], contact.frame[:, 0]
    along = axis - normal * jnp.sum(normal * axis, axis=1, keepdims=True)
    length = jnp.sqrt(jnp.sum(along**2, axis=1, keepdims=True))
    along = along / jnp.maximum(length, TINY)
    frames = jnp.stack([normal, along, jnp.cross(normal, along)], axis=1)
    capsule = (jnp.asarray(model.geom_type)[geom] == CAPSULE)[:, None] & (length > TINY)
    return jnp.where(capsule[:, :, None], frames, contact.frame)


def free(qpos: Array, qvel: Array) -> bool:
    """Whether a body's root is free in space, so that positions are one more than velocities."""
    return len(qpos) > len(qvel)


def displaced(qpos: Float[Array, " nq"], by: Float[Array, " nv"]) -> Float[Array, " nq"]:
    """Positions after a displacement, of a free body's orientation by a rotation vector in its own frame."""
    if not free(qpos, by):
        return qpos + by
    turned = rotated(qpos[3:7], by[3:6])
    return jnp.concatenate([qpos[:3] + by[:3], turned, qpos[7:] + by[6:]])


def rotated(q: Float[Array, " 4"], by: Float[Array, " 3"]) -> Float[Array, " 4"]:
    """A quaternion times the quaternion of a rotation vector, with norm 1."""
    angle = jnp.sqrt(jnp.sum(by**2))
    w, v = jnp.cos(angle / 2), by * jnp.sinc(angle / (2 * np.pi)) / 2
    turned = jnp.concatenate([(q[0] * w - q[1:] @ v)[None], q[0] * v + w * q[1:] + jnp.cross(q[1:], v)])
    return turned / jnp.sqrt(jnp.sum(turned**2))


def corrected(qpos: Array, by: Float[Array, " nv"], qvel: Float[Array, " nv"]) -> Float[Array, " nv"]:
    """The time derivative of the displacement at a displacement, where velocities are given.

    For angles they are the same. For a rotation vector u with angular velocity w in the body's frame it is
    w + u x w / 2 + c u x (u x w), with c = (1 - (t/2) cot(t/2)) / t^2 at the angle t = |u|.
    """
    if not free(qpos, qvel):
        return qvel
    u, w = by[3:6], qvel[3:6]
    t = jnp.maximum(jnp.sqrt(jnp.sum(u**2)), 1e-4)
    c = (1 - t / 2 / jnp.tan(t / 2)) / t**2
    turn = jnp.cross(u, w)
    return jnp.concatenate([qvel[:3], w + turn / 2 + c * jnp.cross(u, turn), qvel[6:]])
