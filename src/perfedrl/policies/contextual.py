"""A policy that also sees a context: a few parameters that are adapted to an agent while the others stay."""

from collections.abc import Callable, Sequence
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
from perfedrl.policies.mlp import (
    LAST_SCALE,
    GaussianMLP,
    MLPFactored,
    MLPSoftmax,
    check_widths,
    forward,
    init_layers,
    observation_size,
)
from perfedrl.saved_policies import descriptions
from perfedrl.saved_policies.decisions import decide_appended
from perfedrl.types import Array, Noise, Params, Trajectory

SMALLEST_UNIT = 1e-6
"""The least root mean square that a component is divided by, for components that are always 0."""

CONTEXT = "context"
"""The key of the context among the parameters."""


class Contextual(Policy):
    """A policy that sees the observation and a context z, and a model that predicts with z what happens to an agent.

    Parameters are {"policy": the inner policy's, "context": z, "model": layers}; z starts at 0. The inner policy's
    observations are the agent's, followed by z. The model is a tanh network of observation, action (one-hot if there
    are finitely many) and z; each component of the observation is divided by its root mean square in the batch. Its
    first output predicts the reward, the others the change of the observation to the next decision, both divided by
    `model_scale`. Decisions do not depend on the model: it is there for adapting z.
    """

    policy: Any
    size: int = eqx.field(static=True)
    context_size: int = eqx.field(static=True)
    model_hidden: tuple[int, ...] = eqx.field(static=True, converter=tuple, default=(32,))
    model_scale: float = eqx.field(static=True, default=1.0)

    def __check_init__(self) -> None:
        check_context_size(self.context_size)
        if not 0 < self.model_scale < float("inf"):
            raise UserError(f"model_scale must be a finite number > 0; it is {self.model_scale}")
        check_widths(self.model_widths)

    @property
    def model_widths(self) -> tuple[int, ...]:
        """The widths of the model, from its inputs to the reward and the components of an observation."""
        sizes = self.policy.actions if self.policy.action_size is None else self.policy.action_size
        action = sum(sizes) if isinstance(sizes, tuple) else sizes
        return (self.size + action + self.context_size, *self.model_hidden, 1 + self.size)

    # Members that follow from the inner policy's, which sees the context too.

    noise = delegated("policy")
    actions = delegated("policy")
    action_size = delegated("policy")
    divergence = delegated("policy")

    @property
    def entropy(self) -> Callable[[Params, PyTree[Array]], Float[Array, ""]] | None:
        entropy = self.policy.entropy
        return None if entropy is None else lambda params, obs: entropy(params["policy"], seen(params, obs))

    @property
    def distribution(self) -> Callable[[Params, PyTree[Array]], PyTree[Array]] | None:
        inner = self.policy.distribution
        return None if inner is None else lambda params, obs: inner(params["policy"], seen(params, obs))

    @property
    def variance(self) -> Callable[[Params], Float[Array, ""]] | None:
        variance = self.policy.variance
        return None if variance is None else lambda params: variance(params["policy"])

    @property
    def in_numpy(self) -> Callable[[Params], Decide] | None:
        inner = self.policy.in_numpy
        return None if inner is None else lambda params: self._in_numpy(inner, params)

    @property
    def description(self) -> descriptions.ContextualDescription | None:
        inner = self.policy.description
        if inner is None:
            return None
        return descriptions.ContextualDescription(context_size=self.context_size, policy=inner)

    # Members that a policy with a context lacks.
    states = probabilities = gain = None
    G = M = Lambda = regularity_within = None
    values = value_fit = scaled = moment_fit = None

    def init(self, key: PRNGKeyArray) -> Params:
        policy, model = jax.random.split(key)
        layers = init_layers(model, self.model_widths)
        return {"policy": self.policy.init(policy), CONTEXT: jnp.zeros(self.context_size), "model": layers}

    def sample(self, params: Params, obs: Float[Array, " d"], u: Noise) -> PyTree[Array]:
        return self.policy.sample(params["policy"], seen(params, obs), u)

    def log_prob(self, params: Params, obs: Float[Array, " d"], action: PyTree[Array]) -> Float[Array, ""]:
        return self.policy.log_prob(params["policy"], seen(params, obs), action)

    def is_context(self, params: Params) -> PyTree[bool]:
        """Whether a parameter is part of the context."""
        marked = {True: jax.tree.map(lambda _: True, params), False: jax.tree.map(lambda _: False, params)}
        return {name: marked[name == CONTEXT][name] for name in params}

    def predictions(self, params: Params, batch: Trajectory) -> Float[Array, "m T k"]:
        """Predict the reward and the change of the observation at every decision of a batch."""

        def predict(obs, action):
            inputs = [obs, self._action_features(action).astype(obs.dtype), params[CONTEXT].astype(obs.dtype)]
            return forward(params["model"], jnp.concatenate(inputs))

        return jax.vmap(jax.vmap(predict))(in_equal_units(batch), batch.action)

    def model_fit(self, params: Params, batch: Trajectory, target: str) -> Float[Array, ""]:
        """Minus the model's mean squared error over the decisions of a batch; of an observation, over components too.

        `target` is "reward" or "dynamics"; for the latter the last decision of an episode, which has no next
        observation, does not count.
        """
        found = self.predictions(params, batch)
        if target == "reward":
            errors, mask = found[..., 0] - batch.reward / self.model_scale, batch.mask
            squares = errors**2
        else:
            change = (batch.obs[:, 1:] - batch.obs[:, :-1]) / self.model_scale
            squares, mask = jnp.mean((found[:, :-1, 1:] - change) ** 2, axis=-1), batch.mask[:, 1:]
        return -jnp.sum(squares * mask) / jnp.maximum(jnp.sum(mask), 1)

    def _action_features(self, action: PyTree[Array]) -> Float[Array, " a"]:
        """Return an action as a vector of numbers."""
        if self.policy.action_size is not None:
            return action
        if isinstance(self.policy.actions, int):
            return jax.nn.one_hot(action, self.policy.actions)
        parts = [jax.nn.one_hot(action[i], count) for i, count in enumerate(self.policy.actions)]
        return jnp.concatenate(parts)

    def _in_numpy(self, inner: Any, params: Params) -> Decide:
        return partial(decide_appended, inner(params["policy"]), np.asarray(params[CONTEXT]))


