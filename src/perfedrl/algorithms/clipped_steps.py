"""Several steps on one batch: clipped surrogates, a limit on the divergence, and an optimizer of the agent's own.

What FedPPO, ProMP and `context` share. FedPPO improves a policy on a batch of its own; the other two improve the
initialization before an adaptation, on a batch of the adapted policy.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, Integer, PRNGKeyArray, PyTree

from perfedrl.algorithms.annealing import Annealing
from perfedrl.algorithms.base import (
    Algorithm,
    ServerState,
    average,
    local_step_keys,
    local_steps,
    repeated,
    select,
    static,
)
from perfedrl.algorithms.checks import (
    check_choice,
    check_counts,
    check_divergence,
    check_positive,
    check_step_sizes,
    with_trajectories,
)
from perfedrl.algorithms.learned_adaptation import VARIANTS, Adaptation, Learned, pair_of_batches, step_sizes
from perfedrl.algorithms.local_optimizer import PLAIN, LearnerMessage, LocalOptimizer, frozen_settings
from perfedrl.compilation import jit
from perfedrl.envs.fleet import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, PolicyObjective, SampledBatch, StepKeys
from perfedrl.types import Array, Params, Scalar, Whole


@dataclass(frozen=True)
class ClippedSteps(Adaptation):
    """How a batch is used: number of epochs, clip of ratios, weight of the inner divergence, and when to stop.

    With `first_order` the adaptation's gradient counts as constant when the outer objective is differentiated. A
    subclass may adapt in another way and maximize more.
    """

    optimizer: LocalOptimizer
    epochs: int
    clip_ratio: float
    stop_divergence: float
    divergence_weight: float = 0.0
    first_order: bool = True

    def __post_init__(self) -> None:
        check_counts(epochs=self.epochs)
        check_positive(clip_ratio=self.clip_ratio, stop_divergence=self.stop_divergence)
        if not 0 <= self.divergence_weight < float("inf"):
            raise UserError(f"divergence_weight must be a finite number >= 0; it is {self.divergence_weight}")

    def objective(self, theta: Params, inner: SampledBatch | None, outer: SampledBatch) -> Float[Array, ""]:
        """Return what the steps maximize at the adapted parameters: the clipped surrogate of the outer batch."""
        return outer.surrogate(theta, self.clip_ratio)


def improve(
    how: ClippedSteps,
    learned: Learned,
    moments: PyTree,
    alpha: Scalar,
    rate: Scalar,
    inner: SampledBatch | None,
    outer: SampledBatch,
    used_before: bool = False,
) -> tuple[Learned, PyTree]:
    """Take up to `epochs` steps on the outer batch, which was sampled with the adapted parameters.

    No further step is taken once the adapted policy diverges from the one that sampled the batch by more than allowed:
    not even the first one where the batch may have been used in earlier rounds.
    """

    def gradient(learned: Learned) -> Learned:
        after, pulled_back = jax.vjp(lambda new: how.adapted(new, alpha, inner), learned)
        by_adapted = jax.grad(how.objective)(after, inner, outer)
        (found,) = pulled_back(by_adapted)
        if inner is None or not how.divergence_weight:
            return found
        return found._replace(
            theta=optax.tree.add_scale(found.theta, -how.divergence_weight, jax.grad(inner.divergence)(learned.theta))
        )

    def epoch(carry: tuple, _: None) -> tuple[tuple, None]:
        learned, moments, going_on = carry
        change, moved = how.optimizer.step(learned, gradient(learned), moments, rate)
        learned = optax.tree.add(learned, select(going_on, change, optax.tree.zeros_like(change)))
        moments = select(going_on, moved, moments)
        apart = outer.divergence(how.adapted(learned, alpha, inner))
        return (learned, moments, going_on & (apart <= how.stop_divergence)), None

    may_step = outer.divergence(how.adapted(learned, alpha, inner)) <= how.stop_divergence if used_before else True
    (learned, moments, _), _ = jax.lax.scan(epoch, (learned, moments, jnp.asarray(may_step)), length=how.epochs)
    return learned, moments


_improve = jit(improve, static_argnums=(0, 7))


class KeptBatches(NamedTuple):
    """An agent's state where batches serve several rounds."""

    moments: PyTree
    """The state of the agent's optimizer, if it is personal."""
    batches: tuple[SampledBatch | None, SampledBatch]
    uses: Integer[Array, ""]
    """The number of rounds that the batches have served; 0 where the next round samples others."""


