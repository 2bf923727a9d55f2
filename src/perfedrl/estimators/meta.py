"""The stochastic meta-policy gradient, eq. (7).

It takes adaptation steps, estimates the gradient at the adapted parameters, and applies the chain rule of the steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Key, PRNGKeyArray, PyTree

from perfedrl.estimators.curvature_control import CurvatureControl, Uncontrolled
from perfedrl.estimators.objective import Objective
from perfedrl.estimators.tree_math import scale_by
from perfedrl.types import Array, Params, StepSize


class StepKeys(NamedTuple):
    """Random keys of the three independent batches of one local step.

    FedAvg-PG uses the outer key for its batch, so that it sees the same trajectories as Per-FedAvg-PG at alpha = 0.
    """

    inner: PRNGKeyArray
    curvature: PRNGKeyArray
    outer: PRNGKeyArray


class AdaptationPath(NamedTuple):
    """Start point and gradient of each adaptation step (leading axis nu), and the final parameters.

    Trajectories are not stored: memory grows by one parameter vector and one gradient per step.
    """

    starts: Params
    gradients: Params
    end: Params


def adapt(agent: Objective, theta: Params, alpha: StepSize, key: PRNGKeyArray, m: int, steps: int = 1) -> Params:
    """Take policy-gradient steps theta~ = theta + alpha g_in from m trajectories each (Algorithm 1, lines 14-15).

    With m = 0 the parameters are returned unchanged.
    """
    return theta if m == 0 else adaptation(agent, theta, alpha, key, m, steps).end


def adaptation(
    agent: Objective, theta: Params, alpha: StepSize, key: PRNGKeyArray, m: int, steps: int = 1
) -> AdaptationPath:
    """Take `steps` adaptation steps from m trajectories each and record their path."""

    def step(theta: Params, key: PRNGKeyArray) -> tuple[Params, tuple[Params, Params]]:
        g = agent.gradient(theta, key, m)
        return optax.tree.add(theta, scale_by(alpha, g)), (theta, g)

    end, (starts, gradients) = iterate(agent, step, theta, step_keys(key, steps))
    return AdaptationPath(starts, gradients, end)


def first_order_gradient(
    agent: Objective, theta: Params, alpha: StepSize, keys: StepKeys, m_in: int, m_out: int, steps: int = 1
) -> Params:
    """Estimate grad F_i by g_out under the adapted policy, without curvature (Section 5)."""
    return agent.gradient(adapt(agent, theta, alpha, keys.inner, m_in, steps), keys.outer, m_out)


def meta_gradient(
    agent: Objective, theta: Params, alpha: StepSize, keys: StepKeys, m_in: int, m_h: int, m_out: int, steps: int = 1
) -> Params:
    """Estimate grad F_i by (I + alpha H-hat) g_out from three independent batches, eq. (7), METAGRAD of Algorithm 1.

    After several adaptation steps, g_out is multiplied with the Jacobian of each, estimated from its own batch.
    """
    path = adaptation(agent, theta, alpha, keys.inner, m_in, steps)
    g_out = agent.gradient(path.end, keys.outer, m_out)
    return backpropagate_adaptation(agent, path, alpha, g_out, keys.curvature, m_h, Uncontrolled(), ()).gradient


class AdaptationGradients(NamedTuple):
    """Gradients with respect to the parameters before adaptation and to the step size, and the control's new state.

    `step` holds the derivative with respect to each parameter's own step size. Its sum is the derivative with respect
    to a shared step size.
    """

    gradient: Params
    step: Params
    state: PyTree


def backpropagate_adaptation(
    agent: Objective,
    path: AdaptationPath,
    alpha: StepSize,
    g_out: Params,
    key: PRNGKeyArray,
    m_h: int,
    control: CurvatureControl,
    state: PyTree,
) -> AdaptationGradients:
    """Apply the chain rule of the adaptation steps to the outer gradient.

    Computes (I + alpha H(theta_0)) ... (I + alpha H(theta_{nu-1})) g_out without forming a matrix. Each factor is
    estimated from m_h trajectories; with m_h = 0 the curvature is dropped.
    """
    steps = len(jax.tree.leaves(path.gradients)[0])
    if m_h == 0:
        return AdaptationGradients(g_out, jax.tree.map(lambda g, v: g.sum(axis=0) * v, path.gradients, g_out), state)

    def factor(carry: tuple, at: tuple) -> tuple[tuple, Params]:
        (v, state), (start, g, key) = carry, at
        term, state = control(agent, start, alpha, v, key, m_h, state)
        return (optax.tree.add(v, term), state), jax.tree.map(lambda g, v: g * v, g, v)

    last_first = jax.tree.map(lambda x: x[::-1], (path.starts, path.gradients, step_keys(key, steps)))
    (gradient, state), by_step = iterate(agent, factor, (g_out, state), last_first)
    return AdaptationGradients(gradient, jax.tree.map(lambda x: x.sum(axis=0), by_step), state)


def step_keys(key: PRNGKeyArray, steps: int) -> Key[Array, " nu"]:
    """Derive one key per step; a single step uses `key` itself."""
    return key[None] if steps == 1 else jax.random.split(key, steps)


def iterate(agent: Objective, f: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """Run `jax.lax.scan` if JAX can trace the agent, otherwise the same loop in Python."""
    count = len(jax.tree.leaves(xs)[0])
    if agent.traceable and count > 1:
        return jax.lax.scan(f, carry, xs)
    made = []
    for i in range(count):
        carry, out = f(carry, jax.tree.map(lambda x, i=i: x[i], xs))
        made.append(out)
    return carry, jax.tree.map(lambda *ys: jax.numpy.stack(ys), *made)
