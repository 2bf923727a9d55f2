"""Exact evaluation of tabular agents by differentiating the finite-horizon recursion, without sampling noise.

The first part holds functions of one agent that JAX can trace. The functions below it (`expected_return`, `gradient`,
...) take and return NumPy arrays and compute in float64 regardless of the session's precision.
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.compilation import jit
from perfedrl.envs import Fleet, LinearQuadratic, TabularMDP, stack
from perfedrl.errors import UserError
from perfedrl.exact.lqr import ExactLQRObjective
from perfedrl.policies import TablePolicy, TableSoftmax
from perfedrl.types import Array, Params, Scalar

Mdps = Sequence[TabularMDP] | TabularMDP | Fleet


# --- traceable by JAX, for one agent --------------------------------------------------------------------------------


def J(policy: TablePolicy, mdp: TabularMDP, theta: Params) -> Float[Array, ""]:  # noqa: N802
    """Compute the expected return J_i(theta) by backward recursion over H + 1 decisions."""
    pi = policy.probabilities(theta)

    def backward_step(v, _):
        q = mdp.r + mdp.discount * mdp.backup(v)
        return jnp.sum(pi * q, axis=-1), None

    v, _ = jax.lax.scan(backward_step, jnp.zeros(mdp.states, pi.dtype), length=mdp.horizon + 1)
    return jnp.sum(mdp.mu * v)


def adapted(policy: TablePolicy, mdp: TabularMDP, theta: Params, alpha: Scalar) -> Params:
    """Compute theta_i^+ = theta + alpha grad J_i(theta), the personalized parameters of an agent."""
    g = jax.grad(partial(J, policy, mdp))(theta)
    return jax.tree.map(lambda x, dx: x + alpha * dx, theta, g)


def F(policy: TablePolicy, mdp: TabularMDP, theta: Params, alpha: Scalar) -> Float[Array, ""]:  # noqa: N802
    """Compute F_i(theta) = J_i(theta_i^+), eq. (5), the return after one adaptation step."""
    return J(policy, mdp, adapted(policy, mdp, theta, alpha))


def adapted_gradient(policy: TablePolicy, mdp: TabularMDP, theta: Params, alpha: Scalar) -> Params:
    """Compute grad J_i(theta_i^+), the direction of the exact first-order dynamics."""
    return jax.grad(partial(J, policy, mdp))(adapted(policy, mdp, theta, alpha))


class ExactObjective(eqx.Module):
    """Objective of one agent without sampling noise, the limit m -> infinity of a sampled objective.

    Keys and batch sizes are ignored, so algorithms that use gradients and curvature products run on it unchanged.
    """

    task: TabularMDP
    policy: Any

    traceable = True

    def gradient(self, params: Params, key=None, m: int = 0) -> Params:
        """Grad J_i(theta)."""
        return jax.grad(partial(J, self.policy, self.task))(params)

    def curvature(self, params: Params, v: Params, key=None, m: int = 0) -> Params:
        """grad^2 J_i(theta) v."""
        return jax.jvp(self.gradient, (params,), (v,))[1]

    def value(self, params: Params, key=None, m: int = 0) -> Float[Array, ""]:
        """J_i(theta)."""
        return J(self.policy, self.task, params)


class Exact(eqx.Module):
    """Factory of exact objectives for tabular and linear-quadratic agents."""

    policy: Any

    def __call__(self, task: TabularMDP | LinearQuadratic) -> ExactObjective | ExactLQRObjective:
        return ExactLQRObjective(task) if isinstance(task, LinearQuadratic) else ExactObjective(task, self.policy)


# --- float64 front ------------------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")


def float64(f: Callable[P, T]) -> Callable[P, T]:
    """Run a function in double precision, with floating-point arguments and results as NumPy float64."""

    @wraps(f)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.enable_x64(True):
            args, kwargs = jax.tree.map(_double, (args, kwargs))
            return jax.tree.map(np.asarray, f(*args, **kwargs))

    return wrapped


@float64
def expected_return(mdp: TabularMDP, theta: Params, policy: TablePolicy | None = None) -> Float[Array, ""]:
    """Compute J(theta) of one agent."""
    return _J(*_fitting(policy, mdp, theta))


@float64
def gradient(mdp: TabularMDP, theta: Params, policy: TablePolicy | None = None) -> Params:
    """Compute the gradient of J, eq. (2), in the shape of theta."""
    return _grad_J(*_fitting(policy, mdp, theta))


@float64
def hessian(mdp: TabularMDP, theta: Params, policy: TablePolicy | None = None) -> Float[Array, "..."]:
    """Compute the Hessian of J, eq. (3); for theta[S,A] an array [S,A,S,A]."""
    return _hess_J(*_fitting(policy, mdp, theta))


@float64
def meta_objective(mdps: Mdps, theta: Params, alpha: Scalar, policy: TablePolicy | None = None) -> Array:
    """Compute F(theta), eq. (5), the mean over agents of the return after one adaptation step."""
    return _F(*_fitting(policy, stacked(mdps), theta), alpha)


@float64
def meta_gradient(mdps: Mdps, theta: Params, alpha: Scalar, policy: TablePolicy | None = None) -> Params:
    """Compute the gradient of F, eq. (6), in the shape of theta."""
    return _grad_F(*_fitting(policy, stacked(mdps), theta), alpha)


@float64
def meta_hessian(mdps: Mdps, theta: Params, alpha: Scalar, policy: TablePolicy | None = None) -> Array:
    """Compute the Hessian of F; for theta[S,A] an array [S,A,S,A]."""
    return _hess_F(*_fitting(policy, stacked(mdps), theta), alpha)


@float64
def first_order_direction(mdps: Mdps, theta: Params, alpha: Scalar, policy: TablePolicy | None = None) -> Params:
    """Compute D(theta), the mean of grad J_i(theta_i^+), the direction of the first-order dynamics (Prop. 2)."""
    return _D(*_fitting(policy, stacked(mdps), theta), alpha)


@float64
def returns(mdps: Mdps, theta: Params, alpha: Scalar, policy: TablePolicy | None = None) -> Array:
    """Compute [J_i(theta), F_i(theta)] of every agent, before and after adaptation: an array [2, n]."""
    return _returns(*_fitting(policy, stacked(mdps), theta), alpha)


@float64
def returns_of_many(mdps: TabularMDP, thetas: Params, alpha: Scalar, policy: TablePolicy) -> Array:
    """Compute `returns` for L parameters with leading axis L: an array [L, 2, n]."""
    return _many_returns(policy, mdps, thetas, alpha)


@float64
def optimal_return(mdp: TabularMDP) -> Float[Array, ""]:
    """Compute the largest return of any policy, time-dependent ones included, on one agent's MDP."""
    return _optimum(mdp)[0]


