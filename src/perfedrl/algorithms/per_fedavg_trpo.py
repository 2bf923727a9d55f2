"""MAML with TRPO as its outer step (Finn et al., 2017), federated: trust-region steps on an initialization."""

from functools import partial
from typing import Any, Literal

from jaxtyping import PRNGKeyArray, PyTree

from perfedrl.algorithms.base import AveragedParameters, ServerState, local_steps, static
from perfedrl.algorithms.checks import (
    check_choice,
    check_counts,
    check_divergence,
    check_learned_factor,
    check_positive,
    check_step_sizes,
    with_trajectories,
)
from perfedrl.algorithms.fine_tuned import fine_tune
from perfedrl.algorithms.learned_adaptation import (
    LEARNED,
    VARIANTS,
    Learned,
    first_factors,
    pair_of_batches,
    step_sizes,
)
from perfedrl.algorithms.trust_region import TrustRegion, improve
from perfedrl.compilation import jit
from perfedrl.envs.fleet import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, PolicyObjective, StepKeys
from perfedrl.types import Params, StepSize

_improve = jit(improve, static_argnums=0)


class PerFedAvgTRPO(AveragedParameters):
    """Learn an initialization for one policy-gradient step, with one trust-region step on every pair of batches.

    In a local step an agent samples m_in trajectories, adapts, samples m_out trajectories with the adapted policy, and
    moves the initialization along the natural gradient of their surrogate, so far that the adapted policy diverges by
    at most `delta` on them. There is no rate: delta takes its place.

    - `damping`: this multiple of the identity is added to the Fisher matrix.
    - `iterations`: of conjugate gradients, which solve for the natural gradient.
    - `backtracks`: the most halvings of a step that diverges too far or does not raise the surrogate; after that no
      step is taken.
    - `variant`: "first-order" takes the gradient of the adaptation as constant, "differentiated" does not.
    - `learn_alpha`: "per-parameter" learns a factor of alpha for each parameter, from 1, in the same trust region.

    Use it with `advantage = "gae"`: adaptation steps are then in units that do not depend on those of rewards.
    """

    alpha: float
    delta: float = 0.01
    local_steps: int = static(1)
    m_in: int = static(20)
    m_out: int = static(20)
    damping: float = static(1e-3)
    iterations: int = static(10)
    backtracks: int = static(10)
    variant: Literal["first-order", "differentiated"] = static("first-order")
    learn_alpha: Literal["no", "per-parameter"] = static("no")

    def __check_init__(self) -> None:
        check_choice("variant", self.variant, VARIANTS)
        check_choice("learn_alpha", self.learn_alpha, LEARNED)
        check_step_sizes(self.alpha, 1.0)
        check_positive(delta=self.delta)
        check_counts(local_steps=self.local_steps, m_in=self.m_in, m_out=self.m_out)
        check_learned_factor(self.alpha, self.learn_alpha)
        self.how  # noqa: B018 - making it checks its settings

    @property
    def how(self) -> TrustRegion:
        """How a pair of batches is used."""
        return TrustRegion(self.damping, self.iterations, self.backtracks, self.variant == "first-order")

    @property
    def trajectories_per_round(self) -> int:
        return self.local_steps * (self.m_in + self.m_out)

    @property
    def learns_step_size(self) -> bool:
        return self.learn_alpha != "no"

    def init(self, params: Params) -> tuple[ServerState, PyTree]:
        """The message is the initialization, with its factors of alpha if these are learned."""
        return ServerState(self._message(Learned(params, first_factors(params, self.learn_alpha)))), ()

    def client(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        """Take tau local steps, each on a fresh pair of batches."""
        step = partial(self.step, with_trajectories(agent, type(self).__name__))
        return self._message(local_steps(step, self._learned(message), agent, key, self.local_steps)), state

    def step(self, agent: PolicyObjective, learned: Learned, keys: StepKeys) -> Learned:
        """Sample a pair of batches and take the trust-region step on it."""
        inner, outer = pair_of_batches(agent, self.how, learned, self.alpha, keys, self.m_in, self.m_out)
        return _improve(self.how, learned, self.alpha, self.delta, inner, outer)

    def shared(self, message: PyTree) -> Params:
        return self._learned(message).theta

    def adaptation_step_size(self, message: PyTree) -> StepSize:
        return step_sizes(self._learned(message), self.alpha)

    def personalize(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return fine_tune(agent, self.shared(message), self.deployment_step_size(message), key, m, 1)

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require episodes, and a policy all of whose parameters act."""
        check_divergence(type(self).__name__, fleet, policy)
        if policy.value_fit is not None or policy.moment_fit is not None:
            raise UserError(
                "per-fedavg-trpo limits steps by the divergence of actions, which a value network and normalization "
                "moments do not change: take a policy without these, or promp"
            )

    def _message(self, learned: Learned) -> PyTree:
        return learned if self.learns_step_size else learned.theta

    def _learned(self, message: PyTree) -> Learned:
        return message if self.learns_step_size else Learned(message, ())
