"""Supervised objectives, the original setting of Per-FedAvg: a data set and a log-likelihood."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray

from perfedrl.compilation import jit
from perfedrl.envs.classification import Examples
from perfedrl.errors import UserError
from perfedrl.estimators.curvature import FromBatch
from perfedrl.types import Array, Params


class DataObjective(eqx.Module):
    """Mean log-likelihood (negative loss) of an agent's labels, estimated from m examples drawn with replacement.

    Counts of trajectories are counts of examples here. The curvature is the Hessian of the batch's log-likelihood: the
    score-function forms reduce to it because the data do not depend on the parameters. Other forms, such as central
    differences (Per-FedAvg's Hessian-free variant), are used unchanged. With `whole`, every batch is the full data set
    and the estimates are exact.
    """

    examples: Examples
    policy: Any
    forms: Any = eqx.field(static=True)
    whole: bool = eqx.field(static=True, default=False)

    traceable = True

    def __check_init__(self) -> None:
        if self.forms.entropy:
            raise UserError("agents with examples do not explore: set entropy = 0")
        if self.policy.value_fit is not None or self.policy.moment_fit is not None:
            raise UserError(
                "agents with examples have no episodes to fit a critic or a normalization to: choose a policy without "
                "these, such as 'mlp'"
            )

    def batch(self, key: PRNGKeyArray, m: int) -> Examples:
        """Draw m examples uniformly with replacement, so that any m gives unbiased estimates."""
        if self.whole:
            return self.examples
        drawn = jax.random.randint(key, (m,), 0, len(self.examples.labels))
        return jax.tree.map(lambda x: jnp.asarray(x)[drawn], self.examples)

    def gradient(self, params: Params, key: PRNGKeyArray, m: int) -> Params:
        return _gradient(self.policy, params, self.batch(key, m))

    def curvature(self, params: Params, v: Params, key: PRNGKeyArray, m: int) -> Params:
        if isinstance(self.forms.curvature, FromBatch):
            return _product(self.policy, params, self.batch(key, m), v)
        return self.forms.curvature(self, params, v, key, m)

    def value(self, params: Params, key: PRNGKeyArray, m: int) -> Float[Array, ""]:
        return _value(self.policy, params, self.batch(key, m))


def log_likelihoods(policy: Any, params: Params, batch: Examples) -> Float[Array, " m"]:
    """Log p(label | input; theta) of every example."""
    return jax.vmap(lambda x, y: policy.log_prob(params, x, y))(*batch)


def mean_log_likelihood(policy: Any, params: Params, batch: Examples) -> Float[Array, ""]:
    """Compute the objective on a batch: the mean log-likelihood of its labels."""
    return jnp.mean(log_likelihoods(policy, params, batch))


def example_outcomes(policy: Any, params: Params, batch: Examples) -> dict[str, Float[Array, " m"]]:
    """Compute "return", the log-likelihood of every example, and "accuracy", 1 where the likeliest class is right."""
    outcomes = {"return": log_likelihoods(policy, params, batch)}
    if isinstance(policy.actions, int):
        classes = jnp.arange(policy.actions)

        def every(x: Array) -> Float[Array, " A"]:
            return jax.vmap(lambda y: policy.log_prob(params, x, y))(classes)

        right = jnp.argmax(jax.vmap(every)(batch.inputs), axis=-1) == batch.labels
        outcomes["accuracy"] = right.astype(outcomes["return"].dtype)
    return outcomes


def _grad(policy: Any, params: Params, batch: Examples) -> Params:
    return jax.grad(lambda theta: mean_log_likelihood(policy, theta, batch))(params)


def _hvp(policy: Any, params: Params, batch: Examples, v: Params) -> Params:
    """Compute a Hessian-vector product, forward over reverse."""
    return jax.jvp(lambda theta: _grad(policy, theta, batch), (params,), (v,))[1]


_value, _gradient, _product = jit(mean_log_likelihood), jit(_grad), jit(_hvp)
