"""Fixed points of the exact first-order dynamics, and the meta-gradient that remains there (Prop. 2).

A fixed point is a zero of D(theta), the mean of the agents' gradients after adaptation. There grad F is alpha / n times
the sum over agents of H_i v_i, the agent's Hessian times its adapted gradient.
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
"""Tolerance for |D| at a fixed point, relative to the scale of gradients."""

RAREST = 1e-5
"""Smallest action probability of a fixed point. Gradients of a softmax also vanish at infinity, where it becomes a
deterministic policy; points with a rarer action are taken to be on the way there."""

STARTS, SPREAD, MOST_STEPS = 8, 2.0, 100
"""Number of starting points (the policy's own and random ones), their standard deviation, and the iteration limit."""

LINE, STEPS = 40.0, 4001
"""Half-width and number of points of the grid on which a single parameter is searched for sign changes of D."""

SHRINK, SMALLEST, LEAP = 0.6, 1e-4, 0.1
"""Alpha is reduced to 0 by factors of SHRINK down to a share of SMALLEST. If an action probability changes by more than
LEAP in one step, the solver has jumped to another fixed point."""


@dataclass(frozen=True)
class LimitPoint:
    """Limit of a fixed point as alpha -> 0: a stationary point of f, with |grad F| / alpha there as `slope`."""

    theta: Float[np.ndarray, " d"]
    slope: float
    gradients: Float[np.ndarray, "n d"]
    """Gradients of the agents, which sum to zero."""
    curvature: Float[np.ndarray, "n d d"]
    """Hessians of the agents."""
    shares: Float[np.ndarray, "n d"]
    """Contribution of each agent to grad F / alpha: H_i times its gradient, divided by n."""


@dataclass(frozen=True)
class FixedPoint:
    """A zero of D with the contribution of each agent to the remaining meta-gradient; parameters are flattened."""

    theta: Float[np.ndarray, " d"]
    direction: float
    """|D(theta)|, zero up to rounding."""
    attracting: bool
    """Whether small first-order steps converge to it."""
    v: Float[np.ndarray, "n d"]
    """Gradients of the agents after adaptation, which sum to zero."""
    curvature: Float[np.ndarray, "n d d"]
    """Hessians of the agents at theta."""
    shares: Float[np.ndarray, "n d"]
    """(alpha / n) H_i v_i; their sum is the meta-gradient."""
    limit: LimitPoint | None
    """The limit alpha -> 0; None if the point cannot be followed there."""

    @property
    def meta_gradient(self) -> Float[np.ndarray, " d"]:
        """Meta-gradient grad F at the fixed point."""
        return self.shares.sum(axis=0)

    @property
    def residual(self) -> float:
        """Length of grad F at the fixed point."""
        return float(np.linalg.norm(self.meta_gradient))


def fixed_points(fleet: Fleet, policy: Any, alpha: float, starts: int = STARTS, seed: int = 0) -> list[FixedPoint]:
    """Search for fixed points of the exact first-order dynamics, sorted by decreasing residual.

    With a single parameter the whole line is searched. With several, the search starts at several points and may miss
    fixed points. There may also be none, since D need not have a zero.
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
    """D and its Jacobian for one fleet as functions of the flattened parameters."""

    def __init__(self, mdps: TabularMDP, policy: Any):
        self.mdps, self.policy = mdps, policy
        self.shape = first_parameters(policy)
        self.start = exact.float64(lambda theta: ravel_pytree(theta)[0])(self.shape)
        self.scale = mdps.reward_bound / (1 - mdps.discount) ** 2
        """Scale of the derivatives of returns, as in eq. (4)."""

    def direction(self, x: np.ndarray, alpha: float) -> np.ndarray:
        """D(theta)."""
        return self._call(_direction, x, alpha)

    def jacobian(self, x: np.ndarray, alpha: float) -> np.ndarray:
        """Jacobian of D."""
        return self._call(_jacobian, x, alpha)

    def zeros(self, alpha: float, starts: int, seed: int) -> list[np.ndarray]:
        """Find zeros of D at which no action probability vanishes."""
        if len(self.start) == 1:
            line = np.linspace(-LINE, LINE, STEPS)
            signs = np.sign(self._call(_along, line[:, None], alpha)[:, 0])
            at = np.flatnonzero(signs[:-1] * signs[1:] < 0)

            def one(x: float) -> float:
                return float(self.direction(np.asarray([x]), alpha)[0])

            between = [brentq(one, line[i], line[i + 1], xtol=1e-15, rtol=1e-14) for i in at]
            tried: list[np.ndarray | None] = [np.asarray([x]) for x in (*line[signs == 0], *between)]
        else:
            rng = np.random.default_rng(seed)
            random = self.start + SPREAD * rng.normal(size=(starts - 1, len(self.start)))
            tried = [self.solve(x, alpha) for x in (self.start, *random)]
        return [x for x in tried if x is not None and self.interior(x, alpha)]

    def solve(self, x: np.ndarray, alpha: float) -> np.ndarray | None:
        """Find a zero of D from x by Levenberg-Marquardt and three Newton steps that ignore flat directions."""
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
        """Whether x is a zero of D with all action probabilities above RAREST."""
        rarest = float(self.probabilities(x).min())
        return bool(rarest > RAREST and np.linalg.norm(self.direction(x, alpha)) <= ZERO * self.scale)

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        """Action probabilities of the policy."""
        return self._call(_probabilities, x, 0.0)

    def same(self, x: np.ndarray, y: np.ndarray) -> bool:
        """Whether two points give the same policy; a table softmax is invariant to adding a constant per state."""
        return self.apart(x, y) < 1e-6

    def apart(self, x: np.ndarray, y: np.ndarray) -> float:
        """Largest difference between the action probabilities of two points."""
        return float(np.abs(self.probabilities(x) - self.probabilities(y)).max())

    def describe(self, x: np.ndarray, alpha: float) -> FixedPoint:
        """Compute stability, gradients, Hessians and limit of a fixed point."""
        v, H = self._call(_adapted, x, alpha)
        n = len(v)
        slopes = np.linalg.eigvals(self.jacobian(x, alpha)).real
        shares = alpha / n * np.einsum("nde,ne->nd", H, v)
        direction = float(np.linalg.norm(self.direction(x, alpha)))
        flat = 1e-9 * self.scale
        attracting = bool(slopes.max() <= flat and slopes.min() < -flat)
        return FixedPoint(x, direction, attracting, v, H, shares, self.limit(x, alpha))

    def limit(self, x: np.ndarray, alpha: float) -> LimitPoint | None:
        """Follow a fixed point to alpha = 0 in small steps; None if it is lost on the way."""
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
        def J(x):  # noqa: N802
            return exact.J(policy, mdp, unravel(x))

        return jax.grad(J)(x + alpha * jax.grad(J)(x)), jax.hessian(J)(x)

    return jax.vmap(agent)(mdps)
