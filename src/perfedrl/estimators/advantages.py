"""Advantages: the weight that each decision of a batch has in a policy gradient.

A form is a hashable callable `(baseline, policy, params, batch, discount) -> Credit`. "reward-to-go" is the paper's,
minus a baseline; "gae" is generalized advantage estimation (Schulman et al., 2016), which most methods since use.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.errors import UserError
from perfedrl.estimators.baselines import Baseline, Critic, Ridge, conjugate_gradients, state_features
from perfedrl.estimators.gradient import UNBIASED, Credit, reward_to_go
from perfedrl.registry import registry
from perfedrl.types import Array, Params, Scalar, Trajectory

CRITICS = ("ridge", "others", "network")
STRENGTH, SOLVER_ITERATIONS = 1e-4, 40
SMALLEST_DEVIATION = 1e-8
"""Added to the standard deviation of advantages, for batches in which all are equal."""


class Advantage(ABC):
    """A form of advantages; subclasses are frozen dataclasses, since programs depend on them."""

    @property
    @abstractmethod
    def bias(self) -> str:
        """The causes of a bias of the policy gradient; `UNBIASED` if there are none."""

    @abstractmethod
    def __call__(self, baseline: Baseline, policy: Any, params: Params, batch: Trajectory, discount: Scalar) -> Credit:
        """Compute the credit of every decision in a batch that was sampled with `params`."""


@dataclass(frozen=True)
class RewardToGo(Advantage):
    """Reward-to-go, discounted from the start of the episode, minus the config's baseline, eq. (2)."""

    @property
    def bias(self) -> str:
        return UNBIASED

    def __call__(self, baseline: Baseline, policy: Any, params: Params, batch: Trajectory, discount: Scalar) -> Credit:
        return credit(policy, baseline, discount, params, batch)


@dataclass(frozen=True)
class GAE(Advantage):
    """Generalized advantages: sums of temporal differences of a critic, with weights (gamma lambda)^l.

    - `gae_lambda`: 1 sums all differences and so trusts the rewards; 0 takes the first one and trusts the critic.
    - `critic`: "ridge" is fitted to the batch itself; "others" to the other trajectories of the batch; "network" is the
      value network of an 'actor-critic' policy.
    - `normalize`: subtract the mean over the batch's decisions and divide by their standard deviation and by the mean
      number of decisions in an episode. A gradient is then a mean over decisions, whatever the unit of rewards.
    - `discounted`: weight decision t by gamma^t, as the gradient of the discounted return does; most methods do not.
    - `times_variance`: multiply by the mean variance of a Gaussian policy's actions. A step then moves the mean action
      by a distance that does not depend on the variance.

    The config's baseline is not used: the critic is one.
    """

    gae_lambda: float = 0.95
    critic: Literal["ridge", "others", "network"] = "ridge"
    normalize: bool = True
    discounted: bool = False
    times_variance: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.gae_lambda <= 1:
            raise UserError(f"gae_lambda must lie in [0, 1]; it is {self.gae_lambda}")
        if self.critic not in CRITICS:
            raise UserError(f"the critic of gae must be one of {', '.join(CRITICS)}; it is {self.critic!r}")

    @property
    def bias(self) -> str:
        causes = {
            "gae_lambda below 1 trusts the critic": self.gae_lambda < 1,
            "the critic saw the batch that it judges": self.critic == "ridge",
            "advantages are normalized": self.normalize,
            "decisions are not discounted from the start": not self.discounted,
        }
        return "; ".join(cause for cause, holds in causes.items() if holds) or UNBIASED

    def __call__(self, baseline: Baseline, policy: Any, params: Params, batch: Trajectory, discount: Scalar) -> Credit:
        decay = discount ** jnp.arange(batch.reward.shape[-1], dtype=batch.reward.dtype)
        values = self._values(policy, params, batch, discount, decay) * batch.mask
        following = jnp.pad(values[:, 1:], ((0, 0), (0, 1)))  # 0 after the end of an episode
        differences = (batch.reward + discount * following - values) * batch.mask
        advantage = sums_to_go(differences, discount * self.gae_lambda)
        if self.discounted:
            advantage = advantage * decay
        advantage = normalized(advantage, batch.mask) if self.normalize else scaled(policy, params, advantage)
        if self.times_variance:
            if policy.variance is None:
                raise UserError(f"times_variance needs a Gaussian policy, and {type(policy).__name__} is none")
            advantage = advantage * jax.lax.stop_gradient(policy.variance(params))
        return Credit(advantage)

    def _values(
        self, policy: Any, params: Params, batch: Trajectory, discount: Scalar, decay: Float[Array, " T"]
    ) -> Float[Array, "m T"]:
        """Return the critic's values, discounted from each decision on."""
        if self.critic == "ridge":
            largest = sums_to_go(jnp.ones_like(batch.reward[:1]), discount)
            phi = state_features(policy, batch) * (largest * batch.mask)[..., None]
            return fitted(phi, sums_to_go(batch.reward, discount))
        if self.critic == "network" and policy.values is None:
            raise UserError("critic = \"network\" needs a policy with a value network, such as 'actor-critic'")
        baseline = Critic() if self.critic == "network" else Ridge()
        from_start = baseline(policy, params, batch, reward_to_go(batch, discount), discount)
        return jnp.where(decay > 0, from_start / jnp.where(decay > 0, decay, 1), 0)


