"""Exact costs, gradients and Hessians of linear-quadratic agents from Lyapunov equations, and optimal gains.

C(K) = tr(P_K S) is the infinite-horizon cost of u = -K x, and J = -C. The formulas are shared by two solvers: SciPy's,
for NumPy arrays in float64 (`cost`, `gradient`, ...), and a doubling iteration that JAX can trace.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.optimize
from jaxtyping import Float

from perfedrl.envs import Fleet, LinearQuadratic
from perfedrl.errors import UserError
from perfedrl.types import Array, Params

Matrix = Float[Array, "_ _"]
Solver = Callable[[Matrix, Matrix], Matrix]
"""Solves X = L X L^T + M."""

DOUBLINGS = 16
"""Number of doublings: 2^16 terms of the series for X, exact to rounding up to a spectral radius of 0.9997."""


class System(NamedTuple):
    """One agent's discounted problem: A and B times sqrt(gamma), cost matrices Q and R, and the weight S of P_K."""

    A: Matrix
    B: Matrix
    Q: Matrix
    R: Matrix
    S: Matrix


class Solution(NamedTuple):
    """Solution for a gain: P = Q + K^T R K + L^T P L, Sigma = S + L Sigma L^T, E = R K - B^T P L, L = A - B K."""

    P: Matrix
    Sigma: Matrix
    E: Matrix
    L: Matrix


def system(task: LinearQuadratic) -> System:
    """Build the problem of a task. S is the covariance of x_0 plus the contribution of process noise.

    With process noise and without discount every total cost is infinite; the cost is then the average per step.
    """
    gamma, noise, one = task.discount, task.process_noise**2, np.eye(task.state_size)
    weight = 1 + gamma / (1 - gamma) * noise if gamma < 1 else noise or 1.0
    return System(gamma**0.5 * task.A, gamma**0.5 * task.B, task.Q, task.R, weight * one)


# --- formulas, for either solver --------------------------------------------------------------------------------------


def solution(s: System, K: Matrix, solve: Solver) -> Solution:  # noqa: N803
    """Compute the cost-to-go and the state covariance under a gain."""
    L = s.A - s.B @ K
    P = solve(L.T, s.Q + K.T @ s.R @ K)
    return Solution(P, solve(L, s.S), s.R @ K - s.B.T @ P @ L, L)


def gradient_of(at: Solution) -> Matrix:
    """Grad C = 2 E_K Sigma_K, with E_K = (R + B^T P B) K - B^T P A."""
    return 2 * at.E @ at.Sigma


def hessian_of(s: System, at: Solution, V: Matrix, solve: Solver) -> Matrix:  # noqa: N803
    """Compute grad^2 C [V]; the derivatives of P and Sigma along V solve Lyapunov equations too."""
    moved = -s.B @ V @ at.Sigma @ at.L.T
    dP = solve(at.L.T, V.T @ at.E + at.E.T @ V)
    dSigma = solve(at.L, moved + moved.T)
    dE = s.R @ V + s.B.T @ at.P @ s.B @ V - s.B.T @ dP @ at.L
    return 2 * (dE @ at.Sigma + at.E @ dSigma)


# --- traceable ------------------------------------------------------------------------------------------------------


def by_doubling(L: Matrix, M: Matrix) -> Matrix:  # noqa: N803
    """Solve X = sum_k L^k M L^kT by Smith's iteration, which doubles the terms each time; nan if L is not stable.

    It needs no matrix factorization, which can deadlock inside compiled loops, and it is differentiable.
    """

    def times(x: Matrix, y: Matrix) -> Matrix:
        """Multiply small matrices by sums: faster than `@`, with an order that does not depend on the batch shape."""
        return jnp.sum(x[:, :, None] * y[None], axis=1)

    def double(carry, _):
        X, power = carry
        return (X + times(times(power, X), power.T), times(power, power)), None

    (X, power), _ = jax.lax.scan(double, (jnp.asarray(M), jnp.asarray(L)), length=DOUBLINGS)
    return jnp.where(jnp.sum(power**2) < 1, X, jnp.nan)


