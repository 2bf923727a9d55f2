"""Shared representation: all layers of a network but the last are shared, the last is personal."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms.base import Algorithm, ServerState, average, local_steps, static
from perfedrl.algorithms.checks import check_counts, check_positive, check_step_sizes
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, StepKeys
from perfedrl.estimators.meta import iterate, step_keys
from perfedrl.key_domains import HEAD_STEPS
from perfedrl.types import Array, Params

ADAPTED = ("head", "all")


class HeadState(NamedTuple):
    """An agent's state: its head, with None in place of the representation, and 1 once it took part, else 0."""

    head: PyTree
    trained: Float[Array, ""]


class SharedRepresentation(Algorithm):
    """PFedRL-Rep by policy gradients (Xiong et al. 2025): a shared representation, and a head for every agent.

    In a round an agent takes `head_steps` policy-gradient steps of its head, of size head_beta (default beta), under
    the received representation, then `local_steps` of the representation, of size beta, under its new head; each from m
    trajectories. It sends the representation alone: the head is empty arrays in an upload, and in the message the start
    values, from which every agent's head begins. At deployment `adaptation_steps` further steps of size alpha, of the
    head or of all parameters (`adapt`), share the m trajectories.

    The head is the last layer of every network, the critic's included, and the policy's standard deviations if any.
    """

    alpha: float
    beta: float
    head_beta: float | None = None
    head_steps: int = static(5)
    local_steps: int = static(5)
    m: int = static(15)
    adapt: str = static("head")
    adaptation_steps: int = static(1)

    def __check_init__(self) -> None:
        check_step_sizes(self.alpha, self.beta)
        check_positive(head_beta=self.head_beta)
        check_counts(local_steps=self.local_steps, m=self.m, adaptation_steps=self.adaptation_steps)
        if self.head_steps != 0:
            check_counts(head_steps=self.head_steps)
        if self.adapt not in ADAPTED:
            raise UserError(f"adapt must be {' or '.join(map(repr, ADAPTED))}; it is {self.adapt!r}")

    @property
    def personalization_steps(self) -> int:
        return self.adaptation_steps

    @property
    def trajectories_per_round(self) -> int:
        return (self.head_steps + self.local_steps) * self.m

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require a policy with a hidden layer, whose representation can be shared."""
        check_layers(jax.eval_shape(policy.init, jax.random.key(0)))

    def init(self, params: Params) -> tuple[ServerState, HeadState]:
        check_layers(params)
        none = jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
        return ServerState(params), HeadState(eqx.filter(params, heads(params)), none)

    def client(
        self, message: Params, state: HeadState, agent: Objective, key: PRNGKeyArray
    ) -> tuple[Params, HeadState]:
        """Take steps of the head under the received representation, then of the representation under the new head."""
        is_head, theta = heads(message), self.with_personal_part(message, state)
        is_body = jax.tree.map(lambda head: not head, is_head)
        by = self.beta if self.head_beta is None else self.head_beta

        def head_step(theta: Params, keys: StepKeys) -> Params:
            return self.step(agent, is_head, by, self.m, theta, keys.outer)

        def representation_step(theta: Params, keys: StepKeys) -> Params:
            return self.step(agent, is_body, self.beta, self.m, theta, keys.outer)

        if self.head_steps:
            theta = local_steps(head_step, theta, agent, jax.random.fold_in(key, HEAD_STEPS), self.head_steps)
        theta = local_steps(representation_step, theta, agent, key, self.local_steps)
        return self.unchanged_upload(theta), HeadState(eqx.filter(theta, is_head), jnp.ones_like(state.trained))

    def step(self, agent: Objective, moved: PyTree, by: Any, m: int, theta: Params, key: PRNGKeyArray) -> Params:
        """Take one ascent step of the parameters that `moved` selects."""
        g = agent.gradient(theta, key, m)
        return jax.tree.map(lambda move, x, g: x + by * g if move else x, moved, theta, g)

    def server(self, state: ServerState, uploads: Params, weights: Float[Array, " n"]) -> ServerState:
        """Average the representation; the message's head keeps the start values."""
        is_head, mean = heads(state.message), average(uploads, weights)
        return ServerState(jax.tree.map(lambda head, x, mean: x if head else mean, is_head, state.message, mean))

    def shared(self, message: Params) -> Params:
        """Return the representation under the initial head."""
        return message

    def personalize(self, message: Params, state: HeadState, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        """Return the representation and the agent's head after the steps of deployment."""
        theta = self.with_personal_part(message, state)
        if m == 0:
            return theta
        steps = min(self.adaptation_steps, m)
        moved = heads(message) if self.adapt == "head" else every(message, True)

        def step(theta: Params, key: PRNGKeyArray) -> tuple[Params, tuple[()]]:
            return self.step(agent, moved, self.alpha, m // steps, theta, key), ()

        return iterate(agent, step, theta, step_keys(key, steps))[0]

    def with_personal_part(self, message: Params, state: HeadState) -> Params:
        """Return the message with the agent's own head; the message's head for an agent that never took part."""

        def own(mine: Array | None, x: Array) -> Array:
            return x if mine is None else jnp.where(state.trained > 0, mine, x)

        return jax.tree.map(own, state.head, message, is_leaf=lambda x: x is None)

    def unchanged_upload(self, message: Params) -> Params:
        """Return the message with empty arrays in place of the head."""

        def without_head(head: bool, x: Array) -> Array:
            return jnp.zeros(0, jnp.result_type(x)) if head else x

        return jax.tree.map(without_head, heads(message), message)


def heads(params: PyTree) -> PyTree:
    """Mark the parameters of the head: the last layer of every network, and standard deviations beside a network."""
    if is_network(params):
        return tuple(every(layer, i == len(params) - 1) for i, layer in enumerate(params))
    if isinstance(params, dict):
        return {name: every(part, True) if name == "log_std" else heads(part) for name, part in params.items()}
    return every(params, False)


def every(params: PyTree, value: bool) -> PyTree:
    """Return the same value for every parameter."""
    return jax.tree.map(lambda _: value, params)


def is_network(params: PyTree) -> bool:
    """Whether parameters are the layers of a network."""
    return isinstance(params, tuple) and all(isinstance(layer, dict) and "weight" in layer for layer in params)


def check_layers(params: PyTree) -> None:
    """Check that the parameters are networks, each with at least two layers."""
    networks = [part for part in jax.tree.leaves(params, is_leaf=is_network) if is_network(part)]
    if not networks or min(map(len, networks)) < 2:
        lacks = "hidden = [] has no hidden layer" if networks else "this one is no network"
        raise UserError(
            "shared-representation needs a policy with a hidden layer, whose last layer is personal and whose rest is "
            f"shared, and {lacks}; take the policy 'mlp' or 'gaussian-mlp' with a hidden layer (hidden = [32], say), "
            "or the algorithm 'mixing', which serves any policy"
        )
