"""A batch of trajectories that answers for any parameters: ratios, surrogates, gradients and divergences.

Algorithms that take several steps on one batch use it. What was known when the batch was sampled is kept in it.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PyTree

from perfedrl.errors import UserError
from perfedrl.estimators.advantages import Advantage
from perfedrl.estimators.baselines import Baseline
from perfedrl.estimators.gradient import log_probs, regularizer, reward_to_go
from perfedrl.types import Array, Params, Trajectory


class SampledBatch(eqx.Module):
    """Trajectories with the advantages, log-probabilities and action distributions of the time of sampling.

    A sum over decisions is divided by the number of trajectories, as in the policy gradient, eq. (2); a divergence is a
    mean over decisions.
    """

    policy: Any
    trajectories: Trajectory
    advantage: Float[Array, "m T"]
    log_prob: Float[Array, "m T"]
    distribution: PyTree[Array]
    discount: float = eqx.field(static=True)
    entropy: float = eqx.field(static=True)

    def ratios(self, params: Params) -> Float[Array, "m T"]:
        """Probabilities of the actions under `params`, divided by those at sampling; 1 after the end of an episode."""
        return jnp.exp(log_probs(self.policy.log_prob, params, self.trajectories) - self.log_prob)

    def surrogate(self, params: Params, clip: float | None = None) -> Float[Array, ""]:
        """Sum of ratios times advantages. At the parameters of sampling its gradient is the policy gradient.

        With `clip`, a ratio beyond 1 - clip or 1 + clip has no effect where it would raise the sum, as in PPO. Further
        objectives (entropy, value network, normalization moments) are added as far as the policy has these parts.
        """
        ratios = self.ratios(params)
        weighted = ratios * self.advantage
        if clip is not None:
            weighted = jnp.minimum(weighted, jnp.clip(ratios, 1 - clip, 1 + clip) * self.advantage)
        total = jnp.sum(weighted * self.trajectories.mask) / len(weighted)
        returns = reward_to_go(self.trajectories, self.discount)
        more = regularizer(self.policy, self.trajectories, returns, self.discount, self.entropy)
        return total if more is None else total + more(params)

    def gradient(self, params: Params) -> Params:
        """Gradient of the surrogate without clipping."""
        return jax.grad(self.surrogate)(params)

    def divergence(self, params: Params) -> Float[Array, ""]:
        """Mean over decisions of KL(policy at sampling || policy with `params`)."""
        now = distributions(self.policy, params, self.trajectories)
        apart = jax.vmap(jax.vmap(self.policy.divergence))(self.distribution, now)
        return jnp.sum(apart * self.trajectories.mask) / jnp.sum(self.trajectories.mask)


def make_batch(
    policy: Any,
    advantage: Advantage,
    baseline: Baseline,
    entropy: float,
    discount: float,
    params: Params,
    trajectories: Trajectory,
) -> SampledBatch:
    """Make a batch of trajectories that were sampled with `params`."""
    if policy.divergence is None:
        raise UserError(f"{type(policy).__name__} has no divergence, which clipped steps need; take another policy")
    weights = advantage(baseline, policy, params, trajectories, discount).advantage
    log_prob, now = log_probs(policy.log_prob, params, trajectories), distributions(policy, params, trajectories)
    return SampledBatch(policy, trajectories, weights, log_prob, now, discount, entropy)


def distributions(policy: Any, params: Params, trajectories: Trajectory) -> PyTree[Array]:
    """The action distributions of a policy at all observations of some trajectories."""
    return jax.vmap(jax.vmap(lambda obs: policy.distribution(params, obs)))(trajectories.obs)
