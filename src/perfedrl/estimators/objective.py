"""What an algorithm sees of an agent: a stochastic gradient, a curvature product and a value."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray

from perfedrl.compilation import jit
from perfedrl.estimators.curvature import CURVATURES
from perfedrl.estimators.gradient import policy_gradient
from perfedrl.estimators.returns import reward_to_go
from perfedrl.rollout import RolloutSampler, Sampler
from perfedrl.types import Array, Params, Trajectory

Weights = Callable[..., Array]
"""(batch, discount) -> what each decision's score is weighted with, [m, T]: the reward-to-go, or it less a baseline."""

SLICE = 100
"""Trajectories whose curvature product a CPU computes at a time: what they need then stays in its cache."""


@runtime_checkable
class Objective(Protocol):
    """One agent's objective J_i, to be maximized. Every call draws m fresh samples with its own key.

    An MDP and a policy make one, a data set and a loss another; algorithms that need no more take either.
    """

    @property
    def traceable(self) -> bool:
        """Whether JAX can trace through the calls; if not, algorithms loop in Python."""
        ...

    def gradient(self, params: Params, key: PRNGKeyArray, m: int) -> Params:
        """An unbiased estimate of grad J_i(theta)."""
        ...

    def curvature(self, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params:
        """An estimate of grad^2 J_i(theta) v."""
        ...

    def value(self, params: Params, key: PRNGKeyArray, m: int) -> Float[Array, ""]:
        """An unbiased estimate of J_i(theta)."""
        ...


class PolicyObjective(eqx.Module):
    """The expected return of a policy on one agent's MDP, estimated from the trajectories of a sampler."""

    sampler: Sampler
    policy: Any
    discount: float = eqx.field(static=True)
    curvature_form: str = eqx.field(static=True, default="score")
    weights: Weights = eqx.field(static=True, default=reward_to_go)

    @property
    def traceable(self) -> bool:
        return self.sampler.traceable

    def gradient(self, params: Params, key: PRNGKeyArray, m: int) -> Params:
        batch = self.sampler.sample(params, key, m)
        return _gradient(self.policy, self.weights, self.discount, params, batch)

    def curvature(self, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params:
        batch = self.sampler.sample(params, key, m)
        return _curvature(self.policy, self.weights, self.discount, self.curvature_form, params, batch, v)

    def value(self, params: Params, key: PRNGKeyArray, m: int) -> Float[Array, ""]:
        return jnp.mean(reward_to_go(self.sampler.sample(params, key, m), self.discount)[:, 0])


class Sampled(eqx.Module):
    """Makes the objective of an agent that lives in a JAX environment: a policy, and the forms of its estimators."""

    policy: Any
    curvature: str = eqx.field(static=True, default="score")
    weights: Weights = eqx.field(static=True, default=reward_to_go)

    def __call__(self, task: Any) -> PolicyObjective:
        sampler = RolloutSampler(task, self.policy)
        return PolicyObjective(sampler, self.policy, task.discount, self.curvature, self.weights)


# Jitted so that a Python sampler's batches are processed by compiled code too; inside a caller's jit they dissolve.


def _pg(policy: Any, weights: Weights, discount: float, params: Params, batch: Trajectory) -> Params:
    return policy_gradient(policy.log_prob, params, batch, weights(batch, discount))


def _hvp(
    policy: Any, weights: Weights, discount: float, form: str, params: Params, batch: Trajectory, v: Params
) -> Params:
    product = lambda batch, w: CURVATURES[form](policy.log_prob, params, batch, w, v)  # noqa: E731
    return mean_over_slices(product, batch, weights(batch, discount))


def mean_over_slices(f: Callable[[Trajectory, Array], Params], batch: Trajectory, w: Float[Array, "m T"]) -> Params:
    """A function that is a mean over trajectories, computed on a CPU slice by slice, elsewhere at once."""
    m = len(w)
    if jax.default_backend() != "cpu" or m <= SLICE:
        return f(batch, w)
    whole = m // SLICE
    cut = lambda x: x[: whole * SLICE].reshape(whole, SLICE, *x.shape[1:])  # noqa: E731
    means = jax.lax.map(lambda part: f(*part), jax.tree.map(cut, (batch, w)))
    mean = jax.tree.map(lambda x: jnp.sum(x, axis=0) * (SLICE / m), means)
    if rest := m - whole * SLICE:
        tail = f(*jax.tree.map(lambda x: x[-rest:], (batch, w)))
        mean = jax.tree.map(lambda x, y: x + y * (rest / m), mean, tail)
    return mean


_gradient = jit(_pg, static_argnums=(1, 2))
_curvature = jit(_hvp, static_argnums=(1, 2, 3))
