"""The first-order floor, Prop. 2: where the exact first-order dynamics stops, and the meta-gradient that is left there.

A fixed point is a zero of D(theta), the mean of the agents' gradients after adaptation. There grad F is alpha / n times
the sum of H_i v_i, curvature times adapted gradient: one share for each agent.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float
from scipy.optimize import brentq, root

from perfedrl import exact
from perfedrl.compilation import jit
from perfedrl.envs import Fleet, TabularMDP
from perfedrl.errors import UserError
from perfedrl.theory.fleet_problem import first_parameters, is_tabular

ZERO = 1e-11
"""|D| at a fixed point, relative to what gradients can be: zero but for rounding."""

RAREST = 1e-5
"""A softmax tends to a deterministic policy, where all gradients vanish, only at infinity: a point at which some action
is rarer than this is on the way there, and no fixed point."""

STARTS, SPREAD, MOST_STEPS = 8, 2.0, 100
"""Starts of the search: the policy's own, and random ones of this spread."""

LINE, STEPS = 40.0, 4001
"""Of a policy with a single parameter the whole line up to here is searched for changes of sign."""

SHRINK, SMALLEST, LEAP = 0.6, 1e-4, 0.1
"""The limit alpha -> 0 is followed in steps of this factor, down to this share of alpha; where an action's probability
changes by more than LEAP in one step, that is another point."""


@dataclass(frozen=True)
class LimitPoint:
    """What a fixed point tends to as alpha -> 0: a stationary point of f, and |grad F| / alpha there."""

    theta: Float[np.ndarray, " d"]
    slope: float
    gradients: Float[np.ndarray, "n d"]
    """The agents' gradients there; they sum to zero."""
    curvature: Float[np.ndarray, "n d d"]
    """Their Hessians."""
    shares: Float[np.ndarray, "n d"]
    """H_i times gradient, divided by n: what each agent adds to grad F / alpha."""


@dataclass(frozen=True)
class FixedPoint:
    """A zero of D, with what each agent adds to the meta-gradient that is left; parameters flattened."""

    theta: Float[np.ndarray, " d"]
    direction: float
    """|D(theta)|: how nearly a zero it is."""
    attracting: bool
    """Whether small first-order steps lead to it: neither away, nor nowhere."""
    v: Float[np.ndarray, "n d"]
    """The agents' gradients after adaptation; they sum to zero."""
    curvature: Float[np.ndarray, "n d d"]
    """The agents' Hessians at theta."""
    shares: Float[np.ndarray, "n d"]
    """(alpha / n) H_i v_i; their sum is the meta-gradient."""
    limit: LimitPoint | None
    """None where the point cannot be followed to alpha = 0."""

    @property
    def meta_gradient(self) -> Float[np.ndarray, " d"]:
        return self.shares.sum(axis=0)

    @property
    def residual(self) -> float:
        return float(np.linalg.norm(self.meta_gradient))


def fixed_points(fleet: Fleet, policy: Any, alpha: float, starts: int = STARTS, seed: int = 0) -> list[FixedPoint]:
    """The fixed points of the exact first-order dynamics that a search finds, the largest residual first.

    With a single parameter the whole line is searched. With more, the search begins at several points, and what it does
    not find may still exist; there may also be none, since D need not have a zero.
    """
    if not is_tabular(fleet, policy):
        raise UserError("fixed points need agents with finitely many states (a fleet of TabularMDP)")
    if not 0 < alpha < float("inf"):
        raise UserError(f"alpha must be a finite number > 0; it is {alpha}")
    dynamics = FirstOrderDynamics(fleet.train, policy)
    found: list[np.ndarray] = []
    for theta in dynamics.zeros(alpha, starts, seed):
        if not any(dynamics.same(theta, other) for other in found):
            found.append(theta)
    points = [dynamics.describe(theta, alpha) for theta in found]
    return sorted(points, key=lambda point: -point.residual)


