"""Several steps on one batch: clipped surrogates, a limit on the divergence, and an optimizer of the agent's own.

What FedPPO, ProMP and `context` share. FedPPO improves a policy on a batch of its own; the other two improve the
initialization before an adaptation, on a batch of the adapted policy.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms.annealing import Annealing
from perfedrl.algorithms.base import Algorithm, ServerState, average, local_steps, select
from perfedrl.algorithms.checks import check_counts, check_divergence, check_positive, with_trajectories
from perfedrl.algorithms.learned_adaptation import Adaptation, Learned, pair_of_batches, step_sizes
from perfedrl.algorithms.local_optimizer import PLAIN, LearnerMessage, LocalOptimizer
from perfedrl.compilation import jit
from perfedrl.envs.fleet import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, PolicyObjective, SampledBatch, StepKeys
from perfedrl.types import Array, Params, Scalar


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

    def objective(self, theta: Params, outer: SampledBatch) -> Float[Array, ""]:
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
) -> tuple[Learned, PyTree]:
    """Take up to `epochs` steps on the outer batch, which was sampled with the adapted parameters.

    No further step is taken once the adapted policy diverges from the one that sampled the batch by more than allowed.
    """

    def gradient(learned: Learned) -> Learned:
        after, pulled_back = jax.vjp(lambda new: how.adapted(new, alpha, inner), learned)
        by_adapted = jax.grad(how.objective)(after, outer)
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

    (learned, moments, _), _ = jax.lax.scan(epoch, (learned, moments, jnp.asarray(True)), length=how.epochs)
    return learned, moments


_improve = jit(improve, static_argnums=0)


class ClippedLearner(Algorithm):
    """The base of algorithms whose agents take clipped steps with an optimizer of their own.

    A subclass has the fields `alpha`, `beta` (the optimizer's rate), `local_steps`, `how` and `annealing`, and says
    how one batch, or a pair of batches, is sampled.
    """

    alpha: eqx.AbstractVar[Any]
    beta: eqx.AbstractVar[Any]
    local_steps: eqx.AbstractVar[int]
    how: eqx.AbstractVar[ClippedSteps]
    annealing: eqx.AbstractVar[Annealing]

    @abstractmethod
    def first_factors(self, params: Params) -> Params:
        """Return the initial factors of alpha; () where they are not learned."""

    @abstractmethod
    def batches(
        self, agent: PolicyObjective, learned: Learned, keys: StepKeys
    ) -> tuple[SampledBatch | None, SampledBatch]:
        """Sample the batch of the adaptation, if there is one, and the batch to improve on."""

    @property
    def scales_coordinates(self) -> bool:
        return self.how.optimizer.name != PLAIN

    @property
    def uploads_auxiliaries(self) -> bool:
        return self.how.optimizer.is_averaged or self.annealing.rounds is not None

    def init(self, params: Params) -> tuple[ServerState, PyTree]:
        """The message has the optimizer's state if it is averaged, a client's state if it is personal."""
        learned = Learned(params, self.first_factors(params))
        averaged, personal = self.how.optimizer.placed(self.how.optimizer.init(learned))
        return ServerState(LearnerMessage(learned, averaged, self.annealing.first_round)), personal

    def client(self, message: LearnerMessage, state: PyTree, agent: Objective, key: PRNGKeyArray) -> tuple:
        """Take tau local steps, each with fresh batches and several epochs on them."""
        source, optimizer = with_trajectories(agent, type(self).__name__), self.how.optimizer
        moments = optimizer.start(message.learned, message.moments, state)
        step = partial(self.step, source, self.annealing.rate(self.beta, message.round))
        learned, moments = local_steps(step, (message.learned, moments), agent, key, self.local_steps)
        averaged, personal = optimizer.placed(moments)
        return LearnerMessage(learned, averaged, self.annealing.next_round(message.round)), personal

    def step(self, agent: PolicyObjective, rate: Scalar, carry: tuple, keys: StepKeys) -> tuple[Learned, PyTree]:
        """Sample, and improve on the sample."""
        learned, moments = carry
        inner, outer = self.batches(agent, learned, keys)
        return _improve(self.how, learned, moments, self.alpha, rate, inner, outer)

    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        return ServerState(average(uploads, weights))

    def shared(self, message: LearnerMessage) -> Params:
        return message.learned.theta

    def adaptation_step_size(self, message: LearnerMessage) -> Any:
        return step_sizes(message.learned, self.alpha)

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require episodes, and a policy whose divergence is known."""
        check_divergence(type(self).__name__, fleet, policy)


class AdaptedLearner(ClippedLearner):
    """The base of those that improve the parameters before an adaptation, on a batch of the adapted policy.

    A subclass also has the fields `m_in` and `m_out`, the sizes of the batches before and after the adaptation.
    """

    m_in: eqx.AbstractVar[int]
    m_out: eqx.AbstractVar[int]

    @property
    def trajectories_per_round(self) -> int:
        return self.local_steps * (self.m_in + self.m_out)

    def batches(self, agent: PolicyObjective, learned: Learned, keys: StepKeys) -> tuple[SampledBatch, SampledBatch]:
        return pair_of_batches(agent, self.how, learned, self.alpha, keys, self.m_in, self.m_out)
