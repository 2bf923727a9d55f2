"""The interface between algorithms and agents: stochastic gradients, curvature products and values."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.compilation import jit
from perfedrl.envs.base import DataTask
from perfedrl.errors import UserError
from perfedrl.estimators.advantages import ADVANTAGES, Advantage, scaled
from perfedrl.estimators.baselines import BASELINES, Baseline
from perfedrl.estimators.batch import SampledBatch, make_batch
from perfedrl.estimators.curvature import CURVATURES, Curvature, FromBatch
from perfedrl.estimators.gradient import Credit, policy_gradient, regularizer, reward_to_go
from perfedrl.estimators.supervised import DataObjective
from perfedrl.policies.base import check_policy
from perfedrl.rollout import outline, sampler
from perfedrl.types import Array, Params, Sampler, Scalar, Trajectory

SLICE = 100
"""Trajectories per slice when a CPU computes a curvature product, so that intermediate results fit in its cache."""


@runtime_checkable
class Objective(Protocol):
    """One agent's objective J_i, to be maximized; every call draws m fresh samples with its own key.

    Implemented for an MDP with a policy (`PolicyObjective`) and for a data set with a loss (`DataObjective`).
    """

    @property
    def traceable(self) -> bool:
        """Whether JAX can trace the calls; if not, algorithms loop in Python."""
        ...

    def gradient(self, params: Params, key: PRNGKeyArray, m: int) -> Params:
        """Estimate grad J_i(theta) without bias."""
        ...

    def curvature(self, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params:
        """Estimate grad^2 J_i(theta) v."""
        ...

    def value(self, params: Params, key: PRNGKeyArray, m: int) -> Float[Array, ""]:
        """Estimate J_i(theta) without bias."""
        ...


class Forms(NamedTuple):
    """How an agent estimates: curvature form, baseline, entropy weight, advantages.

    Forms are hashable, since programs depend on them.
    """

    curvature: Curvature
    baseline: Baseline
    entropy: float
    advantage: Advantage

    def credit(self, policy: Any, params: Params, batch: Trajectory, discount: Scalar) -> Credit:
        """Compute the credit of every decision in a batch that was sampled with `params`."""
        return self.advantage(self.baseline, policy, params, batch, discount)


CURVATURE, BASELINE, ADVANTAGE = "causal", "leave-one-out", "reward-to-go"
"""Default forms: unbiased like the paper's, equally cheap, and far less noisy (docs/estimators.md)."""

PAPER: dict[str, Any] = {"curvature": "score", "baseline": "none"}
"""The paper's forms."""


def forms(
    curvature: str | Curvature = CURVATURE,
    baseline: str | Baseline = BASELINE,
    entropy: float = 0.0,
    advantage: str | Advantage = ADVANTAGE,
) -> Forms:
    """Build `Forms` from registry names or objects; `entropy` weights the policy's entropy in the objective."""
    if not 0 <= entropy < float("inf"):
        raise UserError(f"entropy must be a finite number >= 0; it is {entropy}")
    return Forms(
        CURVATURES[curvature]() if isinstance(curvature, str) else curvature,
        BASELINES[baseline]() if isinstance(baseline, str) else baseline,
        entropy,
        ADVANTAGES[advantage]() if isinstance(advantage, str) else advantage,
    )


