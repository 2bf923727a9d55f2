"""Mixing: every agent deploys a mixture of a shared and a personal policy's parameters (PfoPG, ZO-APFPG)."""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import (
    Algorithm,
    ServerState,
    average,
    check_counts,
    check_positive,
    check_step_sizes,
    local_steps,
    with_trajectories,
)
from perfedrl.envs import Fleet
from perfedrl.envs.base import DataTask
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, PolicyObjective, StepKeys, adapt
from perfedrl.estimators.curvature.differences import CentralDifferences
from perfedrl.estimators.tree_math import dot, ratio
from perfedrl.estimators.zeroth_order import ZerothOrderObjective
from perfedrl.types import Array, Params, Scalar

GRADIENTS = ("first-order", "zeroth-order")
POINTS = 2
"""Trajectories that make one zeroth-order direction."""


class Mixed(NamedTuple):
    """An agent's state: its personal parameters, the shared ones' weight, and 1 once it took part, else 0."""

    v: Params
    weight: Float[Array, ""]
    trained: Float[Array, ""]


class Pair(NamedTuple):
    """What local steps move: the agent's copy of the shared parameters, its personal ones, and the weight."""

    w: Params
    v: Params
    weight: Float[Array, ""]


class Mixing(Algorithm):
    """Agent i deploys theta_i = (1 - lambda_i) v_i + lambda_i w: w is averaged, v_i and lambda_i stay with the agent.

    A local step is w_i + beta g(w_i) and v_i + beta (1 - lambda_i) g(theta_i), each gradient from m trajectories, and,
    where weight_rate > 0, lambda_i + weight_rate cos(g(theta_i), w_i - v_i), kept within [0, 1]: the return's
    derivative by lambda_i, divided by both lengths, so that the rate is the most that a weight moves in a step.

    With a fixed weight of 0 it is LocalPG, and of 1 FedAvgPG, trajectory for trajectory: for that the two batches of a
    step share a key. They are drawn at different parameters, and neither enters the other's update.
    """

    alpha: Any
    beta: Any
    weight: Any
    weight_rate: Any
    gradient: str = eqx.field(static=True)
    radius: float = eqx.field(static=True)
    local_steps: int = eqx.field(static=True)
    m: int = eqx.field(static=True)

    def __init__(
        self,
        alpha: float,
        beta: float,
        weight: float = 0.5,
        weight_rate: float = 0.0,
        gradient: str = "first-order",
        radius: float = 0.1,
        local_steps: int = 5,
        m: int = 15,
    ):
        check_step_sizes(alpha, beta)
        check_positive(radius=radius)
        check_counts(local_steps=local_steps, m=m)
        for name, value in (("weight", weight), ("weight_rate", weight_rate)):
            if isinstance(value, int | float) and not 0 <= value <= 1:
                raise UserError(f"{name} must be from 0 to 1; it is {value}")
        if gradient not in GRADIENTS:
            raise UserError(f"the gradient must be {' or '.join(map(repr, GRADIENTS))}; it is {gradient!r}")
        if gradient == "zeroth-order" and m < POINTS:
            raise UserError(
                f"zeroth-order gradients compare returns at two points, one trajectory each: m = {m} is too few; "
                f"the nearest choice is m = {POINTS}"
            )
        self.alpha, self.beta, self.weight, self.weight_rate = alpha, beta, weight, weight_rate
        self.gradient, self.radius, self.local_steps, self.m = gradient, float(radius), local_steps, m

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Refuse agents without episodes to gradients from returns."""
        if self.gradient == "zeroth-order" and isinstance(fleet.train, DataTask):
            raise UserError(
                "mixing: zeroth-order gradients compare returns of episodes, and these agents have examples; take "
                'gradient = "first-order"'
            )

    @property
    def trajectories_per_round(self) -> int:
        """Two batches a step; an odd trajectory has no partner in a zeroth-order one and is not drawn."""
        batch = self.m if self.gradient == "first-order" else POINTS * (self.m // POINTS)
        return 2 * self.local_steps * batch

    def init(self, params: Params) -> tuple[ServerState, Mixed]:
        none = jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
        return ServerState(params), Mixed(params, none, none)

    def client(self, message: Params, state: Mixed, agent: Objective, key: PRNGKeyArray) -> tuple[Params, Mixed]:
        """Local steps of both parameters, from the server's w and from what the agent has kept."""
        seen = self._seen(with_trajectories(agent, "mixing by zeroth-order gradients")) if self._zeroth else agent
        end = local_steps(partial(self.step, seen), self._own(message, state), agent, key, self.local_steps)
        return end.w, Mixed(end.v, end.weight, jnp.ones_like(state.trained))

    def step(self, agent: Objective, pair: Pair, keys: StepKeys) -> Pair:
        """One local step of the shared and of the personal parameters, and of the weight between them."""
        w, v, weight = pair
        g_own = agent.gradient(mixture(pair), keys.outer, self.m)
        g_shared = agent.gradient(w, keys.outer, self.m)
        apart = optax.tree.sub(w, v)
        cosine = ratio(dot(g_own, apart), optax.tree.norm(g_own) * optax.tree.norm(apart))
        return Pair(
            optax.tree.add_scale(w, self.beta, g_shared),
            optax.tree.add_scale(v, self.beta * (1 - weight), g_own),
            jnp.clip(weight + self.weight_rate * cosine, 0, 1),
        )

    def server(self, state: ServerState, uploads: Params, weights: Float[Array, " n"]) -> ServerState:
        return ServerState(average(uploads, weights))

    def shared(self, message: Params) -> Params:
        return message

    def personalize(self, message: Params, state: Mixed, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        """The agent's mixture after a step of alpha; one that never took part has nothing but w to mix.

        Exact agents show no trajectories and adapt by their own gradient, whatever the kind in training.
        """
        seen = agent
        if self._zeroth and isinstance(agent, PolicyObjective):
            seen, m = self._seen(agent), m if m >= POINTS else 0
        return adapt(seen, mixture(self._own(message, state)), self.alpha, key, m)

    def diagnostics(self, state: Mixed) -> dict[str, Array]:
        """How much of the shared parameters the agent takes."""
        return {"shared weight": jnp.where(state.trained > 0, state.weight, self.weight)}

    @property
    def _zeroth(self) -> bool:
        return self.gradient == "zeroth-order"

    def _seen(self, agent: PolicyObjective) -> ZerothOrderObjective:
        form = CentralDifferences(self.radius)
        return ZerothOrderObjective(agent.sampler, agent.discount, self.radius, POINTS, form)

    def _own(self, message: Params, state: Mixed) -> Pair:
        """What an agent has in a round: its own v and weight once it took part, else w and the weight to start from."""
        trained = state.trained > 0
        v = jax.tree.map(lambda own, w: jnp.where(trained, own, w), state.v, message)
        start: Scalar = jnp.asarray(self.weight, state.weight.dtype)
        return Pair(message, v, jnp.where(trained, state.weight, start))


def mixture(pair: Pair) -> Params:
    """(1 - lambda) v + lambda w."""
    return jax.tree.map(lambda w, v: (1 - pair.weight) * v + pair.weight * w, pair.w, pair.v)
