"""Fast-FedPG: local policy-gradient steps, corrected for the drift away from the mean gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, PRNGKeyArray

from perfedrl.algorithms.base import Algorithm, ServerState, average, repeated, select, static
from perfedrl.algorithms.checks import check_counts, check_step_sizes
from perfedrl.estimators import Objective, StepKeys, adapt
from perfedrl.types import Array, Params


class CorrectionMessage(NamedTuple):
    """The message: the parameters, the mean gradient of the last even round, and the number of the round."""

    theta: Params
    gradient: Params
    round: Float[Array, ""]


class AnchorGradient(NamedTuple):
    """An agent's gradient at shared parameters, and the round in which it was estimated and sent; -1 for never."""

    gradient: Params
    round: Float[Array, ""]


class FastFedPG(Algorithm):
    """Local steps along g_i(theta) - g_i(theta-bar) + g(theta-bar), theta-bar the shared parameters (Zhu et al., 2024).

    In even rounds agents send a gradient at theta-bar from `m_anchor` trajectories (default m), in odd rounds the end
    of their local steps. The first local step is along g(theta-bar), since its correction is exact, and takes no
    trajectories; the later ones take m each. An agent that missed the even round steps without correction.
    """

    alpha: float
    beta: float
    local_steps: int = static(5)
    m: int = static(30)
    m_anchor: int | None = static(None)

    upload_cycle = 2

    def __check_init__(self) -> None:
        check_step_sizes(self.alpha, self.beta)
        check_counts(local_steps=self.local_steps, m=self.m, m_anchor=self.anchor_trajectories)

    @property
    def anchor_trajectories(self) -> int:
        """Trajectories of a gradient at the shared parameters."""
        return self.m if self.m_anchor is None else self.m_anchor

    @property
    def trajectories_per_round(self) -> int:
        """The larger cost of even and odd rounds; `trajectories_after` tells them apart."""
        return max(self.anchor_trajectories, (self.local_steps - 1) * self.m)

    def trajectories_after(self, rounds: int) -> int:
        return (rounds + 1) // 2 * self.anchor_trajectories + rounds // 2 * (self.local_steps - 1) * self.m

    def init(self, params: Params) -> tuple[ServerState, AnchorGradient]:
        nothing = jax.tree.map(jnp.zeros_like, params)
        return ServerState(CorrectionMessage(params, nothing, jnp.zeros(()))), AnchorGradient(nothing, -jnp.ones(()))

    def client(
        self, message: CorrectionMessage, state: AnchorGradient, agent: Objective, key: PRNGKeyArray
    ) -> tuple[Params, AnchorGradient]:
        """Estimate a gradient at the shared parameters or take corrected steps from there; only one is computed."""
        asked = even(message)
        keys = StepKeys(*jax.random.split(key, (self.local_steps, len(StepKeys._fields))).T)

        def estimate(_: Any, i: Any) -> Params:
            return agent.gradient(message.theta, keys.outer[i], self.anchor_trajectories)

        own = repeated(estimate, state.gradient, agent, jnp.where(asked, 1, 0))
        known = (state.round == message.round - 1).astype(message.round.dtype)
        correction = optax.tree.scale(known, optax.tree.sub(message.gradient, state.gradient))

        def step(theta: Params, i: Any) -> Params:
            g = agent.gradient(theta, keys.outer[i], self.m)
            return optax.tree.add_scale(theta, self.beta, optax.tree.add(g, correction))

        first = optax.tree.add_scale(message.theta, self.beta, message.gradient)
        end = repeated(step, first, agent, jnp.where(asked, 0, self.local_steps - 1))
        return select(asked, own, end), AnchorGradient(own, jnp.where(asked, message.round, state.round))

    def server(self, state: ServerState, uploads: Params, weights: Float[Array, " n"]) -> ServerState:
        """Put the mean gradient (even rounds) or the mean parameters (odd rounds) into the message."""
        asked, mean, message = even(state.message), average(uploads, weights), state.message
        theta, gradient = select(asked, message.theta, mean), select(asked, mean, message.gradient)
        return ServerState(CorrectionMessage(theta, gradient, message.round + 1))

    def unchanged_upload(self, message: CorrectionMessage) -> Params:
        """A gradient of zero in even rounds, and the shared parameters in odd ones."""
        return select(even(message), jax.tree.map(jnp.zeros_like, message.theta), message.theta)

    def shared(self, message: CorrectionMessage) -> Params:
        return message.theta

    def personalize(
        self, message: CorrectionMessage, state: AnchorGradient, agent: Objective, key: PRNGKeyArray, m: int
    ) -> Params:
        return adapt(agent, message.theta, self.alpha, key, m)


def even(message: CorrectionMessage) -> Bool[Array, ""]:
    """Whether agents send gradients in this round."""
    return jnp.asarray(message.round % 2 == 0)
