"""The base of wrappers: algorithms that change some methods of another algorithm and delegate all others to it."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from perfedrl.algorithms.base import Algorithm
from perfedrl.contracts import delegated
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective


class Wrapper(Algorithm):
    """An algorithm around an `inner` one, to which it delegates every member of the contract that it does not override.

    The inner algorithm is a child of the pytree, so its step sizes stay leaves.
    """

    inner: Algorithm

    runs_on_agents: ClassVar[bool] = False
    """Whether an agent's own process runs the wrapper's `client`; otherwise the server or the simulation does."""

    # Facts about rounds, and the six methods of an algorithm.
    federated = delegated("inner")
    serves_unseen = delegated("inner")
    uploads_may_be_empty = delegated("inner")
    averages_by_choice = delegated("inner")
    upload_cycle = delegated("inner")
    asynchronous = delegated("inner")
    remembers_uploads = delegated("inner")
    trajectories_per_round = delegated("inner")
    init = delegated("inner")
    client = delegated("inner")
    server = delegated("inner")
    shared = delegated("inner")
    personalize = delegated("inner")

    # Costs and step sizes.
    trajectories_after = delegated("inner")
    step_sizes = delegated("inner")
    adaptation_step_size = delegated("inner")
    deployment_step_size = delegated("inner")
    adaptation_step = delegated("inner")
    starting_point = delegated("inner")
    choosing_trajectories = delegated("inner")
    learns_step_size = delegated("inner")
    personalization_steps = delegated("inner")
    curvature_trajectories = delegated("inner")
    smallest_curvature_batch = delegated("inner")

    # Uploads, personal parts and records.
    unchanged_upload = delegated("inner")
    received = delegated("inner")
    uploads_whole_messages = delegated("inner")
    uploads_auxiliaries = delegated("inner")
    scales_coordinates = delegated("inner")
    measured_part = delegated("inner")
    without_training_state = delegated("inner")
    with_personal_part = delegated("inner")
    diagnostics = delegated("inner")

    # Requirements, checked before anything is compiled.
    least_agents = delegated("inner")
    check_supports = delegated("inner")
    check_participation = delegated("inner")

    def fitted_to(self, agent: Objective) -> Algorithm:
        """Return the wrapper around the inner algorithm for agents like this one."""
        return eqx.tree_at(lambda wrapper: wrapper.inner, self, self.inner.fitted_to(agent))


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
    if not same_shape(message, upload):
        raise UserError(f"{what} for algorithms whose upload is a changed message, which this one's is not")


def same_shape(one: PyTree, other: PyTree) -> bool:
    """Whether two trees have the same structure and leaves of the same shapes."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (one, other)]
    return structures[0] == structures[1] and shapes(one) == shapes(other)


def shapes(tree: PyTree) -> list[tuple[int, ...]]:
    """Return the shapes of the leaves of a tree."""
    return [jnp.shape(x) for x in jax.tree.leaves(tree)]


def check_only_parameters(algorithm: Algorithm, fleet: Fleet, policy: Any, what: str) -> None:
    """Check that messages hold nothing but learned values: the parameters, and a step size where that is learned.

    Calls the algorithm's own `check_supports` first.
    """
    algorithm.check_supports(fleet, policy)
    inside = unwrapped(algorithm)
    start = jax.eval_shape(policy.init, jax.random.key(0))
    sent, unwrapped_sent = (jax.eval_shape(lambda x, a=a: a.init(x)[0].message, start) for a in (algorithm, inside))
    learned = unwrapped_sent if inside.learns_step_size else start
    if inside.uploads_auxiliaries or shapes(sent) != shapes(learned):
        own = "leave out the algorithm's anneal and set its optimizer_state to 'personal' or 'reset', or leave it out"
        advice = own if inside.uploads_auxiliaries else "leave it out"
        raise UserError(f"{what} parameters, and a message of {type(inside).__name__} holds more than these: {advice}")