def sums_to_go(x: Float[Array, "m T"], factor: Scalar) -> Float[Array, "m T"]:
    """Compute x_t + factor x_{t+1} + factor^2 x_{t+2} + ..., to the end of each row."""

    def step(later: Any, now: Any) -> tuple[Any, Any]:
        total = now + factor * later
        return total, total

    return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.T, reverse=True)[1].T


def normalized(advantage: Float[Array, "m T"], mask: Float[Array, "m T"]) -> Float[Array, "m T"]:
    """Return advantages of mean 0 and variance 1 over decisions, divided by the mean length of an episode."""
    count = jnp.sum(mask)
    centred = (advantage - jnp.sum(advantage * mask) / count) * mask
    deviation = jnp.sqrt(jnp.sum(centred**2) / count)
    return centred / (deviation + SMALLEST_DEVIATION) * (len(mask) / count)


def fitted(phi: Float[Array, "m T p"], target: Float[Array, "m T"]) -> Float[Array, "m T"]:
    """Predict targets by ridge regression on features, fitted to the same decisions.

    Features are brought to one size first, so that few iterations of conjugate gradients suffice.
    """
    size = jnp.sqrt(jnp.mean(phi**2, axis=(0, 1)))
    x = phi / jnp.maximum(size, np.finfo(phi.dtype).tiny)
    flat = x.reshape(-1, x.shape[-1])
    gram = jnp.einsum("np,nq->pq", flat, flat) / len(flat) + STRENGTH * jnp.eye(flat.shape[-1], dtype=phi.dtype)
    moment = jnp.mean(flat * target.reshape(-1, 1), axis=0)
    w = conjugate_gradients(gram[None], moment[None], SOLVER_ITERATIONS)[0]
    return jnp.sum(x * w, axis=-1)


def credit(policy: Any, baseline: Baseline, discount: Scalar, params: Params, batch: Trajectory) -> Credit:
    """Compute reward-to-go (scaled if the policy normalizes rewards) and baseline of every decision in a batch."""
    returns = scaled(policy, params, reward_to_go(batch, discount))
    return Credit(returns, baseline(policy, params, batch, returns, discount))


def scaled(policy: Any, params: Params, returns: Float[Array, "..."]) -> Float[Array, "..."]:
    """Scale returns if the policy normalizes rewards; return them unchanged otherwise."""
    return returns if policy.scaled is None else policy.scaled(params, returns)


def gae(
    gae_lambda: float = 0.95,
    critic: str = "ridge",
    normalize: bool = True,
    discounted: bool = False,
    times_variance: bool = False,
) -> GAE:
    """Generalized advantage estimation with a critic."""
    return GAE(gae_lambda, critic, normalize, discounted, times_variance)  # type: ignore[arg-type]


ADVANTAGES = registry("advantage", reward_to_go=RewardToGo, gae=gae)
