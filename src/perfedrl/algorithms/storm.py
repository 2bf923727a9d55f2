"""Per-FedAvg-STORM: first-order Per-FedAvg-PG with variance reduction by recursive momentum."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import AveragedParameters, ServerState, local_steps, static
from perfedrl.algorithms.checks import check_counts, check_positive, check_step_sizes, with_trajectories
from perfedrl.compilation import jit
from perfedrl.envs.base import DataTask
from perfedrl.envs.fleet import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Forms, Objective, PolicyObjective, Sampled, StepKeys, adapt, log_probs
from perfedrl.estimators.advantages import scaled
from perfedrl.estimators.gradient import regularizer, reward_to_go
from perfedrl.estimators.tree_math import clipped_to_length
from perfedrl.types import Array, Params, Scalar, Trajectory

LARGEST_LOG = 80.0
"""Largest logarithm of a weight, so that it is finite in float32; weights are clipped far below."""


class WeightRecord(NamedTuple):
    """Statistics of the importance weights of a round's inner and outer batches.

    The number of weights and of clipped ones, the sum after clipping, and the largest before clipping.
    """

    drawn: Float[Array, ""]
    clipped: Float[Array, ""]
    used: Float[Array, ""]
    largest: Float[Array, ""]

    def with_more(self, weights: Float[Array, " m"], limit: Scalar, begun: Float[Array, ""]) -> "WeightRecord":
        """Add the weights of a step; the first step of a round (`begun` = 0) has none and does not count."""
        return WeightRecord(
            self.drawn + begun * len(weights),
            self.clipped + begun * jnp.sum(weights > limit),
            self.used + begun * jnp.sum(jnp.minimum(weights, limit)),
            jnp.maximum(self.largest, begun * jnp.max(weights)),
        )


class Estimate(NamedTuple):
    """A gradient estimate and the parameters at which it was estimated."""

    at: Params
    gradient: Params


class StormCarry(NamedTuple):
    """The carry of the local steps of a round; `begun` is 0 in the first step and 1 afterwards."""

    theta: Params
    inner: Estimate
    outer: Estimate
    weights: WeightRecord
    begun: Float[Array, ""]


class StormPG(AveragedParameters):
    """First-order Per-FedAvg-PG with recursive momentum (STORM) in the inner and the outer gradient of a round.

    d_t = g(theta_t; xi_t) + (1 - momentum) (d_{t-1} - g_w(theta_{t-1}; xi_t)): the last estimate is corrected by g_w,
    the estimate at the last parameters from the new trajectories with importance weights of at most `clip_weight`.
    Since parameters move little, noise cancels. A round starts from a plain estimate, as in PAGE, so that no outdated
    estimate crosses rounds; with momentum = 1 every estimate is plain. `clip`: the longest local step is beta times
    this.
    """

    alpha: float
    beta: float
    momentum: float = 0.3
    local_steps: int = static(5)
    m_in: int = static(10)
    m_out: int = static(10)
    clip_weight: float = 2.0
    clip: float | None = None

    def __check_init__(self) -> None:
        check_step_sizes(self.alpha, self.beta)
        check_positive(momentum=self.momentum, clip_weight=self.clip_weight, clip=self.clip)
        check_counts(local_steps=self.local_steps, m_in=self.m_in, m_out=self.m_out)
        if self.momentum > 1:
            raise UserError(f"momentum must be at most 1, where every estimate is fresh; it is {self.momentum}")
        if self.clip_weight < 1:
            raise UserError(f"clip_weight must be at least 1, the weight of equal parameters; it is {self.clip_weight}")

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require agents with trajectories rather than examples."""
        if isinstance(fleet.train, DataTask):
            with_trajectories(Sampled(policy)(fleet.task(0)), "per-fedavg-storm")

    @property
    def trajectories_per_round(self) -> int:
        return self.local_steps * (self.m_in + self.m_out)

    def init(self, params: Params) -> tuple[ServerState, WeightRecord]:
        return ServerState(params), no_weights()

    def client(
        self, message: Params, state: WeightRecord, agent: Objective, key: PRNGKeyArray
    ) -> tuple[Params, WeightRecord]:
        """Take tau local ascent steps along the recursive first-order meta-gradient; the state records the weights."""
        sampling = with_trajectories(agent, "per-fedavg-storm")
        end = local_steps(partial(self.step, sampling), start(message), agent, key, self.local_steps)
        return end.theta, end.weights

    def step(self, agent: PolicyObjective, last: StormCarry, keys: StepKeys) -> StormCarry:
        """Take one local ascent step: an inner estimate, the adapted parameters, an outer estimate there."""
        keep = last.begun * (1 - self.momentum)
        inner, w_in = carried(agent, last.theta, last.inner, keep, keys.inner, self.m_in, self.clip_weight)
        adapted = optax.tree.add_scale(last.theta, self.alpha, inner.gradient)
        outer, w_out = carried(agent, adapted, last.outer, keep, keys.outer, self.m_out, self.clip_weight)
        direction = outer.gradient if self.clip is None else clipped_to_length(outer.gradient, self.clip)
        weights = last.weights.with_more(jnp.concatenate([w_in, w_out]), self.clip_weight, last.begun)
        theta = optax.tree.add_scale(last.theta, self.beta, direction)
        return StormCarry(theta, inner, outer, weights, jnp.ones_like(last.begun))

    def diagnostics(self, state: WeightRecord) -> dict[str, Array]:
        """Statistics of the last round's importance weights; all 0 for rounds of a single step, which needs none."""
        drawn = jnp.maximum(state.drawn, 1)
        return {
            "weights clipped": state.clipped / drawn,
            "mean weight": state.used / drawn,
            "largest weight": state.largest,
        }

    def personalize(self, message: Params, state: Any, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return adapt(agent, message, self.alpha, key, m)


def no_weights() -> WeightRecord:
    return WeightRecord(*[jnp.zeros(())] * 4)


def start(theta: Params) -> StormCarry:
    """Return the carry at the start of a round, before any estimate."""
    nothing = Estimate(theta, jax.tree.map(jnp.zeros_like, theta))
    return StormCarry(theta, nothing, nothing, no_weights(), jnp.zeros(()))


def carried(
    agent: PolicyObjective, params: Params, last: Estimate, keep: Scalar, key: PRNGKeyArray, m: int, limit: Scalar
) -> tuple[Estimate, Float[Array, " m"]]:
    """Estimate the gradient from m trajectories with recursive momentum; also return their importance weights."""
    batch = agent.sampler.sample(params, key, m)
    g = agent.gradient_of(params, batch)
    g_w, weights = _reweighted(agent.policy, agent.forms, agent.discount, params, last.at, batch, limit)
    gradient = jax.tree.map(lambda new, old, again: new + keep * (old - again), g, last.gradient, g_w)
    return Estimate(params, gradient), weights


def reweighted_gradient(
    policy: Any, forms: Forms, discount: float, params: Params, last: Params, batch: Trajectory, limit: Scalar
) -> tuple[Params, Float[Array, " m"]]:
    """Estimate the gradient at the last parameters from a batch sampled under new ones, by importance weights.

    Also return the weights before clipping.
    """
    log_prob = partial(log_probs, policy.log_prob)
    log_weights = jnp.sum(log_prob(last, batch) - log_prob(params, batch), axis=-1)
    weights = jnp.exp(jnp.minimum(log_weights, LARGEST_LOG))
    advantage = forms.credit(policy, last, batch, discount).advantage
    returns = scaled(policy, last, reward_to_go(batch, discount))

    def more(theta: Params, one: Trajectory, returns: Float[Array, "1 T"]) -> Float[Array, ""]:
        regular = regularizer(policy, one, returns, discount, forms.entropy)
        return jnp.zeros(()) if regular is None else regular(theta)

    def surrogate(theta: Params) -> Float[Array, ""]:
        nu = jnp.sum(advantage * log_prob(theta, batch), axis=-1)
        singles = jax.tree.map(lambda x: x[:, None], (batch, returns))
        return jnp.mean(jnp.minimum(weights, limit) * (nu + jax.vmap(partial(more, theta))(*singles)))

    return jax.grad(surrogate)(last), weights


_reweighted = jit(reweighted_gradient, static_argnums=(1, 2))
