"""A policy with a value network, which is trained and averaged together with it."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.contracts import delegated
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.policies.base import Decide, Policy
from perfedrl.policies.mlp import check_widths, forward, gaussian_mlp, init_layers, mlp, observation_size
from perfedrl.saved_policies import descriptions
from perfedrl.types import Array, Noise, Params, Trajectory


class ActorCritic(Policy):
    """A policy and its critic. Parameters are {"actor": the policy's, "critic": the value network's}.

    The critic's inputs are the observation and the remaining share of the horizon; its output is the reward-to-go of
    the policy as a share of the largest possible one. It is trained by the same steps as the policy (in training, in
    adaptation and at deployment), which maximize minus `rate` times half its mean squared error. As a baseline it does
    not depend on the batch it is subtracted from, and so estimates stay unbiased.
    """

    actor: Any
    widths: tuple[int, ...] = eqx.field(static=True, converter=tuple)
    rate: float = eqx.field(static=True, default=1.0)

    def __check_init__(self) -> None:
        check_widths(self.widths)
        if not 0 < self.rate < float("inf"):
            raise UserError(f"the critic's rate must be a finite number > 0; it is {self.rate}")

    # Members that follow from the actor's; its decisions do not depend on the critic.

    noise = delegated("actor")
    actions = delegated("actor")
    action_size = delegated("actor")

    @property
    def entropy(self) -> Callable[[Params, PyTree[Array]], Float[Array, ""]] | None:
        entropy = self.actor.entropy
        return None if entropy is None else lambda params, obs: entropy(params["actor"], obs)

    @property
    def distribution(self) -> Callable[[Params, PyTree[Array]], PyTree[Array]] | None:
        distribution = self.actor.distribution
        return None if distribution is None else lambda params, obs: distribution(params["actor"], obs)

    divergence = delegated("actor")

    @property
    def variance(self) -> Callable[[Params], Float[Array, ""]] | None:
        variance = self.actor.variance
        return None if variance is None else lambda params: variance(params["actor"])

    @property
    def in_numpy(self) -> Callable[[Params], Decide] | None:
        decide = self.actor.in_numpy
        return None if decide is None else lambda params: decide(params["actor"])

    @property
    def description(self) -> descriptions.ActorCriticDescription | None:
        actor = self.actor.description
        return None if actor is None else descriptions.ActorCriticDescription(actor=actor)

    # Members that a policy with a value network lacks.
    states = probabilities = gain = None
    G = M = Lambda = regularity_within = None
    scaled = moment_fit = None
    is_context = model_fit = None

    def init(self, key: PRNGKeyArray) -> Params:
        actor, critic = jax.random.split(key)
        return {"actor": self.actor.init(actor), "critic": init_layers(critic, self.widths)}

    def sample(self, params: Params, obs: PyTree[Array], u: Noise) -> PyTree[Array]:
        return self.actor.sample(params["actor"], obs, u)

    def log_prob(self, params: Params, obs: PyTree[Array], action: PyTree[Array]) -> Float[Array, ""]:
        return self.actor.log_prob(params["actor"], obs, action)

    def values(self, params: Params, batch: Trajectory) -> Float[Array, "m T"]:
        """Return the critic's values of all states that a batch visited."""
        m, T = batch.reward.shape
        left = jnp.broadcast_to(1 - jnp.arange(T, dtype=batch.reward.dtype) / T, (m, T))

        def value(obs, left):
            return forward(params["critic"], jnp.append(obs, left))[0]

        return jax.vmap(jax.vmap(value))(batch.obs, left)

    def value_fit(self, params: Params, batch: Trajectory, target: Float[Array, "m T"]) -> Float[Array, ""]:
        """Return minus `rate` times half the critic's mean squared error on a batch."""
        error = (self.values(params, batch) - target) * batch.mask
        return -0.5 * self.rate * jnp.sum(error**2) / target.size


def actor_critic(
    fleet: Fleet, hidden: Sequence[int] = (32,), critic: Sequence[int] = (32,), rate: float = 1.0
) -> ActorCritic:
    """An MLP policy and a value network, which `baseline = "critic"` subtracts from returns."""
    make = mlp if isinstance(fleet.train.actions, int) else gaussian_mlp
    actor = make(fleet, hidden)
    return ActorCritic(actor, (observation_size(fleet, "actor-critic") + 1, *critic, 1), rate)