def C(task: LinearQuadratic, K: Matrix) -> Float[Array, ""]:  # noqa: N802, N803
    """Compute C_i(K), traceable by JAX; nan if the gain does not stabilize the system."""
    s = system(task)
    L = s.A - s.B @ K
    return jnp.sum(by_doubling(L.T, s.Q + K.T @ s.R @ K) * s.S)


class ExactLQRObjective(eqx.Module):
    """J = -C of one linear-quadratic agent in closed form, without sampling or exploration noise.

    Keys and batch sizes are ignored, as in `exact.ExactObjective`.
    """

    task: LinearQuadratic

    traceable = True

    def gradient(self, params: Params, key=None, m: int = 0) -> Params:
        """Grad J_i(K)."""
        at = solution(system(self.task), params["gain"], by_doubling)
        return _along(params, -gradient_of(at))

    def curvature(self, params: Params, v: Params, key=None, m: int = 0) -> Params:
        """grad^2 J_i(K) v."""
        s = system(self.task)
        at = solution(s, params["gain"], by_doubling)
        return _along(params, -hessian_of(s, at, v["gain"], by_doubling))

    def value(self, params: Params, key=None, m: int = 0) -> Float[Array, ""]:
        """J_i(K)."""
        return -C(self.task, params["gain"])


def _along(params: Params, gain: Matrix) -> Params:
    """Put a derivative by the gain into the shape of the parameters, with zeros for all others."""
    return {name: gain if name == "gain" else jnp.zeros_like(x) for name, x in params.items()}


# --- float64 front, of one agent -------------------------------------------------------------------------------------


def cost(task: LinearQuadratic, K: Matrix) -> float:  # noqa: N803
    """Compute C_i(K); infinite if the gain does not stabilize the system."""
    at = _solved(task, K)
    return np.inf if at is None else float(np.sum(at.P * system(task).S))


def gradient(task: LinearQuadratic, K: Matrix) -> Matrix:  # noqa: N803
    """Grad C_i(K) = 2 E_K Sigma_K."""
    return gradient_of(_stable(task, K))


def hessian(task: LinearQuadratic, K: Matrix, V: Matrix) -> Matrix:  # noqa: N803
    """grad^2 C_i(K) [V]."""
    return hessian_of(system(task), _stable(task, K), np.asarray(V), _by_scipy)


def adapted(task: LinearQuadratic, K: Matrix, eta: float) -> Matrix:  # noqa: N803
    """Compute K_i^+ = K - eta grad C_i(K), the gain after one adaptation step."""
    return np.asarray(K) - eta * gradient(task, K)


def meta_cost(task: LinearQuadratic, K: Matrix, eta: float) -> float:  # noqa: N803
    """Compute the MAML objective C_i(K_i^+); infinite if either gain does not stabilize the system."""
    return cost(task, adapted(task, K, eta)) if radius(task, K) < 1 else np.inf


def meta_gradient(task: LinearQuadratic, K: Matrix, eta: float) -> Matrix:  # noqa: N803
    """Compute the MAML gradient (I - eta grad^2 C_i(K)) grad C_i(K_i^+)."""
    after = gradient(task, adapted(task, K, eta))
    return after - eta * hessian(task, K, after)


def radius(task: LinearQuadratic, K: Matrix) -> float:  # noqa: N803
    """Spectral radius rho(A - B K), times sqrt(gamma) with a discount; the cost is finite if it is below 1."""
    s = system(task)
    return float(np.abs(np.linalg.eigvals(s.A - s.B @ np.asarray(K))).max())


def optimal_gain(task: LinearQuadratic) -> Matrix:
    """Compute the gain of lowest cost from the Riccati equation."""
    s = system(task)
    P = scipy.linalg.solve_discrete_are(s.A, s.B, s.Q, s.R)
    return np.linalg.solve(s.R + s.B.T @ P @ s.B, s.B.T @ P @ s.A)


