"""FedSARSA: federated on-policy temporal-difference control with linear action values, for one shared policy."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import AveragedParameters, local_steps, static
from perfedrl.algorithms.checks import check_counts, check_positive, check_step_sizes, with_trajectories
from perfedrl.compilation import jit
from perfedrl.envs import Fleet, TabularMDP
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, StepKeys, adapt
from perfedrl.exact.tabular import ExactObjective
from perfedrl.policies import LogLinearSoftmax, TableSoftmax
from perfedrl.types import Array, Params, Scalar, Trajectory


class FedSARSA(AveragedParameters):
    """Local SARSA steps on each agent's own transitions, then averaging (Zhang et al., 2024).

    Action values are Q(s, a) = temperature * theta . phi(s, a), the policy's logits in the unit of rewards, so that
    softmax(Q / temperature) is the policy: agents send its parameters, and every local step both evaluates and improves
    it. A step from m trajectories moves the weights of Q by beta times the mean over transitions of the temporal
    difference times phi, and so theta by beta / temperature times that. Exact agents take its expectation.
    """

    alpha: float
    beta: float
    local_steps: int = static(5)
    m: int = static(30)
    temperature: float = 1.0

    def __check_init__(self) -> None:
        check_step_sizes(self.alpha, self.beta)
        check_positive(temperature=self.temperature)
        check_counts(local_steps=self.local_steps, m=self.m)

    @property
    def trajectories_per_round(self) -> int:
        return self.local_steps * self.m

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require a policy whose logits are linear action values, and episodes with a transition."""
        finite = isinstance(fleet.train, TabularMDP) or not fleet.traceable
        if not finite or not isinstance(policy, TableSoftmax | LogLinearSoftmax):
            raise UserError(
                "fedsarsa needs the policy 'table' or 'log-linear' on agents with finitely many states (a fleet of "
                "TabularMDP): the policy's logits are its action values; fedavg-pg learns any policy"
            )
        if fleet.train.horizon < 1:
            raise UserError("fedsarsa needs episodes of two decisions or more (horizon >= 1); fedavg-pg needs but one")

    def client(
        self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray
    ) -> tuple[Params, tuple[()]]:
        """Take tau local SARSA steps."""
        return local_steps(partial(self.step, agent), (message, state), agent, key, self.local_steps)

    def step(self, agent: Objective, carry: tuple[Params, tuple[()]], keys: StepKeys) -> tuple[Params, tuple[()]]:
        """Take one local SARSA step."""
        theta, state = carry
        if isinstance(agent, ExactObjective):
            direction = expected_semi_gradient(agent.policy, agent.task, theta, self.temperature)
        else:
            agent = with_trajectories(agent, "fedsarsa")
            batch = agent.sampler.sample(theta, keys.outer, self.m)
            direction = _semi_gradient(agent.policy, agent.discount, theta, batch, self.temperature)
        return optax.tree.add_scale(theta, self.beta / self.temperature, direction), state

    def personalize(self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return adapt(agent, message, self.alpha, key, m)


def logits(policy: Any, theta: Params) -> Float[Array, "S A"]:
    """Compute theta . phi(s, a), the action values in units of the temperature."""
    if isinstance(policy, TableSoftmax):
        return theta
    return jnp.sum(jnp.asarray(policy.features, theta.dtype) * theta, axis=-1)


def semi_gradient(policy: Any, discount: float, theta: Params, batch: Trajectory, temperature: Scalar) -> Params:
    """Mean over the transitions of a batch of (r + gamma Q(s', a') - Q(s, a)) phi(s, a).

    Transitions are those between two decisions, t = 0 .. H - 1: the horizon truncates an episode and does not end it.
    The value after an early end is 0.
    """
    table = temperature * logits(policy, theta)
    q = table[batch.obs, batch.action]
    alive = batch.mask
    error = batch.reward[:, :-1] + discount * alive[:, 1:] * q[:, 1:] - q[:, :-1]
    weight = alive[:, :-1] * error / jnp.maximum(jnp.sum(alive[:, :-1]), 1)

    def weighted_values(theta: Params) -> Float[Array, ""]:
        """The function whose gradient is the sum of weight * phi(s, a)."""
        return jnp.sum(weight * logits(policy, theta)[batch.obs[:, :-1], batch.action[:, :-1]])

    return jax.grad(weighted_values)(theta)


def expected_semi_gradient(policy: Any, mdp: TabularMDP, theta: Params, temperature: Scalar) -> Params:
    """Expectation of `semi_gradient`: under the distribution of the states at t = 0 .. H - 1, averaged over t."""
    pi, q = policy.probabilities(theta), temperature * logits(policy, theta)
    law = occupancy(mdp, pi)[:, None] * pi
    error = mdp.r + mdp.discount * mdp.backup(jnp.sum(pi * q, axis=-1)) - q
    return jax.grad(lambda theta: jnp.sum(law * error * logits(policy, theta)))(theta)


def occupancy(mdp: TabularMDP, pi: Float[Array, "S A"]) -> Float[Array, " S"]:
    """Distribution of the states in which transitions start, averaged over t = 0 .. H - 1."""

    def moved(d: jax.Array) -> jax.Array:
        """The distribution of the next state, by the transpose of the policy's backup."""
        return jax.linear_transpose(lambda v: jnp.sum(pi * mdp.backup(v), axis=-1), d)(d)[0]

    start = jnp.asarray(mdp.mu, pi.dtype)
    _, laws = jax.lax.scan(lambda d, _: (moved(d), d), start, length=mdp.horizon)
    return jnp.mean(laws, axis=0)


# Jitted so that batches of a Python sampler are processed by compiled code too; a caller's jit inlines it.
_semi_gradient = jit(semi_gradient, static_argnums=1)