class ClippedLearner(Algorithm):
    """The base of algorithms whose agents take clipped steps with an optimizer of their own.

    A subclass says how one batch, or a pair of batches, is sampled. beta is the optimizer's rate.

    - `optimizer`, `optimizer_settings`, `optimizer_state`: an optimizer of optax; its state is "averaged" by the
      server, "personal" or "reset" in each round.
    - `anneal`: the number of rounds over which the rate falls to a twentieth of beta, on a "linear" or "cosine"
      `schedule`.
    - `rounds_per_batch`: above 1 an agent keeps its batches for so many rounds. An optimizer on the server then takes
      several steps on the same trajectories, each along the mean over all agents.
    """

    alpha: float
    beta: float
    local_steps: int = static(1)
    epochs: int = static(5, kw_only=True)
    clip_ratio: float = static(0.3, kw_only=True)
    stop_divergence: float = static(0.05, kw_only=True)
    optimizer: str = static("adam", kw_only=True)
    optimizer_settings: tuple[tuple[str, Any], ...] = static(None, kw_only=True, converter=frozen_settings)
    optimizer_state: Literal["averaged", "personal", "reset"] = static("averaged", kw_only=True)
    anneal: int | None = static(None, kw_only=True)
    schedule: Literal["linear", "cosine"] = static("linear", kw_only=True)
    rounds_per_batch: int = static(1, kw_only=True)
    batch_shapes: PyTree = eqx.field(init=False, default_factory=type(None))
    """The shapes of an agent's batches, where it keeps them; None until `fitted_to` sets them."""

    def __check_init__(self) -> None:
        """Check what all have in common; only one of local steps and rounds with the same batches may be above 1."""
        check_step_sizes(self.alpha, self.beta)
        check_counts(local_steps=self.local_steps, rounds_per_batch=self.rounds_per_batch)
        if self.rounds_per_batch > 1 and self.local_steps > 1:
            raise UserError(
                f"rounds_per_batch = {self.rounds_per_batch} keeps the batches of one local step: set local_steps = 1, "
                f"not {self.local_steps}"
            )
        self.how, self.annealing  # noqa: B018 - making them checks their settings

    @property
    def how(self) -> ClippedSteps:
        """How a batch is used."""
        return ClippedSteps(**self.step_settings)

    @property
    def step_settings(self) -> dict[str, Any]:
        """The fields of `how`, by name."""
        return {
            "optimizer": self.local_optimizer,
            "epochs": self.epochs,
            "clip_ratio": self.clip_ratio,
            "stop_divergence": self.stop_divergence,
        }

    @property
    def local_optimizer(self) -> LocalOptimizer:
        """The optimizer of the agents' steps."""
        return LocalOptimizer(self.optimizer, self.optimizer_state, self.optimizer_settings)

    @property
    def annealing(self) -> Annealing:
        """The rate over rounds."""
        return Annealing(self.anneal, self.schedule)

    @abstractmethod
    def first_factors(self, params: Params) -> Params:
        """Return the initial factors of alpha; () where they are not learned."""

    @abstractmethod
    def batches(
        self, agent: PolicyObjective, learned: Learned, keys: StepKeys
    ) -> tuple[SampledBatch | None, SampledBatch]:
        """Sample the batch of the adaptation, if there is one, and the batch to improve on."""

    @property
    @abstractmethod
    def trajectories_per_step(self) -> int:
        """The number of trajectories of one local step."""

    @property
    def trajectories_per_round(self) -> int:
        return self.local_steps * self.trajectories_per_step

    def trajectories_after(self, rounds: int) -> int:
        """Number of trajectories that `rounds` rounds cost an agent, which samples in the first of every few."""
        return math.ceil(rounds / self.rounds_per_batch) * self.trajectories_per_round

    @property
    def scales_coordinates(self) -> bool:
        return self.optimizer != PLAIN

    @property
    def uploads_auxiliaries(self) -> bool:
        return self.local_optimizer.is_averaged or self.annealing.rounds is not None

    def init(self, params: Params) -> tuple[ServerState, PyTree]:
        """The message has the optimizer's state if it is averaged, a client's state if it is personal."""
        learned = Learned(params, self.first_factors(params))
        averaged, personal = self.local_optimizer.placed(self.local_optimizer.init(learned))
        if self.batch_shapes is not None:
            personal = KeptBatches(personal, optax.tree.zeros_like(self.batch_shapes), jnp.zeros((), int))
        return ServerState(LearnerMessage(learned, averaged, self.annealing.first_round)), personal

    def fitted_to(self, agent: Objective) -> Algorithm:
        """Return the algorithm with the shapes of an agent's batches, where the agent keeps them."""
        if self.rounds_per_batch == 1:
            return self
        source = with_trajectories(agent, type(self).__name__)

        def sampled(key: PRNGKeyArray) -> Any:
            params = source.policy.init(key)
            return self.batches(source, Learned(params, self.first_factors(params)), StepKeys(key, key, key))

        shapes = jax.eval_shape(sampled, jax.random.key(0))
        return eqx.tree_at(lambda own: own.batch_shapes, self, shapes, is_leaf=lambda x: x is None)

    def client(self, message: LearnerMessage, state: PyTree, agent: Objective, key: PRNGKeyArray) -> tuple:
        """Take tau local steps, each with fresh batches and several epochs on them, or one step on kept batches."""
        source, optimizer = with_trajectories(agent, type(self).__name__), self.local_optimizer
        keeps = isinstance(state, KeptBatches)
        if self.rounds_per_batch > 1 and not keeps:
            raise UserError("batches of several rounds need states of algorithm.fitted_to(agent).init(params)")
        moments = optimizer.start(message.learned, message.moments, state.moments if keeps else state)
        rate = self.annealing.rate(self.beta, message.round)
        if keeps:
            state = self.with_batches(state, source, message.learned, key)
            learned, moments = _improve(self.how, message.learned, moments, self.alpha, rate, *state.batches, True)
        else:
            step = partial(self.step, source, rate)
            learned, moments = local_steps(step, (message.learned, moments), agent, key, self.local_steps)
        averaged, personal = optimizer.placed(moments)
        upload = LearnerMessage(learned, averaged, self.annealing.next_round(message.round))
        return upload, state._replace(moments=personal) if keeps else personal

    def with_batches(
        self, kept: KeptBatches, agent: PolicyObjective, learned: Learned, key: PRNGKeyArray
    ) -> KeptBatches:
        """Return the state with batches for this round: those that it has, or fresh ones where they are used up."""
        keys = StepKeys(*local_step_keys(key, 1)[0])

        def sample(_: PyTree, __: Whole) -> tuple[SampledBatch | None, SampledBatch]:
            return self.batches(agent, learned, keys)

        batches = repeated(sample, kept.batches, agent, jnp.where(kept.uses == 0, 1, 0))
        return kept._replace(batches=batches, uses=(kept.uses + 1) % self.rounds_per_batch)

    def step(self, agent: PolicyObjective, rate: Scalar, carry: tuple, keys: StepKeys) -> tuple[Learned, PyTree]:
        """Sample, and improve on the sample."""
        learned, moments = carry
        inner, outer = self.batches(agent, learned, keys)
        return _improve(self.how, learned, moments, self.alpha, rate, inner, outer)

    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        return ServerState(average(uploads, weights))

    def without_training_state(self, message: LearnerMessage) -> LearnerMessage:
        """Return the message without the optimizer's state."""
        return message._replace(moments=None)

    def shared(self, message: LearnerMessage) -> Params:
        return message.learned.theta

    def adaptation_step_size(self, message: LearnerMessage) -> Any:
        return step_sizes(message.learned, self.alpha)

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require episodes, and a policy whose divergence is known."""
        check_divergence(type(self).__name__, fleet, policy)

    def check_participation(self, agents: int, participants: int, weights: Sequence[float] | None) -> None:
        """Reject client sampling where batches are kept: between two rounds of an agent they would become outdated."""
        if self.rounds_per_batch > 1 and participants < agents:
            raise UserError(
                f"rounds_per_batch = {self.rounds_per_batch} needs every agent in every round: set participation = 1, "
                "or rounds_per_batch = 1 with more local_steps"
            )


class AdaptedLearner(ClippedLearner):
    """The base of those that improve the parameters before an adaptation, on a batch of the adapted policy.

    - `m_in`, `m_out`: the sizes of the batches before and after the adaptation.
    - `divergence_weight`: the weight of the initialization's divergence on the first batch, which is subtracted.
    - `variant`: "first-order" takes the gradient of the adaptation as constant, "differentiated" does not.
    """

    m_in: int = static(20)
    m_out: int = static(20)
    divergence_weight: float = static(5e-4, kw_only=True)
    variant: Literal["first-order", "differentiated"] = static("first-order", kw_only=True)

    def __check_init__(self) -> None:
        check_choice("variant", self.variant, VARIANTS)
        check_counts(m_in=self.m_in, m_out=self.m_out)

    @property
    def step_settings(self) -> dict[str, Any]:
        first_order = self.variant == "first-order"
        return super().step_settings | {"divergence_weight": self.divergence_weight, "first_order": first_order}

    @property
    def trajectories_per_step(self) -> int:
        return self.m_in + self.m_out

    def batches(self, agent: PolicyObjective, learned: Learned, keys: StepKeys) -> tuple[SampledBatch, SampledBatch]:
        return pair_of_batches(agent, self.how, learned, self.alpha, keys, self.m_in, self.m_out)
