"""The contract of a federated algorithm, and the loops, means and checks that algorithms share."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Key, PRNGKeyArray, PyTree

from perfedrl.envs import Fleet
from perfedrl.estimators import Objective, StepKeys, adapt
from perfedrl.types import Array, Params, Whole

STEP_SIZES = ("alpha", "beta", "deployment_alpha")
"""Names of fields that hold step sizes: of adaptation, of local steps, and of adaptation at deployment."""


def static(default: Any, **options: Any) -> Any:
    """A field for a count or a choice, with its default: a new value compiles anew, and it cannot differ in a sweep."""
    return eqx.field(static=True, default=default, **options)


class ServerState(NamedTuple):
    """State of the server: `message` is broadcast every round; `private` (optimizer moments, say) never leaves it."""

    message: PyTree
    private: PyTree = ()


class Algorithm(eqx.Module):
    """A federated algorithm: subclass it and implement the six abstract methods.

    A round: the server broadcasts `message`; every agent calls `client` with the message and its personal state; the
    server combines the uploads in `server`. The simulator vmaps `client` over agents. At deployment an agent calls
    `personalize`.

    An algorithm is a pytree. Declare step sizes as plain fields, which makes them leaves, so that a sweep over them is
    one vmap and one compilation; declare counts and choices with `eqx.field(static=True)`. Whatever is personal lives
    in the client state and never enters an upload.

    The other members state facts that the rest of the library asks for. Each has a default that fits an algorithm whose
    upload is the message after some local steps; override those that differ.
    """

    federated: ClassVar[bool] = True
    """Whether agents send anything; False for baselines that train every agent alone."""

    serves_unseen: ClassVar[bool] = True
    """Whether an agent that never took part can personalize; False forbids held-out agents."""

    uploads_may_be_empty: ClassVar[bool] = False
    """Whether agents send nothing in some rounds, so that an upload cannot be taken for a changed message."""

    averages_by_choice: ClassVar[bool] = False
    """Whether an upload names one of several shared parameters, so that the algorithm alone can combine uploads."""

    upload_cycle: ClassVar[int] = 1
    """Number of rounds after which uploads are of the same kind again; servers compare those of one kind."""

    remembers_uploads: ClassVar[bool] = False
    """Whether the server relies on what agents remember of their uploads; without it an agent cannot take part."""

    @property
    @abc.abstractmethod
    def trajectories_per_round(self) -> int:
        """Number of trajectories that one round costs each agent; the largest number where rounds differ."""

    @abc.abstractmethod
    def init(self, params: Params) -> tuple[ServerState, PyTree]:
        """Return the server's state and the state in which every client starts."""

    @abc.abstractmethod
    def client(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        """Do one agent's work of one round: return its upload and its new personal state."""

    @abc.abstractmethod
    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        """Combine the uploads, stacked along the agents' axis, into the next server state."""

    @abc.abstractmethod
    def shared(self, message: PyTree) -> Params:
        """Return the shared initialization that a message carries."""

    @abc.abstractmethod
    def personalize(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        """Return the parameters that one agent deploys, from m trajectories of its own."""

    # Costs and step sizes.

    def trajectories_after(self, rounds: int) -> int:
        """Number of trajectories that `rounds` rounds cost each agent; override where rounds differ in cost."""
        return rounds * self.trajectories_per_round

    @property
    def step_sizes(self) -> Mapping[str, Any]:
        """Step sizes by name: those of the fields "alpha", "beta" and "deployment_alpha" that are set."""
        names = [field.name for field in dataclasses.fields(self) if field.name in STEP_SIZES]
        return {name: size for name in names if (size := getattr(self, name)) is not None}

    def adaptation_step_size(self, message: PyTree) -> Any:
        """Step size of the adaptation in training: a number, or one per parameter; None where there is none."""
        return self.step_sizes.get("alpha")

    def deployment_step_size(self, message: PyTree) -> Any:
        """Step size of the adaptation at deployment, as `adaptation_step_size`."""
        return self.adaptation_step_size(message)

    def adaptation_step(self, agent: Objective, theta: Params, alpha: Any, key: PRNGKeyArray, m: int) -> Params:
        """Take one adaptation step at deployment from m trajectories: by default along the policy gradient.

        Commands that adapt a saved run step by step, or with another step size, use it; `personalize` may take several.
        """
        return adapt(agent, theta, alpha, key, m)

    def starting_point(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        """Return the parameters from which an agent takes its steps at deployment; by default the shared ones.

        Override it, and `choosing_trajectories`, where an agent chooses among several by its own trajectories.
        """
        return self.shared(self.with_personal_part(message, state))

    def choosing_trajectories(self, m: int) -> int:
        """Number of an agent's m trajectories that `starting_point` takes; the others are for the steps."""
        return 0

    @property
    def learns_step_size(self) -> bool:
        """Whether the message holds a learned step size beside the parameters."""
        return False

    @property
    def personalization_steps(self) -> int:
        """Number of policy-gradient steps in which a saved run is personalized when the user names no number."""
        return 1

    @property
    def curvature_trajectories(self) -> int:
        """Number of trajectories of one curvature estimate; 0 for algorithms without any."""
        return 0

    @property
    def smallest_curvature_batch(self) -> int:
        """Smallest number of trajectories that a curvature estimate may be computed from."""
        return 2

    def fitted_to(self, agent: Objective) -> "Algorithm":
        """Return the algorithm whose `init` makes client states for agents like this one; by default the same.

        Override it where a client's first state depends on its agent, such as one that keeps trajectories; the result
        is for `init` alone. `agent` is an outline: JAX can trace it, and its trajectories have the right shapes.
        """
        return self

    # Uploads, personal parts and records.

    def unchanged_upload(self, message: PyTree) -> PyTree:
        """Return the upload of an agent that learns nothing from a message.

        Privacy, attacks and control variates take an upload's difference from it for the agent's displacement. Override
        it where the upload is a part of the message, or something else.
        """
        return message

    @property
    def asynchronous(self) -> bool:
        """Whether a server in a network takes uploads of earlier rounds too, so that no round waits for an agent."""
        return False

    def received(self, upload: PyTree, round_: int) -> PyTree:
        """Return an upload of an asynchronous agent as the server takes it, which was computed from a round's message.

        Servers in a network call it: what an agent says of the round of its upload is not trusted.
        """
        return upload

    @property
    def uploads_whole_messages(self) -> bool:
        """Whether every upload is the message, changed: in its structure, with nothing left out."""
        return type(self).unchanged_upload is Algorithm.unchanged_upload and not self.uploads_may_be_empty

    def measured_part(self, upload: PyTree) -> PyTree:
        """Return the part of an upload whose distance from `unchanged_upload` servers limit, None for other leaves."""
        return upload

    def without_training_state(self, message: PyTree) -> PyTree:
        """Return the message with None for leaves that further training alone needs, such as an optimizer's moments."""
        return message

    def with_personal_part(self, message: PyTree, state: PyTree) -> PyTree:
        """Return the message as one agent sees it: with its own values of the part that stays with the agents."""
        return message

    def diagnostics(self, state: PyTree) -> Mapping[str, Array]:
        """Return named numbers from a client state to record with every evaluation, such as an agent's own weight."""
        return {}

    @property
    def uploads_auxiliaries(self) -> bool:
        """Whether uploads hold numbers beside what is learned, such as an optimizer's moments or a count of rounds."""
        return False

    @property
    def scales_coordinates(self) -> bool:
        """Whether local steps scale every coordinate on its own, as Adam does, instead of following the gradient."""
        return False

    # Requirements, checked before anything is compiled.

    @property
    def least_agents(self) -> int:
        """Smallest number of agents that a round needs."""
        return 1

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Raise `UserError` for a fleet or a policy that the algorithm cannot train."""
        return

    def check_participation(self, agents: int, participants: int, weights: Sequence[float] | None) -> None:
        """Raise `UserError` if the algorithm cannot run with `participants` of `agents` agents per round."""
        return


class AveragedParameters(Algorithm):
    """An algorithm that sends parameters both ways: the message is the shared policy, the server averages uploads.

    Clients keep no state, unless `init` is overridden. A subclass adds `client`, `personalize` and
    `trajectories_per_round`, and may combine the uploads in another way.
    """

    def init(self, params: Params) -> tuple[ServerState, PyTree]:
        return ServerState(params), ()

    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        return ServerState(average(uploads, weights))

    def shared(self, message: PyTree) -> Params:
        return message


def local_step_keys(key: PRNGKeyArray, count: int) -> PyTree[Key[Array, "count 3"]]:
    """The keys of `count` local steps, a row of `StepKeys` each."""
    return jax.random.split(key, (count, len(StepKeys._fields)))


def local_steps(
    step: Callable[[PyTree, StepKeys], PyTree], carry: PyTree, agent: Objective, key: PRNGKeyArray, count: int
) -> PyTree:
    """Apply `count` local steps, theta^0 -> theta^tau in lines 4-7 of Algorithm 1.

    Compiled into one loop, or run in Python for a Python sampler. The carry may hold more than the parameters.
    """
    keys = local_step_keys(key, count)
    if agent.traceable:
        return jax.lax.scan(lambda carry, k: (step(carry, StepKeys(*k)), None), carry, keys)[0]
    for k in keys:
        carry = step(carry, StepKeys(*k))
    return carry


def repeated(step: Callable[[PyTree, Any], PyTree], carry: PyTree, agent: Objective, count: Whole) -> PyTree:
    """Apply `step(carry, i)` for i = 0 .. count - 1, where the count itself may be traced.

    Under vmap a condition computes both of its branches; this loop runs only while some replica or agent needs it.
    """
    if agent.traceable:
        return jax.lax.fori_loop(0, count, lambda i, carry: step(carry, i), carry)
    for i in range(int(count)):
        carry = step(carry, i)
    return carry


def average(uploads: PyTree, weights: Float[Array, " n"]) -> PyTree:
    """Weighted mean over agents, line 10 of Algorithm 1."""
    share = weights / jnp.sum(weights)
    return jax.tree.map(lambda x: jnp.sum(x * share.reshape(-1, *[1] * (x.ndim - 1)), axis=0), uploads)


def select(condition: Bool[Array, ""], one: PyTree, other: PyTree) -> PyTree:
    """Return `one` where a traced condition holds, else `other`, leaf by leaf."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)
