"""Curvature products as central differences of policy gradients, without second derivatives."""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from jaxtyping import PRNGKeyArray

from perfedrl.errors import UserError
from perfedrl.types import Params


@dataclass(frozen=True)
class CentralDifferences:
    """(grad J(theta + eps v/|v|) - grad J(theta - eps v/|v|)) |v| / 2 eps, half of the trajectories on each side.

    This is Per-FedAvg's Hessian-free variant, with a step of length eps for every v. With `common` random numbers both
    sides use the same uniforms, so that much of the noise cancels; otherwise each side draws its own.
    """

    step: float = 0.3
    common: bool = True

    bias = "eps^2: that of the central difference"

    def __post_init__(self) -> None:
        if not 0 < self.step < float("inf"):
            raise UserError(f"central differences: step must be a finite number > 0; it is {self.step}")

    def __call__(self, agent: Any, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params:
        if m < 2:
            raise UserError(f"central differences need at least two trajectories, one a side; this batch has {m}")
        length = optax.tree.norm(v)
        unit = optax.tree.scale(1 / jax.numpy.maximum(length, 1e-30), v)
        above, below = (key, key) if self.common else jax.random.split(key)

        def side(sign: int, key: PRNGKeyArray) -> Params:
            return agent.gradient(optax.tree.add_scale(params, sign * self.step, unit), key, m // 2)

        return optax.tree.scale(length / (2 * self.step), optax.tree.sub(side(1, above), side(-1, below)))


def central_common(step: float = 0.3) -> CentralDifferences:
    """Central differences under common random numbers."""
    return CentralDifferences(step, common=True)


def central_fresh(step: float = 0.3) -> CentralDifferences:
    """Central differences with fresh random numbers on each side."""
    return CentralDifferences(step, common=False)