def in_equal_units(batch: Trajectory) -> Float[Array, "m T d"]:
    """Divide each component of a batch's observations by its root mean square over decisions.

    A model finds out little from components that are small, such as velocities in large units.
    """
    mask = batch.mask[..., None]
    squares = jnp.sum(batch.obs**2 * mask, axis=(0, 1)) / jnp.sum(mask)
    return batch.obs / jnp.maximum(jnp.sqrt(squares), SMALLEST_UNIT)


def check_context_size(size: int) -> None:
    """Check that a context has at least one number."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(f"context_size must be a whole number >= 1; it is {size!r}")


def seen(params: Params, obs: Float[Array, " d"]) -> Float[Array, " k"]:
    """Append the context to an observation."""
    return jnp.concatenate([obs, params[CONTEXT].astype(obs.dtype)])


def context_mlp(
    fleet: Fleet,
    hidden: Sequence[int] = (32,),
    context_size: int = 4,
    model_hidden: Sequence[int] = (32,),
    model_scale: float = 1.0,
    initial_std: float = 1.0,
    last_scale: float = LAST_SCALE,
    least_std: float = 0.0,
) -> Contextual:
    """An MLP policy that also sees a context of `context_size` parameters, and a model that predicts rewards with it.

    Actions are Gaussian if they are vectors, else softmax. `initial_std`, `last_scale` and `least_std` are those of
    'gaussian-mlp'. Rewards are predicted in units of `model_scale`: choose it so that they are of order 1.
    """
    check_context_size(context_size)
    size, task = observation_size(fleet, "context-mlp"), fleet.train
    inputs = size + context_size
    inner: Any
    if isinstance(task.action_size, int):
        inner = GaussianMLP((inputs, *hidden, task.action_size), initial_std, last_scale, least_std)
    elif isinstance(task.actions, tuple):
        inner = MLPFactored((inputs, *hidden, sum(task.actions)), task.actions)
    elif isinstance(task.actions, int):
        inner = MLPSoftmax((inputs, *hidden, task.actions))
    else:
        raise UserError("the policy 'context-mlp' needs agents whose actions are vectors or finitely many")
    return Contextual(inner, size, context_size, tuple(model_hidden), model_scale)
