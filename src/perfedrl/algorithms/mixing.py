"""Mixing: every agent deploys a convex combination of shared and personal parameters (PfoPG, ZO-APFPG)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import AveragedParameters, ServerState, local_steps, static
from perfedrl.algorithms.checks import check_counts, check_positive, check_step_sizes, with_trajectories
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
"""Trajectories per direction of a zeroth-order gradient."""


class MixingState(NamedTuple):
    """An agent's state: its personal parameters, the weight of the shared ones, and 1 once it took part, else 0."""

    v: Params
    weight: Float[Array, ""]
    trained: Float[Array, ""]


class MixingCarry(NamedTuple):
    """The carry of local steps: the agent's copy of the shared parameters, its personal ones, and the weight."""

    w: Params
    v: Params
    weight: Float[Array, ""]


class Mixing(AveragedParameters):
    """Agent i deploys theta_i = (1 - lambda_i) v_i + lambda_i w: w is averaged, v_i and lambda_i stay with the agent.

    A local step is w_i + beta g(w_i) and v_i + beta (1 - lambda_i) g(theta_i), each gradient from m trajectories, and,
    where weight_rate > 0, lambda_i + weight_rate cos(g(theta_i), w_i - v_i), clipped to [0, 1]: the derivative of the
    return by lambda_i, divided by both lengths, so that the rate bounds the change in a step.

    With a fixed weight of 0 it is LocalPG, and of 1 FedAvgPG, trajectory for trajectory: to that end the two batches of
    a step share a key. They are drawn at different parameters, and neither enters the update of the other.
    """

    alpha: float
    beta: float
    weight: float = 0.5
    weight_rate: float = 0.0
    gradient: str = static("first-order")
    radius: float = static(0.1)
    local_steps: int = static(5)
    m: int = static(15)

    def __check_init__(self) -> None:
        check_step_sizes(self.alpha, self.beta)
        check_positive(radius=self.radius)
        check_counts(local_steps=self.local_steps, m=self.m)
        for name, value in (("weight", self.weight), ("weight_rate", self.weight_rate)):
            if isinstance(value, int | float) and not 0 <= value <= 1:
                raise UserError(f"{name} must be from 0 to 1; it is {value}")
        if self.gradient not in GRADIENTS:
            raise UserError(f"the gradient must be {' or '.join(map(repr, GRADIENTS))}; it is {self.gradient!r}")
        if self.gradient == "zeroth-order" and self.m < POINTS:
            raise UserError(
                f"zeroth-order gradients compare returns at two points, one trajectory each: m = {self.m} is too few; "
                f"the nearest choice is m = {POINTS}"
            )

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require agents with episodes for zeroth-order gradients, which compare returns."""
        if self.gradient == "zeroth-order" and isinstance(fleet.train, DataTask):
            raise UserError(
                "mixing: zeroth-order gradients compare returns of episodes, and these agents have examples; take "
                'gradient = "first-order"'
            )

    @property
    def trajectories_per_round(self) -> int:
        """Two batches per step; zeroth-order batches have an even number of trajectories."""
        batch = self.m if self.gradient == "first-order" else POINTS * (self.m // POINTS)
        return 2 * self.local_steps * batch

    def init(self, params: Params) -> tuple[ServerState, MixingState]:
        none = jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
        return ServerState(params), MixingState(params, none, none)

    def client(
        self, message: Params, state: MixingState, agent: Objective, key: PRNGKeyArray
    ) -> tuple[Params, MixingState]:
        """Take local steps of both parameters, from the server's w and the agent's own v and weight."""
        seen = self._seen(with_trajectories(agent, "mixing by zeroth-order gradients")) if self._zeroth else agent
        end = local_steps(partial(self.step, seen), self._own(message, state), agent, key, self.local_steps)
        return end.w, MixingState(end.v, end.weight, jnp.ones_like(state.trained))

    def step(self, agent: Objective, pair: MixingCarry, keys: StepKeys) -> MixingCarry:
        """Take one local step of the shared and the personal parameters, and of the weight between them."""
        w, v, weight = pair
        g_own = agent.gradient(mixture(pair), keys.outer, self.m)
        g_shared = agent.gradient(w, keys.outer, self.m)
        apart = optax.tree.sub(w, v)
        cosine = ratio(dot(g_own, apart), optax.tree.norm(g_own) * optax.tree.norm(apart))
        return MixingCarry(
            optax.tree.add_scale(w, self.beta, g_shared),
            optax.tree.add_scale(v, self.beta * (1 - weight), g_own),
            jnp.clip(weight + self.weight_rate * cosine, 0, 1),
        )

    def personalize(self, message: Params, state: MixingState, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        """Adapt the agent's mixture by a step of alpha; for an agent that never took part the mixture is w.

        Exact agents show no trajectories and adapt by their own gradient, whatever the kind in training.
        """
        seen = agent
        if self._zeroth and isinstance(agent, PolicyObjective):
            seen, m = self._seen(agent), m if m >= POINTS else 0
        return adapt(seen, mixture(self._own(message, state)), self.alpha, key, m)

    def diagnostics(self, state: MixingState) -> dict[str, Array]:
        """The weight of the shared parameters in the agent's mixture."""
        return {"shared weight": jnp.where(state.trained > 0, state.weight, self.weight)}

    @property
    def _zeroth(self) -> bool:
        return self.gradient == "zeroth-order"

    def _seen(self, agent: PolicyObjective) -> ZerothOrderObjective:
        form = CentralDifferences(self.radius)
        return ZerothOrderObjective(agent.sampler, agent.discount, self.radius, POINTS, form)

    def _own(self, message: Params, state: MixingState) -> MixingCarry:
        """The start of a round: the agent's own v and weight once it took part, else w and the initial weight."""
        trained = state.trained > 0
        v = jax.tree.map(lambda own, w: jnp.where(trained, own, w), state.v, message)
        start: Scalar = jnp.asarray(self.weight, state.weight.dtype)
        return MixingCarry(message, v, jnp.where(trained, state.weight, start))


def mixture(pair: MixingCarry) -> Params:
    """Compute (1 - lambda) v + lambda w."""
    return jax.tree.map(lambda w, v: (1 - pair.weight) * v + pair.weight * w, pair.w, pair.v)
