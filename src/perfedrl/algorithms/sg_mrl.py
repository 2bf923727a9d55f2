"""SG-MRL, federated like Per-FedAvg-PG: an unbiased gradient of the return after a sampled adaptation step."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import AveragedParameters, ServerState, local_steps, static
from perfedrl.algorithms.checks import check_counts, check_positive, check_step_sizes, with_trajectories
from perfedrl.compilation import jit
from perfedrl.envs.base import DataTask
from perfedrl.envs.fleet import Fleet
from perfedrl.estimators import Forms, Objective, PolicyObjective, Sampled, StepKeys, adapt, log_probs, reward_to_go
from perfedrl.estimators.curvature_control import RUNNING_MEAN_DECAY
from perfedrl.estimators.objective import gradient_of_batch, scaled
from perfedrl.estimators.tree_math import clipped_to_length
from perfedrl.types import Array, Params, Scalar, Trajectory


class ReturnAverage(NamedTuple):
    """Running mean of an agent's returns after adaptation: a decaying sum, and the sum of its weights."""

    total: Float[Array, ""]
    weight: Float[Array, ""]

    @property
    def mean(self) -> Float[Array, ""]:
        """The mean; 0 before the first return."""
        return self.total / jnp.maximum(self.weight, jnp.finfo(self.weight.dtype).tiny)

    def with_another(self, value: Float[Array, ""]) -> "ReturnAverage":
        return ReturnAverage(
            RUNNING_MEAN_DECAY * self.total + (1 - RUNNING_MEAN_DECAY) * value,
            RUNNING_MEAN_DECAY * self.weight + (1 - RUNNING_MEAN_DECAY),
        )


class SGMRL(AveragedParameters):
    """Learn an initialization for an adaptation step along a sampled gradient (Fallah et al., 2021).

    The paper's F_i(theta) = J_i(theta + alpha grad J_i(theta)) has the expected gradient inside; replacing it by an
    estimate from a batch has a bias of order 1 / m_in. The objective here is V_i(theta) = E_D[J_i(theta + alpha g(D;
    theta))], with the expectation over the m_in trajectories D outside: the expected return of an agent with m_in
    trajectories. Its gradient is estimated without bias at any m_in. Since theta also changes the distribution of D, it
    has a score term, which carries the noise of all of D.

    `score_baseline` subtracts the mean return of the agent's earlier steps from the return that multiplies the score.
    `clip`: the longest local step is beta times this. An entropy bonus and a critic, if any, are optimized along with
    the return but not credited to D; a critic is held fixed where g is differentiated.
    """

    alpha: float
    beta: float
    local_steps: int = static(5)
    m_in: int = static(10)
    m_out: int = static(10)
    clip: float | None = None
    score_baseline: bool = static(True)

    def __check_init__(self) -> None:
        check_step_sizes(self.alpha, self.beta)
        check_positive(clip=self.clip)
        check_counts(local_steps=self.local_steps, m_in=self.m_in, m_out=self.m_out)

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require agents with trajectories rather than examples."""
        if isinstance(fleet.train, DataTask):
            with_trajectories(Sampled(policy)(fleet.task(0)), "sg-mrl")

    @property
    def trajectories_per_round(self) -> int:
        return self.local_steps * (self.m_in + self.m_out)

    def init(self, params: Params) -> tuple[ServerState, ReturnAverage]:
        return ServerState(params), ReturnAverage(jnp.zeros(()), jnp.zeros(()))

    def client(
        self, message: Params, state: ReturnAverage, agent: Objective, key: PRNGKeyArray
    ) -> tuple[Params, ReturnAverage]:
        """Take tau local ascent steps along the estimated gradient of V_i."""
        sampling = with_trajectories(agent, "sg-mrl")
        return local_steps(partial(self.step, sampling), (message, state), agent, key, self.local_steps)

    def step(
        self, agent: PolicyObjective, carry: tuple[Params, ReturnAverage], keys: StepKeys
    ) -> tuple[Params, ReturnAverage]:
        """Take one local ascent step; the score baseline does not contain the batches of the step."""
        theta, seen = carry
        baseline = seen.mean if self.score_baseline else 0.0
        direction, value = debiased_gradient(agent, theta, self.alpha, keys, self.m_in, self.m_out, baseline)
        if self.clip is not None:
            direction = clipped_to_length(direction, self.clip)
        return optax.tree.add_scale(theta, self.beta, direction), seen.with_another(value)

    def personalize(self, message: Params, state: Any, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return adapt(agent, message, self.alpha, key, m)


def debiased_gradient(
    agent: PolicyObjective, theta: Params, alpha: Scalar, keys: StepKeys, m_in: int, m_out: int, baseline: Scalar
) -> tuple[Params, Float[Array, ""]]:
    """Estimate grad V_i from an inner and an outer batch, without bias, and J_i after the step from the outer batch.

    The sum of (I + alpha grad g(D)) g_out, because theta changes the step, and (J_out - baseline) grad log q(D),
    because theta changes the distribution of D. The baseline must not depend on D.
    """
    inner = agent.sampler.sample(theta, keys.inner, m_in)
    adapted = optax.tree.add_scale(theta, alpha, agent.gradient_of(theta, inner))
    outer = agent.sampler.sample(adapted, keys.outer, m_out)
    g_out = agent.gradient_of(adapted, outer)
    # The barrier keeps the compiler from sharing these returns with g_out: otherwise the bits of a seed would depend on
    # the seeds beside it.
    returns = reward_to_go(jax.lax.optimization_barrier(outer), agent.discount)
    value = jnp.mean(scaled(agent.policy, adapted, returns[:, 0]))
    moved, score = _through(agent.policy, agent.forms, agent.discount, theta, inner, g_out)
    return jax.tree.map(lambda g, moved, s: g + alpha * moved + (value - baseline) * s, g_out, moved, score), value


def _moved_and_score(
    policy: Any, forms: Forms, discount: float, theta: Params, batch: Trajectory, v: Params
) -> tuple[Params, Params]:
    """Compute grad g(D; theta) v, with the symmetric Jacobian at fixed trajectories, and grad log q(D; theta).

    The Jacobian is the mean of grad^2 nu, without the outer product of eq. (3), which the score term replaces here.
    """

    def estimate(theta: Params) -> Params:
        return gradient_of_batch(policy, forms, discount, theta, batch)

    def log_q(theta: Params) -> Float[Array, ""]:
        return jnp.sum(log_probs(policy.log_prob, theta, batch))

    return jax.jvp(estimate, (theta,), (v,))[1], jax.grad(log_q)(theta)


_through = jit(_moved_and_score, static_argnums=(1, 2))
