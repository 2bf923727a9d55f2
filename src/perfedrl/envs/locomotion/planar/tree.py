"""Kinematics and linear algebra of a tree of parts in a plane.

Every quantity is a scalar, so that a batch of bodies is an array per quantity and all arithmetic is elementwise. A
*twist* (turn, x, z) is the motion of a part: its angular velocity, and the velocity of the point of it that is at the
root's hinge. A *wrench* (torque, x, z) is a force with its torque about that hinge. A symmetric 3 x 3 matrix that maps
twists to wrenches has six entries, in the order of `TABLE`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from perfedrl.envs.locomotion.planar.model import PlanarModel

Scalar = Any
Vector = tuple[Scalar, Scalar]
Triple = tuple[Scalar, Scalar, Scalar]
Six = tuple[Scalar, Scalar, Scalar, Scalar, Scalar, Scalar]
Matrix = dict[tuple[int, int], Scalar]
"""A symmetric matrix over degrees of freedom: the entries (i, j) with j = i or j above i; all others are 0."""

TABLE = ((0, 1, 2), (1, 3, 4), (2, 4, 5))


class Pose(NamedTuple):
    """Where the parts of a body are, seen from the root's hinge, and how they move."""

    turned: list[Vector]
    """The cosine and sine of each part's angle."""
    hinges: list[Vector]
    axes: list[Triple]
    """The twist that each degree of freedom causes at speed 1."""
    turning: list[Scalar]
    """The angular velocity of each part."""
    drag: list[Vector]
    """The acceleration of each hinge while no joint accelerates."""


def pose(model: PlanarModel, q: Sequence[Scalar], v: Sequence[Scalar]) -> Pose:
    """Compute the places and velocities of all parts, from the root outwards."""
    zero = jnp.zeros_like(q[0])
    found = Pose([], [], [(0.0, 1.0, 0.0), (0.0, 0.0, 1.0)], [], [])
    angles: list[Scalar] = []
    for b, parent in enumerate(model.parents):
        angle, speed = model.signs[b] * (q[b + 2] - model.rest[b + 2]), model.signs[b] * v[b + 2]
        hinge, drag = (zero, zero), (zero, zero)
        if parent >= 0:
            angle, speed = angles[parent] + angle, found.turning[parent] + speed
            arm = rotate(found.turned[parent], model.hinges[b])
            hinge = plus(found.hinges[parent], arm)
            drag = swung(found.drag[parent], found.turning[parent], arm)
        angles.append(angle)
        found.turned.append((jnp.cos(angle), jnp.sin(angle)))
        found.hinges.append(hinge)
        found.axes.append((model.signs[b], -model.signs[b] * hinge[1], model.signs[b] * hinge[0]))
        found.turning.append(speed)
        found.drag.append(drag)
    return found


def rotate(turned: Vector, place: tuple[float, float]) -> Vector:
    """Rotate a place of a part by the part's angle."""
    cos, sin = turned
    return cos * place[0] + sin * place[1], cos * place[1] - sin * place[0]


def swung(drag: Vector, turning: Scalar, arm: Vector) -> Vector:
    """The acceleration of the end of an arm that turns at a constant speed around an accelerated point."""
    return drag[0] - turning**2 * arm[0], drag[1] - turning**2 * arm[1]


def plus(one: tuple, other: tuple) -> tuple:
    """Add two tuples of scalars."""
    return tuple(x + y for x, y in zip(one, other, strict=True))


def dot(one: Sequence[Scalar], other: Sequence[Scalar]) -> Scalar:
    """The inner product of two sequences of scalars."""
    return sum((x * y for x, y in zip(one, other, strict=True)), 0.0)


def twists(model: PlanarModel, at: Pose, x: Sequence[Scalar]) -> list[Triple]:
    """The twist of each part for given speeds of the degrees of freedom; the same for accelerations."""
    found: list[Triple] = []
    for b, parent in enumerate(model.parents):
        own = tuple(axis * x[b + 2] for axis in at.axes[b + 2])
        found.append(plus(found[parent] if parent >= 0 else (0.0, x[0], x[1]), own))
    return found


def generalized(model: PlanarModel, at: Pose, wrenches: Sequence[Triple]) -> list[Scalar]:
    """The forces on the degrees of freedom that wrenches on the parts exert."""
    total = summed_outwards(model, wrenches)
    return [total[0][1], total[0][2], *(dot(at.axes[b + 2], total[b]) for b in range(model.parts))]


def summed_outwards(model: PlanarModel, values: Sequence[tuple]) -> list[tuple]:
    """For each part, the sum of the values of all parts that hang on it, its own included."""
    total = list(values)
    for b in reversed(range(1, model.parts)):
        total[model.parents[b]] = plus(total[model.parents[b]], total[b])
    return total


def projected(model: PlanarModel, at: Pose, parts: Sequence[Six], diagonal: Sequence[Scalar]) -> Matrix:
    """The matrix over degrees of freedom of 3 x 3 matrices on the parts, plus a diagonal.

    Of the parts' inertias it is the mass matrix (the composite-rigid-body algorithm).
    """
    total = summed_outwards(model, parts)
    found: Matrix = {(0, 0): total[0][3] + diagonal[0], (1, 0): total[0][4], (1, 1): total[0][5] + diagonal[1]}
    for b in range(model.parts):
        axis = at.axes[b + 2]
        wrench = [dot([total[b][k] for k in row], axis) for row in TABLE]
        found[b + 2, b + 2] = dot(axis, wrench) + diagonal[b + 2]
        for j in model.above(b + 2):
            found[b + 2, j] = wrench[j + 1] if j < 2 else dot(at.axes[j], wrench)
    return found


def factored(model: PlanarModel, matrix: Matrix) -> Matrix:
    """Factor a positive definite matrix as L^T D L, which leaves zeros where the tree has them.

    The diagonal of the result has the inverses of D.
    """
    found = dict(matrix)
    for k in reversed(range(model.dofs)):
        above, inverse = model.above(k), 1 / found[k, k]
        for position, i in enumerate(above):
            ratio = found[k, i] * inverse
            for j in above[position:]:
                found[i, j] = found[i, j] - ratio * found[k, j]
        for i in above:
            found[k, i] = found[k, i] * inverse
        found[k, k] = inverse
    return found


def solved(model: PlanarModel, factors: Matrix, b: Sequence[Scalar]) -> list[Scalar]:
    """Solve a linear system, given the factors of its matrix."""
    x = list(b)
    for i in reversed(range(model.dofs)):
        for j in model.above(i):
            x[j] = x[j] - factors[i, j] * x[i]
    x = [x[i] * factors[i, i] for i in range(model.dofs)]
    for i in range(model.dofs):
        for j in model.above(i):
            x[i] = x[i] - factors[i, j] * x[j]
    return x


def multiplied(model: PlanarModel, matrix: Matrix, x: Sequence[Scalar]) -> list[Scalar]:
    """Multiply a symmetric matrix and a vector."""
    y = [matrix[i, i] * x[i] for i in range(model.dofs)]
    for i in range(model.dofs):
        for j in model.above(i):
            y[i], y[j] = y[i] + matrix[i, j] * x[j], y[j] + matrix[i, j] * x[i]
    return y