class FirstOrderDynamics:
    """D and its derivative as functions of a vector, for one fleet."""

    def __init__(self, mdps: TabularMDP, policy: Any):
        self.mdps, self.policy = mdps, policy
        self.shape = first_parameters(policy)
        self.start = exact.float64(lambda theta: ravel_pytree(theta)[0])(self.shape)
        self.scale = mdps.reward_bound / (1 - mdps.discount) ** 2
        """Of returns' derivatives, as in eq. (4)."""

    def direction(self, x: np.ndarray, alpha: float) -> np.ndarray:
        return self._call(_direction, x, alpha)

    def jacobian(self, x: np.ndarray, alpha: float) -> np.ndarray:
        return self._call(_jacobian, x, alpha)

    def zeros(self, alpha: float, starts: int, seed: int) -> list[np.ndarray]:
        """Zeros of D in the interior."""
        if len(self.start) == 1:
            line = np.linspace(-LINE, LINE, STEPS)
            signs = np.sign(self._call(_along, line[:, None], alpha)[:, 0])
            at = np.flatnonzero(signs[:-1] * signs[1:] < 0)
            one = lambda x: float(self.direction(np.asarray([x]), alpha)[0])  # noqa: E731
            between = [brentq(one, line[i], line[i + 1], xtol=1e-15, rtol=1e-14) for i in at]
            tried: list[np.ndarray | None] = [np.asarray([x]) for x in (*line[signs == 0], *between)]
        else:
            rng = np.random.default_rng(seed)
            random = self.start + SPREAD * rng.normal(size=(starts - 1, len(self.start)))
            tried = [self.solve(x, alpha) for x in (self.start, *random)]
        return [x for x in tried if x is not None and self.interior(x, alpha)]

    def solve(self, x: np.ndarray, alpha: float) -> np.ndarray | None:
        """The zero that Levenberg-Marquardt reaches from x, sharpened by Newton; flat directions are left alone."""
        found = root(
            self.direction,
            x,
            args=(alpha,),
            jac=self.jacobian,
            method="lm",
            options={"xtol": 1e-13, "maxiter": MOST_STEPS},
        )
        x = found.x
        for _ in range(3):
            x = x - np.linalg.pinv(self.jacobian(x, alpha), rcond=1e-8) @ self.direction(x, alpha)
        return x if np.isfinite(x).all() else None

    def interior(self, x: np.ndarray, alpha: float) -> bool:
        """Whether x is a zero of D, and not a way to infinity."""
        rarest = float(self.probabilities(x).min())
        return bool(rarest > RAREST and np.linalg.norm(self.direction(x, alpha)) <= ZERO * self.scale)

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        return self._call(_probabilities, x, 0.0)

    def same(self, x: np.ndarray, y: np.ndarray) -> bool:
        """Whether two points are one policy: a table softmax does not change when a constant is added to a state."""
        return self.apart(x, y) < 1e-6

    def apart(self, x: np.ndarray, y: np.ndarray) -> float:
        """The largest difference between the two policies' probabilities."""
        return float(np.abs(self.probabilities(x) - self.probabilities(y)).max())

    def describe(self, x: np.ndarray, alpha: float) -> FixedPoint:
        v, H = self._call(_adapted, x, alpha)
        n = len(v)
        slopes = np.linalg.eigvals(self.jacobian(x, alpha)).real
        shares = alpha / n * np.einsum("nde,ne->nd", H, v)
        direction = float(np.linalg.norm(self.direction(x, alpha)))
        flat = 1e-9 * self.scale
        attracting = bool(slopes.max() <= flat and slopes.min() < -flat)
        return FixedPoint(x, direction, attracting, v, H, shares, self.limit(x, alpha))

    def limit(self, x: np.ndarray, alpha: float) -> LimitPoint | None:
        """Follow a fixed point to alpha = 0, step by step."""
        for share in [*SHRINK ** np.arange(1, np.log(SMALLEST) / np.log(SHRINK)), 0.0]:
            solved = self.solve(x, alpha * share)
            if solved is None or not self.interior(solved, alpha * share) or self.apart(x, solved) > LEAP:
                return None
            x = solved
        v, H = self._call(_adapted, x, 0.0)
        shares = np.einsum("nde,ne->nd", H, v) / len(v)
        return LimitPoint(x, float(np.linalg.norm(shares.sum(axis=0))), v, H, shares)

    def _call(self, f, x: np.ndarray, alpha: float):
        return f(self.policy, self.mdps, self.shape, np.asarray(x, np.float64), float(alpha))


def _flat_direction(policy, mdps, shape, x, alpha):
    theta = ravel_pytree(shape)[1](x)
    each = jax.vmap(lambda mdp: exact.adapted_gradient(policy, mdp, theta, alpha))(mdps)
    return ravel_pytree(jax.tree.map(lambda g: jnp.mean(g, axis=0), each))[0]


_direction = exact.float64(jit(_flat_direction))
_along = exact.float64(jit(jax.vmap(_flat_direction, in_axes=(None, None, None, 0, None))))
_jacobian = exact.float64(jit(jax.jacobian(_flat_direction, argnums=3)))


@exact.float64
@jit
def _probabilities(policy, mdps, shape, x, alpha):  # noqa: ARG001
    return policy.probabilities(ravel_pytree(shape)[1](x))


@exact.float64
@jit
def _adapted(policy, mdps, shape, x, alpha):
    unravel = ravel_pytree(shape)[1]

    def agent(mdp):
        J = lambda x: exact.J(policy, mdp, unravel(x))  # noqa: E731
        return jax.grad(J)(x + alpha * jax.grad(J)(x)), jax.hessian(J)(x)

    return jax.vmap(agent)(mdps)
