"""Softmax-FedPG: local policy-gradient steps of softmax policies, optionally with entropy rewards and bounds."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import AveragedParameters, ServerState, average, local_steps, static
from perfedrl.algorithms.checks import check_counts, check_positive, check_step_sizes, with_trajectories
from perfedrl.compilation import jit
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Forms, Objective, StepKeys, adapt
from perfedrl.estimators.objective import gradient_of_batch
from perfedrl.exact.tabular import ExactObjective, J
from perfedrl.types import Array, Params, Scalar, Trajectory


def none_for_zero(value: float) -> float | None:
    """Return None for a number that is 0; traced values pass."""
    return None if isinstance(value, int | float) and value == 0 else value


class SoftmaxFedPG(AveragedParameters):
    """Federated softmax policy gradient in heterogeneous environments (Labbi et al., 2025).

    `regularization` lambda changes the return to E sum_t gamma^t (r_t + lambda H(pi(.|s_t))), so that the entropy
    counts in the values of earlier states; `largest` bounds the absolute value of every parameter, onto which the
    server projects the mean. Without either it is FedAvg-PG. Adaptation is on the plain return.
    """

    alpha: float
    beta: float
    local_steps: int = static(20)
    m: int = static(10)
    # None is no leaf, so that nothing is compiled for a regularization of 0.
    regularization: float | None = eqx.field(default=0.0, converter=none_for_zero)
    largest: float | None = None

    def __check_init__(self) -> None:
        check_step_sizes(self.alpha, self.beta)
        check_counts(local_steps=self.local_steps, m=self.m)
        check_positive(regularization=self.regularization, largest=self.largest)

    @property
    def trajectories_per_round(self) -> int:
        return self.local_steps * self.m

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require a softmax policy over finitely many actions in finitely many states."""
        if policy.probabilities is None:
            raise UserError(
                f"softmax-fedpg needs a softmax policy over finitely many states, table or log-linear; this one is "
                f"{type(policy).__name__}. fedavg-pg takes the same local steps with any policy"
            )

    def client(
        self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray
    ) -> tuple[Params, tuple[()]]:
        """Take tau local steps along the gradient of the return, regularized or not."""

        def step(theta: Params, keys: StepKeys) -> Params:
            return optax.tree.add_scale(theta, self.beta, self.gradient(agent, theta, keys.outer))

        return local_steps(step, message, agent, key, self.local_steps), state

    def gradient(self, agent: Objective, theta: Params, key: PRNGKeyArray) -> Params:
        if self.regularization is None:
            return agent.gradient(theta, key, self.m)
        return regularized_gradient(agent, theta, self.regularization, key, self.m)

    def server(self, state: ServerState, uploads: Params, weights: Float[Array, " n"]) -> ServerState:
        mean, largest = average(uploads, weights), self.largest
        if largest is None:
            return ServerState(mean)
        return ServerState(jax.tree.map(lambda x: jnp.clip(x, -largest, largest), mean))

    def personalize(self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return adapt(agent, message, self.alpha, key, m)


def regularized_gradient(agent: Objective, theta: Params, weight: Scalar, key: PRNGKeyArray, m: int) -> Params:
    """Estimate the gradient of the return plus `weight` times the entropy of every decision from m trajectories."""
    if isinstance(agent, ExactObjective):
        return jax.grad(lambda theta: regularized_return(agent, theta, weight))(theta)
    sampling = with_trajectories(agent, "softmax-fedpg with regularization")
    batch = sampling.sampler.sample(theta, key, m)
    return _of_batch(sampling.policy, sampling.forms, sampling.discount, theta, batch, weight)


def regularized_return(agent: ExactObjective, theta: Params, weight: Scalar) -> Float[Array, ""]:
    """Compute J(theta) with `weight` times the entropy of every state added to its rewards."""
    entropy = jax.vmap(lambda s: agent.policy.entropy(theta, s))(jnp.arange(agent.task.states))
    rewarded = eqx.tree_at(lambda task: task.r, agent.task, agent.task.r + weight * entropy[:, None])
    return J(agent.policy, rewarded, theta)


def regularized_of_batch(
    policy: Any, forms: Forms, discount: float, theta: Params, batch: Trajectory, weight: Scalar
) -> Params:
    """Compute the policy gradient with entropy rewards, plus the derivative of the entropy in the visited states."""
    decay = discount ** jnp.arange(batch.reward.shape[-1], dtype=batch.reward.dtype)

    def bonus(theta: Params) -> Float[Array, "m T"]:
        return weight * batch.mask * jax.vmap(jax.vmap(lambda obs: policy.entropy(theta, obs)))(batch.obs)

    g = gradient_of_batch(policy, forms, discount, theta, batch._replace(reward=batch.reward + bonus(theta)))
    own = jax.grad(lambda theta: jnp.sum(decay * bonus(theta)) / len(batch.reward))(theta)
    return optax.tree.add(g, own)


_of_batch = jit(regularized_of_batch, static_argnums=(1, 2))
