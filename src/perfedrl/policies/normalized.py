"""Normalization of a policy's observations and rewards by running moments."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.contracts import delegated
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.policies.base import Decide, Policy
from perfedrl.policies.mlp import observation_size
from perfedrl.saved_policies import descriptions
from perfedrl.saved_policies.decisions import LARGEST, SMALLEST, decide_normalized, standard_deviation
from perfedrl.types import Array, Noise, Params, Trajectory

NORMALIZER = "normalizer"
"""The key of the moments among the parameters; under it are "observations" and "rewards"."""


class Normalized(Policy):
    """A policy with normalized observations, rewards or both.

    Parameters are {"policy": the inner policy's, "normalizer": moments}. The moments are averages over episodes of the
    averages over an episode's decisions: of each observation component and its square, and of the squared
    reward-to-go. They are raw moments, so that their average over agents is the moment of all agents' episodes.

    Moments are trained by the same steps as the policy (in training, in adaptation and at deployment), which maximize
    minus `rate` times half their squared distance from those of a batch: a step of size beta moves them a share of
    beta `rate` towards the batch's. Scores and returns treat them as constants. They start at mean 0 and mean square 1.

    `size` is the number of observation components that are normalized, None where none are. Components after them are
    not: they are numbers of the agent's own task (`policies/sighted.py`), constant within its episodes.
    """

    policy: Any
    size: int | None = eqx.field(static=True)
    rewards: bool = eqx.field(static=True)
    rate: float = eqx.field(static=True)

    def __init__(self, policy: Any, size: int | None = None, rewards: bool = False, rate: float = 1.0):
        if size is None and not rewards:
            raise UserError("expected observations, rewards or both to be normalized; got neither")
        if not 0 < rate < float("inf"):
            raise UserError(f"the normalization's rate must be a finite number > 0; it is {rate}")
        self.policy, self.size, self.rewards, self.rate = policy, size, rewards, float(rate)

    noise = delegated("policy")
    actions = delegated("policy")
    action_size = delegated("policy")
    states = delegated("policy")

    # Members that a normalized policy lacks: tables, gains and constants are those of unscaled states.
    probabilities = gain = None
    G = M = Lambda = regularity_within = None

    # Members that follow from the inner policy's, which sees normalized observations.

    @property
    def entropy(self) -> Callable[[Params, PyTree[Array]], Float[Array, ""]] | None:
        entropy = self.policy.entropy
        return None if entropy is None else lambda params, obs: entropy(params["policy"], self.seen(params, obs))

    @property
    def distribution(self) -> Callable[[Params, PyTree[Array]], PyTree[Array]] | None:
        inner = self.policy.distribution
        return None if inner is None else lambda params, obs: inner(params["policy"], self.seen(params, obs))

    divergence = delegated("policy")

    @property
    def variance(self) -> Callable[[Params], Float[Array, ""]] | None:
        variance = self.policy.variance
        return None if variance is None else lambda params: variance(params["policy"])

    @property
    def values(self) -> Callable[[Params, Trajectory], Float[Array, "m T"]] | None:
        values = self.policy.values
        return None if values is None else lambda params, batch: values(params["policy"], self._seen(params, batch))

    @property
    def value_fit(self) -> Callable[[Params, Trajectory, Float[Array, "m T"]], Float[Array, ""]] | None:
        fit = self.policy.value_fit
        if fit is None:
            return None
        return lambda params, batch, target: fit(params["policy"], self._seen(params, batch), target)

    @property
    def is_context(self) -> Callable[[Params], PyTree[bool]] | None:
        inner = self.policy.is_context
        return None if inner is None else lambda params: self._is_context(inner, params)

    @property
    def model_fit(self) -> Callable[[Params, Trajectory, str], Float[Array, ""]] | None:
        fit = self.policy.model_fit
        if fit is None:
            return None
        return lambda params, batch, target: fit(params["policy"], self._seen(params, batch), target)

    @property
    def in_numpy(self) -> Callable[[Params], Decide] | None:
        inner = self.policy.in_numpy
        return None if inner is None else lambda params: self._in_numpy(inner, params)

    @property
    def description(self) -> descriptions.NormalizedDescription | None:
        inner = self.policy.description
        return None if inner is None else descriptions.NormalizedDescription(observations=self.size, policy=inner)

    def init(self, key: PRNGKeyArray) -> Params:
        moments = {}
        if self.size is not None:
            moments["observations"] = {"mean": jnp.zeros(self.size), "square": jnp.ones(self.size)}
        if self.rewards:
            moments["rewards"] = {"square": jnp.ones(1)}
        return {"policy": self.policy.init(key), NORMALIZER: moments}

    def sample(self, params: Params, obs: PyTree[Array], u: Noise) -> PyTree[Array]:
        return self.policy.sample(params["policy"], self.seen(params, obs), u)

    def log_prob(self, params: Params, obs: PyTree[Array], action: PyTree[Array]) -> Float[Array, ""]:
        return self.policy.log_prob(params["policy"], self.seen(params, obs), action)

    def seen(self, params: Params, obs: PyTree[Array]) -> PyTree[Array]:
        """Normalize one or many observations: in standard deviations from their mean, clipped."""
        if self.size is None:
            return obs
        mean, std = self.mean_and_std(params)
        if np.shape(obs)[-1:] == (self.size,):
            return jnp.clip((obs - mean) / std, -LARGEST, LARGEST)
        seen = jnp.clip((obs[..., : self.size] - mean) / std, -LARGEST, LARGEST)
        return jnp.concatenate([seen, obs[..., self.size :]], axis=-1)

    def _seen(self, params: Params, batch: Trajectory) -> Trajectory:
        return batch._replace(obs=self.seen(params, batch.obs))

    def _is_context(self, inner: Any, params: Params) -> PyTree[bool]:
        moments = jax.tree.map(lambda _: False, params[NORMALIZER])
        return {"policy": inner(params["policy"]), NORMALIZER: moments}

    def _in_numpy(self, inner: Any, params: Params) -> Decide:
        decide = inner(params["policy"])
        if self.size is None:
            return decide
        mean, std = (np.asarray(x) for x in self.mean_and_std(params))
        return partial(decide_normalized, decide, mean, std)

    def mean_and_std(self, params: Params) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
        """Return mean and standard deviation of each observation component."""
        mean, square = (jax.lax.stop_gradient(params[NORMALIZER]["observations"][name]) for name in ("mean", "square"))
        return mean, standard_deviation(mean, square, jnp)

    def scaled(self, params: Params, returns: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return returns in units of their root mean square, clipped."""
        if not self.rewards:
            return returns
        square = jax.lax.stop_gradient(params[NORMALIZER]["rewards"]["square"][0])
        return jnp.clip(returns / jnp.sqrt(jnp.maximum(square, SMALLEST)), -LARGEST, LARGEST)

    def moments(self, batch: Trajectory, returns: Float[Array, "m T"]) -> Params:
        """Return the moments of a batch with unnormalized returns; episodes count equally, whatever their length."""
        share = batch.mask / jnp.maximum(jnp.sum(batch.mask, axis=-1, keepdims=True), 1) / len(batch.mask)
        found = {}
        if self.size is not None:

            def mean(x):
                return jnp.sum(share[..., None] * x, axis=(0, 1))

            obs = batch.obs[..., : self.size]
            found["observations"] = {"mean": mean(obs), "square": mean(obs**2)}
        if self.rewards:
            found["rewards"] = {"square": jnp.sum(share * returns**2, keepdims=True)[0]}
        return found

    def moment_fit(self, params: Params, batch: Trajectory, returns: Float[Array, "m T"]) -> Float[Array, ""]:
        """Return minus `rate` times half the squared distance of the moments from those of a batch."""

        def apart(x, y):
            return jnp.sum((x - y) ** 2)

        squares = jax.tree.map(apart, params[NORMALIZER], self.moments(batch, returns))
        return -0.5 * self.rate * jax.tree.reduce(jnp.add, squares)


def normalized(fleet: Fleet, policy: Any, observations: bool, rewards: bool, rate: float) -> Normalized:
    """Normalize a policy's observations, rewards or both; observations must be vectors."""
    size = None
    if observations:
        try:
            size = observation_size(fleet, "normalized") - (0 if fleet.sight is None else len(fleet.sight.mean))
        except UserError as error:
            raise UserError(
                "normalized observations must be vectors of numbers, and those of this fleet are not: "
                'set observations = "none" under [normalization]'
            ) from error
    return Normalized(policy, size, rewards, rate)
