"""What an algorithm sees of an agent: a stochastic gradient, a curvature product and a value."""

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
from perfedrl.estimators.baselines import BASELINES, Baseline
from perfedrl.estimators.curvature import CURVATURES, Curvature, FromBatch
from perfedrl.estimators.gradient import Credit, policy_gradient, regularizer, reward_to_go
from perfedrl.estimators.supervised import DataObjective
from perfedrl.policies.base import check_policy
from perfedrl.rollout import outline, sampler
from perfedrl.types import Array, Params, Sampler, Scalar, Trajectory

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


class Forms(NamedTuple):
    """How an agent's trajectories become estimates: programs are compiled for it."""

    curvature: Curvature
    baseline: Baseline
    entropy: float


CURVATURE, BASELINE = "causal", "leave-one-out"
"""The defaults: unbiased like the paper's forms, at no cost, and with far less noise (docs/estimators.md)."""

PAPER: dict[str, Any] = {"curvature": "score", "baseline": "none"}
"""The paper's forms."""


def forms(curvature: str | Curvature = CURVATURE, baseline: str | Baseline = BASELINE, entropy: float = 0.0) -> Forms:
    """Forms go by their names in the registries, or as they are. `entropy` is the weight of a bonus for indecision."""
    if not 0 <= entropy < float("inf"):
        raise UserError(f"entropy must be a finite number >= 0; it is {entropy}")
    return Forms(
        CURVATURES[curvature]() if isinstance(curvature, str) else curvature,
        BASELINES[baseline]() if isinstance(baseline, str) else baseline,
        entropy,
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
        """The estimate that a batch under these parameters gives."""
        return _gradient(self.policy, self.forms, self.discount, params, batch)

    def curvature(self, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params:
        return self.forms.curvature(self, params, v, key, m)

    def product(self, form: FromBatch, params: Params, batch: Trajectory, v: Params) -> Params:
        """A curvature product of the form from a batch under these parameters."""
        return _product(self.policy, form, self.forms.baseline, self.discount, params, batch, v)

    def value(self, params: Params, key: PRNGKeyArray, m: int) -> Float[Array, ""]:
        return _value(self.discount, self.sampler.sample(params, key, m))


class Sampled(eqx.Module):
    """Makes the objective of an agent of its task: a policy, and the forms of its estimators."""

    policy: Any
    forms: Forms = eqx.field(static=True)

    def __init__(
        self,
        policy: Any,
        curvature: str | Curvature = CURVATURE,
        baseline: str | Baseline = BASELINE,
        entropy: float = 0.0,
    ):
        check_policy(policy)
        self.policy, self.forms = policy, forms(curvature, baseline, entropy)

    def __call__(self, task: Any) -> Any:
        """A `PolicyObjective`; a `DataObjective` where the agent has examples and no episodes."""
        if isinstance(task, DataTask):
            return DataObjective(task.examples, self.policy, self.forms)
        return PolicyObjective(sampler(task, self.policy), self.policy, task.discount, self.forms)

    def outline(self, task: Any) -> Any:
        """The objective as far as shapes go: JAX can trace it whatever the agent is."""
        if isinstance(task, DataTask):
            return self(task)
        return PolicyObjective(outline(task, self.policy), self.policy, task.discount, self.forms)


def credit(policy: Any, baseline: Baseline, discount: Scalar, params: Params, batch: Trajectory) -> Credit:
    """Reward-to-go, normalized where the policy does so, and baseline of every decision in a batch."""
    returns = scaled(policy, params, reward_to_go(batch, discount))
    return Credit(returns, baseline(policy, params, batch, returns, discount))


def scaled(policy: Any, params: Params, returns: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns in the unit of a policy that normalizes rewards; as they are for any other."""
    return returns if policy.scaled is None else policy.scaled(params, returns)


# Jitted so that a Python sampler's batches are processed by compiled code too; inside a caller's jit they dissolve.


def gradient_of_batch(policy: Any, forms: Forms, discount: float, params: Params, batch: Trajectory) -> Params:
    """The gradient of the return, eq. (2) with a baseline, and of what is maximized along with it."""
    credited = credit(policy, forms.baseline, discount, params, batch)
    g = policy_gradient(policy.log_prob, params, batch, credited.advantage)
    more = regularizer(policy, batch, credited.returns, discount, forms.entropy)
    return g if more is None else optax.tree.add(g, jax.grad(more)(params))


def _hvp(
    policy: Any, form: FromBatch, baseline: Baseline, discount: float, params: Params, batch: Trajectory, v: Params
) -> Params:
    product = lambda batch, credit: form.product(policy, params, batch, credit, v, discount)  # noqa: E731
    return mean_over_slices(product, batch, credit(policy, baseline, discount, params, batch))


def mean_over_slices(f: Callable[[Trajectory, Credit], Params], batch: Trajectory, credit: Credit) -> Params:
    """A function that is a mean over trajectories, computed on a CPU slice by slice, elsewhere at once."""
    m = len(batch.reward)
    if jax.default_backend() != "cpu" or m <= SLICE:
        return f(batch, credit)
    whole = m // SLICE
    cut = lambda x: x[: whole * SLICE].reshape(whole, SLICE, *x.shape[1:])  # noqa: E731
    means = jax.lax.map(lambda part: f(*part), jax.tree.map(cut, (batch, credit)))
    mean = jax.tree.map(lambda x: jnp.sum(x, axis=0) * (SLICE / m), means)
    if rest := m - whole * SLICE:
        tail = f(*jax.tree.map(lambda x: x[-rest:], (batch, credit)))
        mean = jax.tree.map(lambda x, y: x + y * (rest / m), mean, tail)
    return mean


def mean_return(discount: float, batch: Trajectory) -> Float[Array, ""]:
    """The mean discounted return of a batch."""
    return jnp.mean(reward_to_go(batch, discount)[:, 0])


_value = jit(mean_return, static_argnums=0)
_gradient = jit(gradient_of_batch, static_argnums=(1, 2))
_product = jit(_hvp, static_argnums=(1, 2, 3))
