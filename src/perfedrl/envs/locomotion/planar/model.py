"""Numbers of a planar body, read from MuJoCo's model of it.

The plane has the coordinates x (forward) and z (up); angles turn z into x, as rotations about MuJoCo's y axis do. A
body is a tree of parts. The root part slides along x and z and turns; every other part turns on a hinge. Degree of
freedom 0 is the root's x, 1 its z, and b + 2 the hinge of part b.
"""

from typing import Any, NamedTuple

import numpy as np

from perfedrl.errors import UserError
from perfedrl.types import Array

Numbers = tuple[float, ...] | Array
"""Numbers of a body, one for each part, degree of freedom or point; arrays where they differ between agents."""

SLIDE, HINGE, PLANE, CAPSULE = 2, 3, 0, 3
"""MuJoCo's numbers of kinds of joints and geometries."""


class Softness(NamedTuple):
    """MuJoCo's `solref` and `solimp`: how a constraint that is violated pushes back."""

    seconds: float
    damping_ratio: float
    least: float
    largest: float
    width: float
    midpoint: float


class FloorPoint(NamedTuple):
    """A sphere at the end of a capsule, which touches the floor: its part, place from the part's hinge, and radius."""

    part: int
    x: float
    z: float
    radius: float


class Limit(NamedTuple):
    """The range of a hinge's angle."""

    dof: int
    low: float
    high: float


class Varied(NamedTuple):
    """The numbers that factors of a model change; those from MuJoCo's `invweight0` are derived from masses."""

    mass: Numbers
    inertia: Numbers
    damping: Numbers
    friction: Numbers
    """Of each point on the floor."""
    point_mobility: Numbers
    """The inverse of the mass that is felt at each point, at rest."""
    limit_mobility: Numbers
    """The same for each limited hinge."""


class PlanarModel(NamedTuple):
    """A planar body: places are relative to the hinge of the part that they are on, in that part's frame."""

    parents: tuple[int, ...]
    """The part that each part is attached to; -1 for the root."""
    signs: tuple[float, ...]
    """1 or -1: the direction in which each hinge turns."""
    hinges: tuple[tuple[float, float], ...]
    """The place of each part's hinge on its parent."""
    centres: tuple[tuple[float, float], ...]
    """The centre of mass of each part."""
    height: float
    """The height of the root's hinge at rest."""
    rest: tuple[float, ...]
    stiffness: tuple[float, ...]
    springs: tuple[float, ...]
    """The positions at which springs exert no force."""
    armature: tuple[float, ...]
    gears: tuple[tuple[int, float], ...]
    """The degree of freedom of each motor, and its force at control 1."""
    points: tuple[FloorPoint, ...]
    limits: tuple[Limit, ...]
    contact_softness: Softness
    limit_softness: Softness
    gravity: float
    timestep: float
    runge_kutta: bool
    varied: Varied

    @property
    def parts(self) -> int:
        return len(self.parents)

    @property
    def dofs(self) -> int:
        return len(self.rest)

    def above(self, dof: int) -> tuple[int, ...]:
        """The degrees of freedom that also move what `dof` moves, nearest first."""
        if dof <= 2:
            return tuple(reversed(range(dof)))
        parent = self.parents[dof - 2] + 2
        return (parent, *self.above(parent))


