"""AFedPG: asynchronous federated policy gradient, in which agents compute gradients at outdated parameters."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import Algorithm, ServerState, average, repeated, select, static
from perfedrl.algorithms.checks import LARGEST_STEP, check_counts, check_step_sizes
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, StepKeys, adapt
from perfedrl.types import Array, Params

DELAYS = ("none", "uniform", "geometric")


class LookAheadMessage(NamedTuple):
    """The message: the parameters, the look-ahead at which agents compute gradients, and the server's clock."""

    theta: Params
    ahead: Params
    tick: Float[Array, ""]


class PendingGradient(NamedTuple):
    """A gradient in the making: its parameters, the tick of their download, and the ticks left (-1: idle)."""

    params: Params
    since: Float[Array, ""]
    left: Float[Array, ""]


class GradientArrival(NamedTuple):
    """An upload: a gradient and the tick of its parameters, with `arrived` = 1; all zeros from an agent at work."""

    gradient: Params
    since: Float[Array, ""]
    arrived: Float[Array, ""]


class AFedPG(Algorithm):
    """Normalized momentum with a look-ahead that corrects for outdated gradients (Lan et al., 2024), delays simulated.

    A round is one tick. An idle agent downloads the look-ahead parameters and computes a gradient there from m
    trajectories, which takes it a number of ticks drawn from `delays`: none; uniform from 0 to twice `mean_delay`;
    geometric from 0 on. A new gradient has weight a = `momentum` / (1 + t)^`decay`, t the tick of its parameters:

        d <- (1 - a) d + a g,  theta' = theta + beta d / |d|,  look-ahead theta' + (1 - a) / a (theta' - theta).

    Gradients of one tick count as their mean. With `normalize = false` the step is beta d.
    """

    alpha: float
    beta: float
    m: int = static(30)
    delays: Literal["none", "uniform", "geometric"] = static("uniform")
    mean_delay: float = static(2.0)
    momentum: float = 1.0
    decay: float = 0.8
    normalize: bool = static(True)

    uploads_may_be_empty = True

    @property
    def asynchronous(self) -> bool:
        """Whether agents in a network take the time they take: delays are not simulated as well."""
        return self.delays == "none"

    def __check_init__(self) -> None:
        check_step_sizes(self.alpha, self.beta)
        check_counts(m=self.m)
        check_delays(self.delays, self.mean_delay)
        if isinstance(self.momentum, int | float) and not 0 < self.momentum <= 1:
            raise UserError(f"momentum is the weight of a new gradient, above 0 and at most 1; it is {self.momentum}")
        if isinstance(self.decay, int | float) and not 0 <= self.decay <= 1:
            raise UserError(f"decay must be from 0 to 1; it is {self.decay}")

    @property
    def trajectories_per_round(self) -> int:
        """The largest cost of a tick; in most ticks most agents are still at work and sample nothing."""
        return self.m

    def trajectories_after(self, rounds: int) -> int:
        """Mean cost of an agent in the long run: m trajectories every 1 + `mean_delay` ticks, or in every tick."""
        delay = 0.0 if self.delays == "none" else self.mean_delay
        return round(rounds * self.m / (1 + delay))

    def init(self, params: Params) -> tuple[ServerState, PendingGradient]:
        nothing, zero = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
        return ServerState(LookAheadMessage(params, params, zero), nothing), PendingGradient(
            params, zero, -jnp.ones(())
        )

    def client(
        self, message: LookAheadMessage, state: PendingGradient, agent: Objective, key: PRNGKeyArray
    ) -> tuple[GradientArrival, PendingGradient]:
        """Advance one tick: an idle agent begins a gradient, and an agent that has finished sends it."""
        keys = StepKeys(*jax.random.split(key, (1, len(StepKeys._fields)))[0])
        work = select(state.left < 0, PendingGradient(message.ahead, message.tick, self.delay(keys.inner)), state)
        done = work.left == 0

        def estimate(_: Params, __: Any) -> Params:
            return agent.gradient(work.params, keys.outer, self.m)

        nothing = jax.tree.map(jnp.zeros_like, work.params)
        g = repeated(estimate, nothing, agent, jnp.where(done, 1, 0))
        arrived = done.astype(work.left.dtype)
        return GradientArrival(g, arrived * work.since, arrived), work._replace(left=work.left - 1)

    def delay(self, key: PRNGKeyArray) -> Float[Array, ""]:
        """Draw the number of ticks that a gradient takes beyond the one it begins in."""
        u = jax.random.uniform(key)
        if self.delays == "uniform":
            return jnp.floor(u * (2 * self.mean_delay + 1))
        if self.delays == "geometric" and self.mean_delay > 0:
            return jnp.floor(jnp.log1p(-u) / np.log(self.mean_delay / (1 + self.mean_delay)))
        return jnp.zeros_like(u)

    def server(self, state: ServerState, uploads: GradientArrival, weights: Float[Array, " n"]) -> ServerState:
        """Step along the mean of the arrived gradients; if none arrived, only advance the clock."""
        theta, ahead, tick = state.message
        mean = average(uploads, weights)
        some = mean.arrived > 0
        g, since, _ = jax.tree.map(lambda x: x / jnp.where(some, mean.arrived, 1), mean)
        a = self.momentum * (1 + since) ** -self.decay
        d = jax.tree.map(lambda old, new: (1 - a) * old + a * new, state.private, g)
        length = optax.tree.norm(d) if self.normalize else jnp.ones(())
        moved = optax.tree.add_scale(theta, self.beta / jnp.where(length > 0, length, 1), d)
        further = jax.tree.map(lambda x, y: y + (1 - a) / a * (y - x), theta, moved)
        theta, ahead, d = select(some, (moved, further, d), (theta, ahead, state.private))
        return ServerState(LookAheadMessage(theta, ahead, tick + 1), d)

    def unchanged_upload(self, message: LookAheadMessage) -> GradientArrival:
        """A gradient of zero that arrives in the tick of its parameters."""
        nothing = jax.tree.map(jnp.zeros_like, message.theta)
        return GradientArrival(nothing, jnp.asarray(message.tick), jnp.ones_like(message.tick))

    def measured_part(self, upload: GradientArrival) -> dict[str, Params]:
        """The gradient."""
        return {"gradient": upload.gradient}

    def received(self, upload: GradientArrival, round_: int) -> GradientArrival:
        """Return the gradient with the tick of its parameters, which is the round of their message."""
        return upload._replace(since=np.full_like(upload.since, round_), arrived=np.ones_like(upload.arrived))

    def shared(self, message: LookAheadMessage) -> Params:
        return message.theta

    def personalize(
        self, message: LookAheadMessage, state: PendingGradient, agent: Objective, key: PRNGKeyArray, m: int
    ) -> Params:
        return adapt(agent, message.theta, self.alpha, key, m)


def check_delays(delays: str, mean: float) -> None:
    """Check the kind of delays, and that they can have the given mean."""
    if delays not in DELAYS:
        raise UserError(f"the delays must be {' or '.join(map(repr, DELAYS))}; they are {delays!r}")
    if not 0 <= mean <= LARGEST_STEP:
        raise UserError(f"mean_delay must be a finite number >= 0; it is {mean}")
    if delays == "uniform" and 2 * mean != int(2 * mean):
        raise UserError(f"uniform delays go from 0 to 2 mean_delay ticks, a whole number; mean_delay is {mean}")
