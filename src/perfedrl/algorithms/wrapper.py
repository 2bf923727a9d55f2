"""The base of wrappers: algorithms that change some methods of another algorithm and delegate all others to it."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms.base import Algorithm, ServerState
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective
from perfedrl.types import Array, Params


class Wrapper(Algorithm):
    """An algorithm around an `inner` one, to which it delegates every member of the contract that it does not override.

    The inner algorithm is a child of the pytree, so its step sizes stay leaves.
    """

    inner: Algorithm

    runs_on_agents: ClassVar[bool] = False
    """Whether an agent's own process runs the wrapper's `client`; otherwise the server or the simulation does."""

    @property
    def federated(self) -> bool:  # type: ignore[override]
        return self.inner.federated

    @property
    def serves_unseen(self) -> bool:  # type: ignore[override]
        return self.inner.serves_unseen

    @property
    def uploads_may_be_empty(self) -> bool:  # type: ignore[override]
        return self.inner.uploads_may_be_empty

    @property
    def trajectories_per_round(self) -> int:
        return self.inner.trajectories_per_round

    def init(self, params: Params) -> tuple[ServerState, PyTree]:
        return self.inner.init(params)

    def client(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        return self.inner.client(message, state, agent, key)

    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        return self.inner.server(state, uploads, weights)

    def shared(self, message: PyTree) -> Params:
        return self.inner.shared(message)

    def personalize(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return self.inner.personalize(message, state, agent, key, m)

    def trajectories_after(self, rounds: int) -> int:
        return self.inner.trajectories_after(rounds)

    @property
    def step_sizes(self) -> Mapping[str, Any]:
        return self.inner.step_sizes

    def adaptation_step_size(self, message: PyTree) -> Any:
        return self.inner.adaptation_step_size(message)

    def deployment_step_size(self, message: PyTree) -> Any:
        return self.inner.deployment_step_size(message)

    @property
    def learns_step_size(self) -> bool:
        return self.inner.learns_step_size

    @property
    def personalization_steps(self) -> int:
        return self.inner.personalization_steps

    @property
    def curvature_trajectories(self) -> int:
        return self.inner.curvature_trajectories

    @property
    def smallest_curvature_batch(self) -> int:
        return self.inner.smallest_curvature_batch

    def unchanged_upload(self, message: PyTree) -> PyTree:
        return self.inner.unchanged_upload(message)

    @property
    def uploads_whole_messages(self) -> bool:
        return self.inner.uploads_whole_messages

    def with_personal_part(self, message: PyTree, state: PyTree) -> PyTree:
        return self.inner.with_personal_part(message, state)

    def diagnostics(self, state: PyTree) -> Mapping[str, Array]:
        return self.inner.diagnostics(state)

    @property
    def least_agents(self) -> int:
        return self.inner.least_agents

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        self.inner.check_supports(fleet, policy)

    def check_participation(self, agents: int, participants: int, weights: Sequence[float] | None) -> None:
        self.inner.check_participation(agents, participants, weights)


def unwrapped(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm inside all wrappers."""
    while isinstance(algorithm, Wrapper):
        algorithm = algorithm.inner
    return algorithm


def agent_side(algorithm: Algorithm) -> Algorithm:
    """Return what an agent's own process runs: the algorithm inside the wrappers of the server and the simulation."""
    while isinstance(algorithm, Wrapper) and not algorithm.runs_on_agents:
        algorithm = algorithm.inner
    return algorithm


def check_federated(algorithm: Algorithm, what: str) -> None:
    """Check that an algorithm sends something that a wrapper can change."""
    if not algorithm.federated:
        raise UserError(f"{type(algorithm).__name__} trains every agent alone and sends nothing: there is no {what}")


def check_displacement(message: PyTree, upload: PyTree, what: str) -> None:
    """Check that an upload has the structure and the shapes of a message, so that their difference is defined."""
    if _shape(message) != _shape(upload):
        raise UserError(f"{what} for algorithms whose upload is a changed message, which this one's is not")


def _shape(tree: PyTree) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(tree), [jnp.shape(x) for x in jax.tree.leaves(tree)]


def check_only_parameters(algorithm: Algorithm, fleet: Fleet, policy: Any, what: str) -> None:
    """Check that messages hold nothing but learned values: the parameters, and a step size where that is learned.

    Calls the algorithm's own `check_supports` first.
    """
    algorithm.check_supports(fleet, policy)
    inside = unwrapped(algorithm)
    start = jax.eval_shape(policy.init, jax.random.key(0))
    sent, own = (jax.eval_shape(lambda x, a=a: a.init(x)[0].message, start) for a in (algorithm, inside))
    learned = own if inside.learns_step_size else start
    if len({jax.tree.structure(sent), jax.tree.structure(learned)}) > 1:
        name = type(inside).__name__
        raise UserError(f"{what} parameters, and a message of {name} holds more than these: leave it out")
