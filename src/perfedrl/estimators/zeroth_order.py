"""Gradients by smoothing: returns at perturbed parameters, and no derivative of the policy at all."""

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
    """The mean over unit directions U of d/r f(theta + r U) U, or of d/2r (f(theta + r U) - f(theta - r U)) U.

    Under uniform U both have the gradient of f, smoothed over a ball of radius r, as their mean: it is r^2 off at most,
    and not off at all where f is quadratic. Two points share their randomness, so that most of it cancels.
    """

    def one(U: Float[Array, " d"], key: Any) -> Float[Array, " d"]:  # noqa: N803
        if points == 1:
            return (theta.size / radius) * f(theta + radius * U, key) * U
        return (theta.size / (2 * radius)) * (f(theta + radius * U, key) - f(theta - radius * U, key)) * U

    return jnp.mean(each(one)(directions, keys), axis=0)


class ZerothOrderObjective(eqx.Module):
    """The expected return on one agent's MDP, with gradients from the returns of perturbed parameters alone.

    m trajectories make m directions of one point each, or m // 2 of two. Curvature is that of gradients at a distance.
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
        f = lambda theta, key: self.value(unravel(theta), key, 1)  # noqa: E731
        each = jax.vmap if self.traceable else _one_by_one
        keys: Key[Array, " k"] = jax.random.split(played, len(directions))
        return unravel(jnp.asarray(smoothed_gradient(f, theta, directions, keys, self.radius, self.points, each)))

    def curvature(self, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params:
        return self.form(self, params, v, key, m)

    def value(self, params: Params, key: PRNGKeyArray, m: int) -> Float[Array, ""]:
        return jnp.mean(reward_to_go(self.sampler.sample(params, key, m), self.discount)[:, 0])


class ZerothOrder(eqx.Module):
    """Makes the zeroth-order objective of an agent that lives in a JAX environment."""

    policy: Any
    radius: float = eqx.field(static=True)
    points: int = eqx.field(static=True)
    form: Curvature = eqx.field(static=True)

    def __init__(self, policy: Any, radius: float = 0.1, points: int = 2, difference: float | None = None):
        """`difference` is the distance of the gradients that make a curvature; the radius when left out."""
        if not 0 < radius < float("inf"):
            raise UserError(f"zeroth-order: radius must be a finite number > 0; it is {radius}")
        if points not in (1, 2):
            raise UserError(f"zeroth-order: points must be 1 or 2; it is {points}")
        self.policy, self.radius, self.points = policy, float(radius), points
        self.form = CentralDifferences(float(radius) if difference is None else difference)

    def __call__(self, task: Any) -> ZerothOrderObjective:
        return ZerothOrderObjective(sampler(task, self.policy), task.discount, self.radius, self.points, self.form)


def _one_by_one(f: Callable) -> Callable:
    """A Python sampler's directions, one after the other."""
    return lambda directions, keys: jnp.stack([f(U, key) for U, key in zip(directions, keys, strict=True)])