def read_model(m: Any) -> PlanarModel:
    """Read a planar body from MuJoCo's model."""
    floor = int(np.flatnonzero(m.geom_type == PLANE)[0])
    parts, capsules = range(1, m.nbody), [g for g in range(m.ngeom) if g != floor]
    own = {b: next(j for j in range(m.njnt) if m.jnt_bodyid[j] == b and m.jnt_type[j] == HINGE) for b in parts}
    check_planar(m, floor, own)
    limited = [j for j in range(m.njnt) if m.jnt_limited[j]]
    ends = [(g, side) for g in capsules for side in (1, -1)]
    bodies = [int(m.geom_bodyid[g]) for g, _ in ends]

    def from_hinge(b: int, place: Any) -> tuple[float, float]:
        return pair(place - m.jnt_pos[own[b]])

    varied = Varied(
        mass=numbers(m.body_mass[1:]),
        inertia=numbers(turning_inertia(m, b) for b in parts),
        damping=numbers(m.dof_damping),
        friction=numbers(max(m.geom_friction[g, 0], m.geom_friction[floor, 0]) for g, _ in ends),
        point_mobility=numbers(m.body_invweight0[b, 0] for b in bodies),
        limit_mobility=numbers(m.dof_invweight0[limited]),
    )
    mixed = (m.geom_solref[capsules[0]] + m.geom_solref[floor], m.geom_solimp[capsules[0]] + m.geom_solimp[floor])
    return PlanarModel(
        parents=tuple(int(m.body_parentid[b]) - 1 for b in parts),
        signs=numbers(m.jnt_axis[own[b], 1] for b in parts),
        hinges=tuple(
            from_hinge(int(m.body_parentid[b]), m.body_pos[b] + m.jnt_pos[own[b]]) if b > 1 else (0.0, 0.0)
            for b in parts
        ),
        centres=tuple(from_hinge(b, m.body_ipos[b]) for b in parts),
        height=float(m.body_pos[1, 2] + m.jnt_pos[own[1], 2]),
        rest=numbers(m.qpos0),
        stiffness=numbers(m.jnt_stiffness),
        springs=numbers(m.qpos_spring),
        armature=numbers(m.dof_armature),
        gears=tuple((int(m.actuator_trnid[u, 0]), float(m.actuator_gear[u, 0])) for u in range(m.nu)),
        points=tuple(
            FloorPoint(b - 1, *from_hinge(b, capsule_end(m, g, side)), float(m.geom_size[g, 0]))
            for (g, side), b in zip(ends, bodies, strict=True)
        ),
        limits=tuple(Limit(j, *numbers(m.jnt_range[j])) for j in limited),
        contact_softness=Softness(*numbers(mixed[0] / 2), *numbers(mixed[1][:4] / 2)),
        limit_softness=Softness(*numbers(m.jnt_solref[limited[0]]), *numbers(m.jnt_solimp[limited[0], :4])),
        gravity=-float(m.opt.gravity[2]),
        timestep=float(m.opt.timestep),
        runge_kutta=bool(m.opt.integrator),
        varied=varied,
    )


def check_planar(m: Any, floor: int, own: dict[int, int]) -> None:
    """Check that a model is what the equations are written for; a new release of the models might not be."""
    kinds = [SLIDE, SLIDE, *[HINGE] * (m.nbody - 1)]
    others = [g for g in range(m.ngeom) if g != floor]
    holds = {
        "a hinge on every part, and two slides on the root": list(m.jnt_type) == kinds,
        "hinges that turn in the plane": all(abs(m.jnt_axis[j, 1]) == 1 for j in own.values()),
        "parts that are not turned at rest": np.allclose(m.body_quat[1:], [1, 0, 0, 0]),
        "capsules on a floor": all(m.geom_type[g] == CAPSULE for g in others),
        "parts that touch only the floor": all(not m.geom_conaffinity[g] for g in others),
        "friction along the floor": all(max(m.geom_condim[g], m.geom_condim[floor]) == 3 for g in others),
        "one softness of contacts": len(np.unique(m.geom_solimp[others], axis=0)) == 1,
        "contacts without margin": not np.any(m.geom_margin) and not np.any(m.jnt_margin),
        "one softness of limits": len(np.unique(m.jnt_solimp[m.jnt_limited > 0], axis=0)) == 1,
        "constraints of the usual form": np.all(m.geom_solimp[:, 4] == 2) and m.opt.cone == 0 and m.opt.impratio == 1,
        "no dry friction and no air": not np.any(m.dof_frictionloss) and not m.opt.density and not m.opt.viscosity,
    }
    for what, met in holds.items():
        if not met:
            raise UserError(f"engine = 'planar' needs a body with {what}; take 'mjx' or 'gymnasium'")


def capsule_end(m: Any, g: int, side: int) -> Any:
    """The centre of the sphere at one end of a capsule, in the frame of its body."""
    return m.geom_pos[g] + side * m.geom_size[g, 1] * rotation(m.geom_quat[g])[:, 2]


def turning_inertia(m: Any, b: int) -> float:
    """The moment of inertia about the axis of the plane, through the centre of mass."""
    axis = rotation(m.body_iquat[b])[1]
    return float(axis @ (m.body_inertia[b] * axis))


def rotation(q: Any) -> Any:
    """The rotation matrix of a unit quaternion."""
    w, v = q[0], q[1:]
    cross = np.array([[0, -v[2], v[1]], [v[2], 0, -v[0]], [-v[1], v[0], 0]])
    return np.eye(3) + 2 * w * cross + 2 * cross @ cross


def pair(place: Any) -> tuple[float, float]:
    """The coordinates x and z of a place."""
    return float(place[0]), float(place[2])


def numbers(values: Any) -> tuple[float, ...]:
    """Return numbers as a tuple, which is hashable."""
    return tuple(float(value) for value in values)
