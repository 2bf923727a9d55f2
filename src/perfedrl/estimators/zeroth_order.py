"""Zeroth-order gradients: estimated from returns at randomly perturbed parameters, without derivatives."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Key, PRNGKeyArray

from perfedrl.errors import UserError
from perfedrl.estimators.curvature import Curvature
from perfedrl.estimators.curvature.differences import CentralDifferences
from perfedrl.estimators.gradient import reward_to_go
from perfedrl.rollout import sampler
from perfedrl.types import Array, Params, Sampler


def smoothed_gradient(
    f: Callable[[Float[Array, " d"], Any], Float[Array, ""]],
    theta: Float[Array, " d"],
    directions: Float[Array, "k d"],
    keys: Any,
    radius: float,
    points: int,
    each: Callable = jax.vmap,
) -> Float[Array, " d"]:
    """Average d/r f(theta + r U) U, or d/2r (f(theta + r U) - f(theta - r U)) U, over unit directions U.

    For uniform U the mean of both is the gradient of f smoothed over a ball of radius r. Its bias is of order r^2, and
    zero for quadratic f. The two points of a pair share their random numbers, so that most of the noise cancels.
    """

    def one(U: Float[Array, " d"], key: Any) -> Float[Array, " d"]:  # noqa: N803
        if points == 1:
            return (theta.size / radius) * f(theta + radius * U, key) * U
        return (theta.size / (2 * radius)) * (f(theta + radius * U, key) - f(theta - radius * U, key)) * U

    return jnp.mean(each(one)(directions, keys), axis=0)


class ZerothOrderObjective(eqx.Module):
    """The expected return on one agent's MDP, with gradients from the returns of perturbed parameters alone.

    m trajectories give m directions with one point each, or m // 2 directions with two. Curvature products are finite
    differences of such gradients.
    """

    sampler: Sampler
    discount: float = eqx.field(static=True)
    radius: float = eqx.field(static=True)
    points: int = eqx.field(static=True)
    form: Curvature = eqx.field(static=True)

    @property
    def traceable(self) -> bool:
        return self.sampler.traceable

    def gradient(self, params: Params, key: PRNGKeyArray, m: int) -> Params:
        if m < self.points:
            raise UserError(f"zeroth-order gradients need at least {self.points} trajectories; this batch has {m}")
        flat, unravel = ravel_pytree(params)
        theta = jnp.asarray(flat)
        drawn, played = jax.random.split(key)
        normal = jax.random.normal(drawn, (m // self.points, theta.size), theta.dtype)
        directions = normal / jnp.linalg.norm(normal, axis=1, keepdims=True)

        def f(theta: Any, key: PRNGKeyArray) -> Float[Array, ""]:
            return self.value(unravel(theta), key, 1)

        each = jax.vmap if self.traceable else _one_by_one
        keys: Key[Array, " k"] = jax.random.split(played, len(directions))
        return unravel(jnp.asarray(smoothed_gradient(f, theta, directions, keys, self.radius, self.points, each)))

    def curvature(self, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params:
        return self.form(self, params, v, key, m)

    def value(self, params: Params, key: PRNGKeyArray, m: int) -> Float[Array, ""]:
        return jnp.mean(reward_to_go(self.sampler.sample(params, key, m), self.discount)[:, 0])


class ZerothOrder(eqx.Module):
    """Factory of zeroth-order objectives: a policy and the smoothing settings, applied to a task."""

    policy: Any
    radius: float = eqx.field(static=True)
    points: int = eqx.field(static=True)
    form: Curvature = eqx.field(static=True)

    def __init__(self, policy: Any, radius: float = 0.1, points: int = 2, difference: float | None = None):
        """`difference` is the step of the finite differences that estimate curvature; `radius` if left out."""
        if not 0 < radius < float("inf"):
            raise UserError(f"zeroth-order: radius must be a finite number > 0; it is {radius}")
        if points not in (1, 2):
            raise UserError(f"zeroth-order: points must be 1 or 2; it is {points}")
        self.policy, self.radius, self.points = policy, float(radius), points
        self.form = CentralDifferences(float(radius) if difference is None else difference)

    def __call__(self, task: Any) -> ZerothOrderObjective:
        return ZerothOrderObjective(sampler(task, self.policy), task.discount, self.radius, self.points, self.form)


def _one_by_one(f: Callable) -> Callable:
    """Evaluate directions one by one, for samplers that JAX cannot trace."""
    return lambda directions, keys: jnp.stack([f(U, key) for U, key in zip(directions, keys, strict=True)])
