"""Robust aggregation: combine the agents' uploads where some of them may be faulty or hostile.

An aggregation is a hashable object that turns uploads, stacked along the agents' axis, and their weights into one
upload. It uses sums, not dot products, so that a seed's result does not depend on what runs beside it.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PyTree

from perfedrl.algorithms.base import Algorithm, ServerState, average
from perfedrl.algorithms.wrapper import Wrapper, check_federated
from perfedrl.errors import UserError
from perfedrl.registry import registry
from perfedrl.types import Array

LARGEST = 1e15
"""Replaces larger coordinates and NaN in a robust aggregation; its square is still finite."""

ROUNDING = 1e-6
"""Shares of the total weight that differ by less count as equal."""

NEVER = 1e-30
"""Smallest distance that is divided by."""

MOST_ITERATIONS = 10_000


@runtime_checkable
class Aggregation(Protocol):
    """A function that combines uploads into one; `least_agents` is the smallest number of uploads."""

    @property
    def least_agents(self) -> int: ...

    def __call__(self, uploads: PyTree, weights: Float[Array, " n"]) -> PyTree: ...


@dataclass(frozen=True)
class Mean:
    """The weighted mean, line 10 of Algorithm 1. A single agent can move it arbitrarily."""

    least_agents = 1

    def __call__(self, uploads: PyTree, weights: Float[Array, " n"]) -> PyTree:
        return average(uploads, weights)


@dataclass(frozen=True)
class Median:
    """The weighted median of every coordinate (Yin et al., 2018); the midpoint of two values that tie.

    Agents with less than half of the weight cannot move a coordinate out of the range of the others.
    """

    least_agents = 1

    def __call__(self, uploads: PyTree, weights: Float[Array, " n"]) -> PyTree:
        return jax.tree.map(lambda x: median(x, weights), _finite(uploads))


@dataclass(frozen=True)
class TrimmedMean:
    """The weighted mean of every coordinate without the largest and the smallest `share` of the weight.

    An agent at the edge counts with the rest of its weight. Agents with at most `share` of the weight cannot move a
    coordinate out of the range of the others.
    """

    share: float = 0.2
    least_agents = 1

    def __post_init__(self) -> None:
        if not 0 <= self.share < 0.5:
            raise UserError(f"share must lie in [0, 0.5), or everybody would be cut; it is {self.share}")

    def __call__(self, uploads: PyTree, weights: Float[Array, " n"]) -> PyTree:
        return jax.tree.map(lambda x: trimmed_mean(x, weights, self.share), _finite(uploads))


@dataclass(frozen=True)
class GeometricMedian:
    """The point whose weighted sum of distances to the uploads, as whole vectors, is least (Pillutla et al., 2022).

    Weiszfeld's iteration from the median of coordinates, `iterations` times. Distances below `smoothing` times the
    median distance are raised to it. Agents with a share q < 1/2 of the weight cannot move it further than 2 (1 - q) /
    (1 - 2 q) R from a point that has all others within R.
    """

    iterations: int = 64
    smoothing: float = 1e-4
    least_agents = 1

    def __post_init__(self) -> None:
        if not 1 <= self.iterations <= MOST_ITERATIONS:
            raise UserError(f"iterations must be a whole number from 1 to {MOST_ITERATIONS}; it is {self.iterations}")
        if not 0 < self.smoothing <= 1:
            raise UserError(f"smoothing must lie in (0, 1]; it is {self.smoothing}")

    def __call__(self, uploads: PyTree, weights: Float[Array, " n"]) -> PyTree:
        uploads = _finite(uploads)
        start = jax.tree.map(lambda x: median(x, weights), uploads)
        shortest = jnp.maximum(self.smoothing * median(_distances(uploads, start), weights), NEVER)

        def closer(_, point: PyTree) -> PyTree:
            return average(uploads, weights / jnp.maximum(_distances(uploads, point), shortest))

        return jax.lax.fori_loop(0, self.iterations, closer, start)


@dataclass(frozen=True)
class Krum:
    """The upload whose n - f - 2 nearest others are nearest (Blanchard et al., 2017), f = `malicious`.

    With `keep` > 1 it is the weighted mean of the `keep` uploads with the best scores, multi-Krum. Weights do not enter
    the scores. Needs n >= 2 f + 3 agents, and `keep` of them beside f that are not kept. An upload of at most f
    malicious agents is kept only within sqrt((n - f - 2) / (n - 2 f - 1)) D of an honest one, D the honest ones'
    diameter.
    """

    malicious: int = 1
    keep: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (("malicious", self.malicious, 0), ("keep", self.keep, 1)):
            if value < least:
                raise UserError(f"{name} must be at least {least}; it is {value}")

    @property
    def least_agents(self) -> int:
        return max(2 * self.malicious + 3, self.keep + self.malicious)

    def __call__(self, uploads: PyTree, weights: Float[Array, " n"]) -> PyTree:
        n = len(weights)
        if n < self.least_agents:
            raise UserError(
                f"krum with malicious = {self.malicious} and keep = {self.keep} needs at least {self.least_agents} "
                f"agents; {n} sent something"
            )
        uploads = _finite(uploads)
        apart = jax.lax.map(lambda one: _distances(uploads, one) ** 2, uploads)
        others = jnp.sort(jnp.where(jnp.eye(n, dtype=bool), jnp.inf, apart), axis=1)
        best = jnp.argsort(jnp.sum(others[:, : n - self.malicious - 2], axis=1))[: self.keep]
        return average(jax.tree.map(lambda x: x[best], uploads), weights[best])


AGGREGATIONS = registry(
    "aggregation",
    mean=Mean,
    median=Median,
    trimmed_mean=TrimmedMean,
    geometric_median=GeometricMedian,
    krum=Krum,
)


class Robust(Wrapper):
    """Combine all uploads into one by an aggregation before the inner server sees them."""

    aggregation: Aggregation = eqx.field(static=True)

    def __init__(self, inner: Algorithm, aggregation: Aggregation):
        check_federated(inner, "upload to aggregate")
        self.inner, self.aggregation = inner, aggregation

    @property
    def least_agents(self) -> int:
        return max(self.aggregation.least_agents, self.inner.least_agents)

    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        one = self.aggregation(uploads, weights)
        return self.inner.server(state, jax.tree.map(lambda x: x[None], one), jnp.ones(1, weights.dtype))


def median(x: Float[Array, "n *rest"], weights: Float[Array, " n"]) -> Float[Array, "*rest"]:
    """Weighted median along the first axis: the mean of the lower and the upper median, which differ in a tie."""
    x, until = _sorted(x, weights)

    def at(reached: Array) -> Array:
        """The first value along the axis whose share of the weight has reached the bound."""
        return jnp.take_along_axis(x, jnp.argmax(reached, axis=0)[None], axis=0)[0]

    return 0.5 * (at(until >= 0.5 - ROUNDING) + at(until > 0.5 + ROUNDING))


def trimmed_mean(x: Float[Array, "n *rest"], weights: Float[Array, " n"], share: float) -> Float[Array, "*rest"]:
    """Weighted mean along the first axis of the values between the quantiles `share` and 1 - `share`."""
    x, until = _sorted(x, weights)
    since = jnp.concatenate([jnp.zeros_like(until[:1]), until[:-1]])
    kept = jnp.minimum(until, 1 - share) - jnp.maximum(since, share)
    kept = jnp.where(kept > ROUNDING, kept, 0)
    return jnp.sum(kept * x, axis=0) / jnp.sum(kept, axis=0)


def _sorted(x: Array, weights: Array) -> tuple[Array, Array]:
    """Sort values along the first axis; also return the share of the weight up to each."""
    order = jnp.argsort(x, axis=0)
    until = jnp.cumsum((weights / jnp.sum(weights)).astype(x.dtype)[order], axis=0)
    return jnp.take_along_axis(x, order, axis=0), until


def _distances(uploads: PyTree, point: PyTree) -> Float[Array, " n"]:
    """Euclidean distance of every upload from a point, over all leaves together."""

    def squares(x: Array, y: Array) -> Array:
        return jnp.sum((x - y) ** 2, axis=tuple(range(1, x.ndim)))

    return jnp.sqrt(jax.tree.reduce(jnp.add, jax.tree.map(squares, uploads, point)))


def _finite(uploads: PyTree) -> PyTree:
    """Replace NaN and coordinates too large to square by `LARGEST`, so that uploads can be compared."""
    return jax.tree.map(lambda x: jnp.clip(jnp.nan_to_num(x, nan=LARGEST), -LARGEST, LARGEST), uploads)