class PolicyObjective(eqx.Module):
    """The expected return of a policy on one agent's MDP, estimated from the trajectories of a sampler."""

    sampler: Sampler
    policy: Any
    discount: float = eqx.field(static=True)
    forms: Forms = eqx.field(static=True, default=forms())

    @property
    def traceable(self) -> bool:
        return self.sampler.traceable

    def gradient(self, params: Params, key: PRNGKeyArray, m: int) -> Params:
        return self.gradient_of(params, self.sampler.sample(params, key, m))

    def gradient_of(self, params: Params, batch: Trajectory) -> Params:
        """Estimate the gradient from a batch sampled with these parameters."""
        return _gradient(self.policy, self.forms, self.discount, params, batch)

    def batch(self, params: Params, key: PRNGKeyArray, m: int) -> SampledBatch:
        """Sample m trajectories as a batch that answers gradients, ratios and divergences for any parameters."""
        trajectories = self.sampler.sample(params, key, m)
        f = self.forms
        return _batch(self.policy, f.advantage, f.baseline, f.entropy, self.discount, params, trajectories)

    def curvature(self, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params:
        return self.forms.curvature(self, params, v, key, m)

    def product(self, form: FromBatch, params: Params, batch: Trajectory, v: Params) -> Params:
        """Estimate a curvature product with `form` from a batch sampled with these parameters."""
        return _product(self.policy, form, self.forms, self.discount, params, batch, v)

    def value(self, params: Params, key: PRNGKeyArray, m: int) -> Float[Array, ""]:
        return _value(self.discount, self.sampler.sample(params, key, m))


class Sampled(eqx.Module):
    """Factory of sampled objectives: a policy and the forms of its estimators, applied to a task."""

    policy: Any
    forms: Forms = eqx.field(static=True)

    def __init__(
        self,
        policy: Any,
        curvature: str | Curvature = CURVATURE,
        baseline: str | Baseline = BASELINE,
        entropy: float = 0.0,
        advantage: str | Advantage = ADVANTAGE,
    ):
        check_policy(policy)
        self.policy, self.forms = policy, forms(curvature, baseline, entropy, advantage)

    def __call__(self, task: Any) -> Any:
        """Build a `PolicyObjective`, or a `DataObjective` if the task has examples instead of episodes."""
        if isinstance(task, DataTask):
            return DataObjective(task.examples, self.policy, self.forms)
        return PolicyObjective(sampler(task, self.policy), self.policy, task.discount, self.forms)

    def outline(self, task: Any) -> Any:
        """Build an objective with the right shapes that JAX can trace even if the task itself cannot be traced."""
        if isinstance(task, DataTask):
            return self(task)
        return PolicyObjective(outline(task, self.policy), self.policy, task.discount, self.forms)


# The functions below are jitted so that batches of a Python sampler are processed by compiled code too. Inside a
# caller's jit they are inlined.


def gradient_of_batch(policy: Any, forms: Forms, discount: float, params: Params, batch: Trajectory) -> Params:
    """Estimate the gradient of the return, eq. (2) with a baseline, plus the regularizer's gradient."""
    credited = forms.credit(policy, params, batch, discount)
    g = policy_gradient(policy.log_prob, params, batch, credited.advantage)
    returns = scaled(policy, params, reward_to_go(batch, discount))
    more = regularizer(policy, batch, returns, discount, forms.entropy)
    return g if more is None else optax.tree.add(g, jax.grad(more)(params))


def _hvp(
    policy: Any, form: FromBatch, forms: Forms, discount: float, params: Params, batch: Trajectory, v: Params
) -> Params:
    def product(batch: Trajectory, credit: Credit) -> Params:
        return form.product(policy, params, batch, credit, v, discount)

    return mean_over_slices(product, batch, forms.credit(policy, params, batch, discount))


def mean_over_slices(f: Callable[[Trajectory, Credit], Params], batch: Trajectory, credit: Credit) -> Params:
    """Evaluate a mean over trajectories, slice by slice on a CPU and in one call on other devices."""
    m = len(batch.reward)
    if jax.default_backend() != "cpu" or m <= SLICE:
        return f(batch, credit)
    whole = m // SLICE

    def cut(x: Array) -> Array:
        return x[: whole * SLICE].reshape(whole, SLICE, *x.shape[1:])

    means = jax.lax.map(lambda part: f(*part), jax.tree.map(cut, (batch, credit)))
    mean = jax.tree.map(lambda x: jnp.sum(x, axis=0) * (SLICE / m), means)
    if rest := m - whole * SLICE:
        tail = f(*jax.tree.map(lambda x: x[-rest:], (batch, credit)))
        mean = jax.tree.map(lambda x, y: x + y * (rest / m), mean, tail)
    return mean


def mean_return(discount: float, batch: Trajectory) -> Float[Array, ""]:
    """Compute the mean discounted return of a batch."""
    return jnp.mean(reward_to_go(batch, discount)[:, 0])


_value = jit(mean_return, static_argnums=0)
_gradient = jit(gradient_of_batch, static_argnums=(1, 2))
_product = jit(_hvp, static_argnums=(1, 2, 3))
_batch = jit(make_batch, static_argnums=(1, 2, 3, 4))