def best_response(mdp: TabularMDP) -> np.ndarray:
    """Compute an optimal action for every step and state, [H + 1, S]."""
    return float64(_optimum)(mdp)[1]


def stacked(mdps: Mdps) -> TabularMDP:
    """Stack a list of MDPs or the training part of a fleet; stacked MDPs are returned unchanged."""
    tasks = mdps.train if isinstance(mdps, Fleet) else mdps
    if not isinstance(tasks, TabularMDP) and not len(tasks):
        raise UserError("there must be at least one MDP")
    tasks = tasks if isinstance(tasks, TabularMDP) else stack(list(tasks))
    if not isinstance(tasks, TabularMDP):
        raise UserError("exact evaluation needs agents with finitely many states (a fleet of TabularMDP)")
    return tasks if tasks.mu.ndim == 2 else stack([tasks])


def softmax_of(mdp: TabularMDP) -> TableSoftmax:
    """Build the table softmax policy for an MDP."""
    return TableSoftmax(mdp.states, mdp.actions)


def _fitting(policy: TablePolicy | None, mdp: TabularMDP, theta: Params) -> tuple[Any, TabularMDP, Params]:
    """Check that the shape of theta fits the policy, which broadcasting would hide, and return the arguments."""
    fitting: Any = softmax_of(mdp) if policy is None else policy
    theta = jax.tree.map(lambda x: np.asarray(x, np.float64), theta, is_leaf=lambda x: isinstance(x, list))
    expected = jax.tree.map(np.shape, jax.eval_shape(fitting.init, jax.random.key(0)))
    came = jax.tree.map(np.shape, theta)
    if came != expected:
        raise UserError(f"theta must have shape {expected} to fit the policy; it has shape {came}")
    return fitting, mdp, theta


def _double(x: Any) -> Any:
    is_float = isinstance(x, Array) and np.issubdtype(x.dtype, np.floating)
    return np.asarray(x, np.float64) if is_float else x


def _mean(f):
    """Average a per-agent function over a stacked fleet."""
    return lambda policy, mdps, *args: jax.tree.map(
        lambda x: jnp.mean(x, axis=0), jax.vmap(lambda mdp: f(policy, mdp, *args))(mdps)
    )


def _before_and_after(policy, mdps, theta, alpha):
    def both(mdp):
        return jnp.stack([J(policy, mdp, theta), F(policy, mdp, theta, alpha)])

    return jax.vmap(both, out_axes=1)(mdps)


def _optimal(mdp: TabularMDP):
    def backward_step(v, _):
        q = mdp.r + mdp.discount * mdp.backup(v)
        return jnp.max(q, axis=-1), jnp.argmax(q, axis=-1)

    v, actions = jax.lax.scan(backward_step, jnp.zeros(mdp.states), length=mdp.horizon + 1, reverse=True)
    return jnp.sum(mdp.mu * v), actions


_J = jit(J)
_grad_J = jit(jax.grad(J, argnums=2))
_hess_J = jit(jax.hessian(J, argnums=2))
_F = jit(_mean(F))
_grad_F = jit(jax.grad(_mean(F), argnums=2))
_hess_F = jit(jax.hessian(_mean(F), argnums=2))
_D = jit(_mean(adapted_gradient))
_returns = jit(_before_and_after)
_many_returns = jit(jax.vmap(_before_and_after, in_axes=(None, None, 0, None)))
_optimum = jit(_optimal)
