"""The stochastic meta-policy gradient: adapt, outer gradient, back through the adaptation by curvature."""

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
    """The keys of the three independent batches of one local step.

    FedAvg-PG draws its batch with the outer key, so that at alpha = 0 the two methods see the same trajectories.
    """

    inner: PRNGKeyArray
    curvature: PRNGKeyArray
    outer: PRNGKeyArray


class AdaptationPath(NamedTuple):
    """An adaptation: where each of its steps began and which gradient it took, leading axis nu, and where it ended.

    That is all that is kept of it: one parameter vector and one gradient a step, and no trajectories.
    """

    starts: Params
    gradients: Params
    end: Params


def adapt(agent: Objective, theta: Params, alpha: StepSize, key: PRNGKeyArray, m: int, steps: int = 1) -> Params:
    """theta~ = theta + alpha g_in, a policy-gradient step from m trajectories (lines 14-15 of Algorithm 1), or several.

    Without trajectories, m = 0, there is no step.
    """
    return theta if m == 0 else adaptation(agent, theta, alpha, key, m, steps).end


def adaptation(
    agent: Objective, theta: Params, alpha: StepSize, key: PRNGKeyArray, m: int, steps: int = 1
) -> AdaptationPath:
    """Nu adaptation steps from m trajectories each."""

    def step(theta: Params, key: PRNGKeyArray) -> tuple[Params, tuple[Params, Params]]:
        g = agent.gradient(theta, key, m)
        return optax.tree.add(theta, scale_by(alpha, g)), (theta, g)

    end, (starts, gradients) = iterate(agent, step, theta, step_keys(key, steps))
    return AdaptationPath(starts, gradients, end)


def first_order_gradient(
    agent: Objective, theta: Params, alpha: StepSize, keys: StepKeys, m_in: int, m_out: int, steps: int = 1
) -> Params:
    """The Hessian-free estimate of grad F_i: g_out under the adapted policy, Section 5."""
    return agent.gradient(adapt(agent, theta, alpha, keys.inner, m_in, steps), keys.outer, m_out)


def meta_gradient(
    agent: Objective, theta: Params, alpha: StepSize, keys: StepKeys, m_in: int, m_h: int, m_out: int, steps: int = 1
) -> Params:
    """Estimate grad F_i by (I + alpha H-hat) g_out from three independent batches, eq. (7), METAGRAD of Algorithm 1.

    After several steps it is the product of their Jacobians that g_out is multiplied with, each from its own batch.
    """
    path = adaptation(agent, theta, alpha, keys.inner, m_in, steps)
    g_out = agent.gradient(path.end, keys.outer, m_out)
    return backpropagate_adaptation(agent, path, alpha, g_out, keys.curvature, m_h, Uncontrolled(), ()).gradient


class AdaptationGradients(NamedTuple):
    """A gradient at the end of an adaptation, taken back to its start: to the parameters, and to the step size.

    `step` is elementwise the derivative by each parameter's own step size; its sum is the one by a shared step size.
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
    """(I + alpha H(theta_0)) ... (I + alpha H(theta_{nu-1})) g_out, matrix-free, with m_h trajectories a factor."""
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
    """A key for each step; a single step has the key itself."""
    return key[None] if steps == 1 else jax.random.split(key, steps)


def iterate(agent: Objective, f: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` over an agent's calls, or a Python loop where JAX cannot trace them."""
    count = len(jax.tree.leaves(xs)[0])
    if agent.traceable and count > 1:
        return jax.lax.scan(f, carry, xs)
    made = []
    for i in range(count):
        carry, out = f(carry, jax.tree.map(lambda x, i=i: x[i], xs))
        made.append(out)
    return carry, jax.tree.map(lambda *ys: jax.numpy.stack(ys), *made)
