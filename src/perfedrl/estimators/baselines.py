"""Baselines that are subtracted from the reward-to-go to reduce variance without adding bias.

Each is a function `(policy, params, batch, returns, discount) -> [m, T]`. The baseline of a decision may depend on its
state, on other trajectories, and on anything known before the batch was drawn, but not on the actions of its own
trajectory from that decision on. Then unbiased estimates stay unbiased.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.errors import UserError
from perfedrl.estimators.gradient import largest_to_go
from perfedrl.registry import registry
from perfedrl.types import Array, Params, Scalar, Trajectory

Baseline = Callable[..., Array | None]

MOST_FOLDS, ITERATIONS = 10, 12
FEW_COMPONENTS = 6
"""Largest observation size for which all products of components are features; longer ones use squares only."""


@dataclass(frozen=True)
class Nothing:
    """No baseline, as in the paper."""

    def __call__(self, policy: Any, params: Params, batch: Trajectory, returns: Array, discount: Scalar) -> None:
        return None


@dataclass(frozen=True)
class LeaveOneOut:
    """Mean reward-to-go of the other trajectories at the same decision; zero for a batch of one trajectory."""

    def __call__(
        self, policy: Any, params: Params, batch: Trajectory, returns: Float[Array, "m T"], discount: Scalar
    ) -> Float[Array, "m T"]:
        return (jnp.sum(returns, axis=0) - returns) / max(len(returns) - 1, 1)


@dataclass(frozen=True)
class Ridge:
    """Linear function of state and time features, fitted by ridge regression on other trajectories of the batch.

    The batch is cut into at most ten parts and each part is predicted from the others, so no extra samples are needed.
    """

    strength: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.strength < float("inf"):
            raise UserError(f"ridge: strength must be a finite number > 0; it is {self.strength}")

    def __call__(
        self, policy: Any, params: Params, batch: Trajectory, returns: Float[Array, "m T"], discount: Scalar
    ) -> Float[Array, "m T"]:
        phi = features(policy, batch, discount)
        w = others_fit(phi, returns, self.strength)
        return jnp.sum(phi * w[np.arange(len(returns)) % len(w)][:, None], axis=-1)


@dataclass(frozen=True)
class Critic:
    """The value network of an 'actor-critic' policy, which is trained along with the policy."""

    def __call__(
        self, policy: Any, params: Params, batch: Trajectory, returns: Float[Array, "m T"], discount: Scalar
    ) -> Float[Array, "m T"]:
        if policy.values is None:
            raise UserError("the baseline 'critic' needs a policy with a value network, such as 'actor-critic'")
        return jax.lax.stop_gradient(policy.values(params, batch)) * largest_to_go(batch, discount)


def features(policy: Any, batch: Trajectory, discount: Scalar) -> Float[Array, "m T p"]:
    """Compute features of state and remaining time, on the scale of the reward-to-go from the start of the episode."""
    return state_features(policy, batch) * (largest_to_go(batch, discount) * batch.mask)[..., None]


def state_features(policy: Any, batch: Trajectory) -> Float[Array, "m T p"]:
    """Compute features of state and remaining time.

    Numbered states are one-hot encoded. Vectors contribute their components and squares, and short ones all products.
    """
    obs, dtype = jax.tree.leaves(batch.obs), batch.reward.dtype
    if policy.states is not None and len(obs) == 1:
        x = jax.nn.one_hot(obs[0], policy.states, dtype=dtype)
    else:
        flat = jnp.concatenate([o.reshape(*batch.reward.shape, -1).astype(dtype) for o in obs], axis=-1)
        first, second = np.triu_indices(flat.shape[-1])
        if flat.shape[-1] > FEW_COMPONENTS:
            first = second = np.arange(flat.shape[-1])
        x = jnp.concatenate([jnp.ones_like(flat[..., :1]), flat, flat[..., first] * flat[..., second]], axis=-1)
    T = batch.reward.shape[-1]
    left = 1 - jnp.arange(T, dtype=dtype)[:, None] / T
    return jnp.concatenate([x, x * left], axis=-1)


def others_fit(phi: Float[Array, "m T p"], target: Float[Array, "m T"], strength: float) -> Float[Array, "k p"]:
    """Fit ridge coefficients for each of k parts of a batch on the other parts; trajectory i is in part i mod k."""
    m, _, p = phi.shape
    folds = min(m, MOST_FOLDS)

    def by_fold(x: Float[Array, "m T q"]) -> Float[Array, "k n q"]:
        whole = jnp.pad(x, ((0, -m % folds), (0, 0), (0, 0))).reshape(-1, folds, *x.shape[1:])
        return jnp.swapaxes(whole, 0, 1).reshape(folds, -1, x.shape[-1])

    x, y = by_fold(phi), by_fold(target[..., None])
    gram = jnp.einsum("knp,knq->kpq", x, x)
    moment = jnp.sum(x * y, axis=1)
    system = jnp.sum(gram, axis=0) - gram + strength * m * jnp.eye(p, dtype=phi.dtype)
    return conjugate_gradients(system, jnp.sum(moment, axis=0) - moment)


def conjugate_gradients(
    system: Float[Array, "k p p"], b: Float[Array, "k p"], iterations: int = ITERATIONS
) -> Float[Array, "k p"]:
    """Solve A x = b approximately for k positive definite systems.

    An approximate solution suffices: any function of the other trajectories is a valid baseline. The fixed number of
    iterations avoids a library solver, which can stall inside a compiled loop on two cores.
    """
    tiny = np.finfo(b.dtype).tiny

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        x, r, d, rr = carry
        Ad = jnp.sum(system * d[:, None, :], axis=-1)
        a = rr / jnp.maximum(jnp.sum(d * Ad, axis=-1), tiny)
        x, r = x + a[:, None] * d, r - a[:, None] * Ad
        new = jnp.sum(r * r, axis=-1)
        return (x, r, r + (new / jnp.maximum(rr, tiny))[:, None] * d, new), None

    return jax.lax.scan(step, (jnp.zeros_like(b), b, b, jnp.sum(b * b, axis=-1)), length=iterations)[0][0]


def ridge(strength: float = 1e-3) -> Ridge:
    """Ridge regression on features of state and time, fitted on other trajectories of the batch."""
    return Ridge(strength)


BASELINES = registry("baseline", none=Nothing, leave_one_out=LeaveOneOut, ridge=ridge, critic=Critic)