# --- of a fleet -------------------------------------------------------------------------------------------------------


def systems(fleet: Fleet, held_out: bool = False) -> list[LinearQuadratic]:
    """List the training or held-out tasks of a fleet."""
    count = fleet.held_out_agents if held_out else fleet.agents
    return [fleet.task(i, held_out=held_out) for i in range(count)]


def average_optimal_gain(tasks: Sequence[LinearQuadratic], start: Matrix) -> Matrix:
    """Minimize the mean cost of one shared gain without adaptation."""
    return _minimizer(tasks, start, cost, gradient)


def meta_optimal_gain(tasks: Sequence[LinearQuadratic], start: Matrix, eta: float) -> Matrix:
    """Minimize the mean cost after one adaptation step by descent from `start`; there are several local minima."""
    return _minimizer(tasks, start, lambda t, k: meta_cost(t, k, eta), lambda t, k: meta_gradient(t, k, eta))


def _minimizer(tasks: Sequence[LinearQuadratic], start: Matrix, value: Callable, slope: Callable) -> Matrix:
    shape = np.shape(start)

    def mean(k: np.ndarray) -> float:
        return float(np.mean([value(task, k.reshape(shape)) for task in tasks]))

    def mean_slope(k: np.ndarray) -> np.ndarray:
        if not np.isfinite(mean(k)):
            return np.zeros(k.size)
        return np.mean([slope(task, k.reshape(shape)) for task in tasks], axis=0).ravel()

    if not np.isfinite(mean(np.ravel(start))):
        raise UserError("the gain to start from must stabilize every system, and so must a step from it")
    # The line search backtracks from infinite costs; the search ends when rounding stops its progress.
    found = scipy.optimize.minimize(mean, np.ravel(start), jac=mean_slope, method="BFGS", options={"gtol": 1e-8})
    return found.x.reshape(shape)


def check_stable(tasks: Sequence[LinearQuadratic], K: Matrix, where: str, agents: str = "agent") -> None:  # noqa: N803
    """Reject a gain that does not stabilize all systems, naming the agent and the spectral radius."""
    for i, task in enumerate(tasks):
        rho = radius(task, K) if np.isfinite(K).all() else float("nan")
        if not rho < 1:
            raise UserError(
                f"the gain does not stabilize {agents} {i}, whose closed loop has spectral radius {rho:.4g}: {where}"
            )


def check_start(fleet: Fleet, policy: Any) -> None:
    """Reject a policy whose initial gain has infinite cost for some agent."""
    if np.shape(policy.gain) != (fleet.train.action_size, fleet.train.state_size):
        raise UserError(f"the policy's gain has shape {np.shape(policy.gain)}, which does not fit the fleet")
    for held_out, agents in ((False, "agent"), (True, "held-out agent")):
        check_stable(systems(fleet, held_out), policy.gain, "start from another, or do without exact costs", agents)


def _by_scipy(L: Matrix, M: Matrix) -> Matrix:  # noqa: N803
    return scipy.linalg.solve_discrete_lyapunov(L, M)


def _solved(task: LinearQuadratic, K: Matrix) -> Solution | None:  # noqa: N803
    return solution(system(task), np.asarray(K), _by_scipy) if radius(task, K) < 1 else None


def _stable(task: LinearQuadratic, K: Matrix) -> Solution:  # noqa: N803
    at = _solved(task, K)
    if at is None:
        raise UserError(f"the gain does not stabilize the system: its closed loop has radius {radius(task, K):.4g}")
    return at


def is_lqr(fleet: Any, policy: Any) -> bool:
    """Whether a fleet and a policy are linear-quadratic, so that these quantities exist."""
    return isinstance(fleet.train, LinearQuadratic) and policy.gain is not None
