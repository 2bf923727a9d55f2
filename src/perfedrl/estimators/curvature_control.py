"""Curvature control: limiting or shrinking a noisy curvature term.

A control turns an agent's estimate of alpha H v into the term that is added to v. As the curvature batch grows, every
control tends to the exact estimator; with an empty batch it is the first-order estimator.
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
"""Weight of the previous value in running means of signal and noise."""


@runtime_checkable
class CurvatureControl(Protocol):
    """A rule for the curvature term, hashable; its state is kept by the agent from step to step."""

    def init(self) -> PyTree:
        """State before the first step."""
        ...

    def __call__(
        self, agent: Objective, theta: Params, alpha: StepSize, v: Params, key: PRNGKeyArray, m: int, state: PyTree
    ) -> tuple[Params, PyTree]:
        """Return the term to add to v, estimated from m trajectories, and the new state."""
        ...


@dataclass(frozen=True)
class Uncontrolled:
    """Use the estimate unchanged, eq. (7)."""

    def init(self) -> tuple[()]:
        return ()

    def __call__(
        self, agent: Objective, theta: Params, alpha: StepSize, v: Params, key: PRNGKeyArray, m: int, state: PyTree
    ) -> tuple[Params, PyTree]:
        return curvature_term(agent, theta, alpha, v, key, m), state


@dataclass(frozen=True)
class Limited:
    """Clip the estimate to the length limit sqrt(m) |v|.

    The noise of a mean over m trajectories has length of order 1/sqrt(m), so the limit loosens as the noise falls.
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
    """Running means relative to |v|^2.

    `signal` estimates the squared length of the term's mean without bias; `signal_and_noise` is the squared length of
    the estimate itself.
    """

    signal: Float[Array, ""]
    signal_and_noise: Float[Array, ""]


@dataclass(frozen=True)
class Shrunk:
    """Multiply the estimate by the estimated share of signal in its squared length.

    Two halves of the batch have independent noise, so their inner product estimates the squared length of the mean
    without bias. Signal and total are averaged over steps because one step is too noisy, and the term is limited as
    well in case these averages are wrong.
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
    """Estimate alpha H v from m trajectories; H (alpha v) with one step size per parameter; zero for m = 0."""
    if m == 0:
        return jax.tree.map(jnp.zeros_like, v)
    if is_scalar(alpha):
        return optax.tree.scale(alpha, agent.curvature(theta, v, key, m))
    return agent.curvature(theta, scale_by(alpha, v), key, m)


def limited_term(curvature_term: Params, v: Params, m: int, limit: float) -> Params:
    """Clip a curvature term from m trajectories to the length limit sqrt(m) |v|."""
    return clipped_to_length(curvature_term, limit * m**0.5 * optax.tree.norm(v))


def check_limit(limit: float) -> None:
    """Check that a limit is finite and positive."""
    if not 0 < limit < float("inf"):
        raise UserError(f"limit must be a finite number > 0; it is {limit}")


CONTROLS = registry("curvature control", none=Uncontrolled, limit=Limited, shrink=Shrunk)
