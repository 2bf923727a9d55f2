"""One step in a trust region: along the natural gradient, as far as a limit on the divergence allows (TRPO)."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.scipy.sparse.linalg import cg
from jaxtyping import Bool, Float

from perfedrl.algorithms.base import select
from perfedrl.algorithms.checks import check_counts
from perfedrl.algorithms.learned_adaptation import Adaptation, Learned
from perfedrl.errors import UserError
from perfedrl.estimators import SampledBatch
from perfedrl.estimators.tree_math import dot, ratio
from perfedrl.types import Array, Params, Scalar

Product = Callable[[Learned], Learned]


@dataclass(frozen=True)
class TrustRegion(Adaptation):
    """How the step is found: damping, iterations of conjugate gradients, most halvings of the step.

    With `first_order` the adaptation's gradient counts as constant when surrogate and divergence are differentiated.
    """

    damping: float
    iterations: int
    backtracks: int
    first_order: bool = True

    def __post_init__(self) -> None:
        check_counts(iterations=self.iterations, backtracks=self.backtracks)
        if not 0 <= self.damping < float("inf"):
            raise UserError(f"damping must be a finite number >= 0; it is {self.damping}")


def improve(
    how: TrustRegion,
    learned: Learned,
    alpha: Scalar,
    delta: Scalar,
    inner: SampledBatch | None,
    outer: SampledBatch,
) -> Learned:
    """Take one step on the outer batch, which was sampled with the adapted parameters.

    It is the longest of s, s/2, s/4, ... that raises the surrogate and keeps the divergence of the adapted policy
    within delta; s is as long as delta allows to second order. If none does, nothing changes.
    """

    def adapt(new: Learned) -> Params:
        return how.adapted(new, alpha, inner)

    gradient, product = derivatives(how, learned, alpha, inner, outer)
    direction = natural_direction(product, gradient, how.iterations)
    length = jnp.sqrt(ratio(2 * delta, dot(direction, product(direction))))
    before = outer.surrogate(adapt(learned))

    def allowed(new: Learned) -> Bool[Array, ""]:
        after = adapt(new)
        return (outer.surrogate(after) > before) & (outer.divergence(after) <= delta)

    return line_search(allowed, learned, optax.tree.scale(length, direction), how.backtracks)


def derivatives(
    how: TrustRegion, learned: Learned, alpha: Scalar, inner: SampledBatch | None, outer: SampledBatch
) -> tuple[Learned, Product]:
    """Compute the gradient of the surrogate, and products with the damped Hessian of the divergence.

    At the parameters of sampling the divergence has its minimum, so its Hessian in terms of what is learned is J^T F J,
    with the Fisher matrix F of the adapted policy and the Jacobian J of the adaptation: no third derivatives occur.
    """
    after, jacobian = jax.linearize(lambda new: how.adapted(new, alpha, inner), learned)
    transposed = jax.linear_transpose(jacobian, learned)
    _, fisher = jax.linearize(jax.grad(outer.divergence), after)

    def product(v: Learned) -> Learned:
        (curved,) = transposed(fisher(jacobian(v)))
        return optax.tree.add_scale(curved, how.damping, v)

    (gradient,) = transposed(outer.gradient(after))
    return gradient, product


def natural_direction(product: Product, gradient: Learned, iterations: int) -> Learned:
    """Solve for the direction whose product is the gradient, by conjugate gradients, up to rounding."""
    precision = float(jnp.finfo(jnp.result_type(*jax.tree.leaves(gradient))).eps)
    return cg(product, gradient, tol=precision, maxiter=iterations)[0]


def line_search(
    allowed: Callable[[Learned], Bool[Array, ""]], start: Learned, step: Learned, backtracks: int
) -> Learned:
    """Return the first allowed one of start + step, start + step / 2, ..., after at most so many halvings, or start."""

    def point(share: Float[Array, ""]) -> Learned:
        return optax.tree.add_scale(start, share, step)

    def goes_on(tried: tuple) -> Bool[Array, ""]:
        share, found = tried
        return ~found & (share > 0.5**backtracks)

    def halve(tried: tuple) -> tuple:
        share = tried[0] / 2
        return share, allowed(point(share))

    share, found = jax.lax.while_loop(goes_on, halve, (jnp.asarray(2.0), jnp.asarray(False)))
    return select(found, point(share), start)
