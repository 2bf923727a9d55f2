"""Curvature control: how much of a noisy curvature term to believe.

A control turns an agent's estimate of alpha H v into the term that is added to v. As the curvature batch grows, each
tends to the exact estimator, and as it shrinks to nothing, to the first-order one.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.errors import UserError
from perfedrl.estimators.objective import Objective
from perfedrl.estimators.tree_math import clipped_to_length, dot, is_scalar, ratio, scale_by
from perfedrl.registry import registry
from perfedrl.types import Array, Params, StepSize

LIMIT = 0.3
RUNNING_MEAN_DECAY = 0.9
"""The share that what is known of signal and noise keeps from step to step."""


@runtime_checkable
class CurvatureControl(Protocol):
    """Hashable; what it remembers from step to step stays with the agent."""

    def init(self) -> PyTree: ...

    def __call__(
        self, agent: Objective, theta: Params, alpha: StepSize, v: Params, key: PRNGKeyArray, m: int, state: PyTree
    ) -> tuple[Params, PyTree]:
        """The term to add to v, from m trajectories, and what to remember."""
        ...


@dataclass(frozen=True)
class Uncontrolled:
    """The estimate as it is, eq. (7)."""

    def init(self) -> tuple[()]:
        return ()

    def __call__(
        self, agent: Objective, theta: Params, alpha: StepSize, v: Params, key: PRNGKeyArray, m: int, state: PyTree
    ) -> tuple[Params, PyTree]:
        return curvature_term(agent, theta, alpha, v, key, m), state


@dataclass(frozen=True)
class Limited:
    """The estimate, clipped where it is longer than limit sqrt(m) |v|.

    The noise of a mean over m trajectories has a length of order 1/sqrt(m), so the limit loosens as it abates.
    """

    limit: float = LIMIT

    def __post_init__(self) -> None:
        check_limit(self.limit)

    def init(self) -> tuple[()]:
        return ()

    def __call__(
        self, agent: Objective, theta: Params, alpha: StepSize, v: Params, key: PRNGKeyArray, m: int, state: PyTree
    ) -> tuple[Params, PyTree]:
        return limited_term(curvature_term(agent, theta, alpha, v, key, m), v, m, self.limit), state


class ShrinkageState(NamedTuple):
    """Running means, relative to |v|^2: of the squared length of the term's mean, estimated without bias, and of the
    squared length of the estimate itself, which holds its noise too.
    """

    signal: Float[Array, ""]
    signal_and_noise: Float[Array, ""]


@dataclass(frozen=True)
class Shrunk:
    """The estimate times the share of its squared length that is signal, as far as that is known.

    Two halves of the batch have independent noise: their inner product estimates the squared length of the mean
    without bias. Both are averaged over steps, since a single step says little; and as what is known may be wrong, the
    term is limited too.
    """

    limit: float = LIMIT

    def __post_init__(self) -> None:
        check_limit(self.limit)

    def init(self) -> ShrinkageState:
        return ShrinkageState(jnp.zeros(()), jnp.zeros(()))

    def __call__(
        self,
        agent: Objective,
        theta: Params,
        alpha: StepSize,
        v: Params,
        key: PRNGKeyArray,
        m: int,
        state: ShrinkageState,
    ) -> tuple[Params, ShrinkageState]:
        if m < 2:
            return jax.tree.map(jnp.zeros_like, v), state
        sizes = m // 2, m - m // 2
        one, two = (
            curvature_term(agent, theta, alpha, v, k, n) for k, n in zip(jax.random.split(key), sizes, strict=True)
        )
        mean = optax.tree.scale(0.5, optax.tree.add(one, two))
        scale = ratio(1 - RUNNING_MEAN_DECAY, dot(v, v))
        now = ShrinkageState(
            RUNNING_MEAN_DECAY * state.signal + scale * dot(one, two),
            RUNNING_MEAN_DECAY * state.signal_and_noise + scale * dot(mean, mean),
        )
        share = jnp.clip(ratio(now.signal, now.signal_and_noise), 0, 1)
        return limited_term(optax.tree.scale(share, mean), v, m, self.limit), now


def curvature_term(agent: Objective, theta: Params, alpha: StepSize, v: Params, key: PRNGKeyArray, m: int) -> Params:
    """Alpha H v from m trajectories; H (alpha v) where every parameter has its own step size. None without any."""
    if m == 0:
        return jax.tree.map(jnp.zeros_like, v)
    if is_scalar(alpha):
        return optax.tree.scale(alpha, agent.curvature(theta, v, key, m))
    return agent.curvature(theta, scale_by(alpha, v), key, m)


def limited_term(curvature_term: Params, v: Params, m: int, limit: float) -> Params:
    """A curvature term from m trajectories, no longer than limit sqrt(m) |v|."""
    return clipped_to_length(curvature_term, limit * m**0.5 * optax.tree.norm(v))


def check_limit(limit: float) -> None:
    if not 0 < limit < float("inf"):
        raise UserError(f"limit must be a finite number > 0; it is {limit}")


CONTROLS = registry("curvature control", none=Uncontrolled, limit=Limited, shrink=Shrunk)
