"""The stochastic meta-policy gradient: adapt, outer gradient, curvature."""

from typing import NamedTuple

import optax
from jaxtyping import PRNGKeyArray

from perfedrl.estimators.objective import Objective
from perfedrl.types import Params, Scalar


class StepKeys(NamedTuple):
    """The keys of the three independent batches of one local step.

    FedAvg-PG draws its batch with the outer key, so that at alpha = 0 the two methods see the same trajectories.
    """

    inner: PRNGKeyArray
    curvature: PRNGKeyArray
    outer: PRNGKeyArray


def adapt(agent: Objective, theta: Params, alpha: Scalar, key: PRNGKeyArray, m: int) -> Params:
    """theta~ = theta + alpha g_in, one policy-gradient step from m trajectories (lines 14-15 of Algorithm 1).

    Without trajectories, m = 0, there is no step.
    """
    if m == 0:
        return theta
    return optax.tree.add_scale(theta, alpha, agent.gradient(theta, key, m))


def first_order_gradient(
    agent: Objective, theta: Params, alpha: Scalar, keys: StepKeys, m_in: int, m_out: int
) -> Params:
    """The Hessian-free estimate of grad F_i: g_out under the adapted policy, Section 5."""
    return agent.gradient(adapt(agent, theta, alpha, keys.inner, m_in), keys.outer, m_out)


def meta_gradient(
    agent: Objective, theta: Params, alpha: Scalar, keys: StepKeys, m_in: int, m_h: int, m_out: int
) -> Params:
    """Estimate grad F_i by (I + alpha H-hat) g_out from three independent batches, eq. (7), METAGRAD of Algorithm 1."""
    g_out = first_order_gradient(agent, theta, alpha, keys, m_in, m_out)
    return optax.tree.add_scale(g_out, alpha, agent.curvature(theta, g_out, keys.curvature, m_h))
