"""Attacks on the aggregation, for simulation only: some agents replace their uploads by others."""

import abc
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, Integer, Key, PRNGKeyArray, PyTree

from perfedrl.algorithms.base import Algorithm, ServerState
from perfedrl.algorithms.checks import check_counts, check_positive
from perfedrl.algorithms.wrapper import Wrapper, check_displacement, check_federated
from perfedrl.errors import UserError
from perfedrl.estimators.tree_math import ratio
from perfedrl.registry import registry
from perfedrl.types import Array, Params

DRAWN = 2024
"""Seed of the attacks' random numbers; the round is folded into its key."""


@runtime_checkable
class Attack(Protocol):
    """A function from the message and an attacker's honest upload to the upload that it sends."""

    def __call__(self, message: PyTree, upload: PyTree, key: PRNGKeyArray) -> PyTree: ...


@dataclass(frozen=True)
class SignFlip:
    """The honest displacement in the opposite direction, `scale` times as long.

    At 2.5, as in the literature on federated policy gradients (Fan et al., 2021).
    """

    scale: float = 2.5

    def __post_init__(self) -> None:
        check_positive(scale=self.scale)

    def __call__(self, message: PyTree, upload: PyTree, key: PRNGKeyArray) -> PyTree:
        return displaced(message, upload, -self.scale)


@dataclass(frozen=True)
class Scaled:
    """The honest displacement, `factor` times as long: too large a step in a plausible direction.

    A factor of the order of the number of agents lets one agent replace the mean (Bagdasaryan et al., 2020).
    """

    factor: float = 100.0

    def __post_init__(self) -> None:
        check_positive(factor=self.factor)

    def __call__(self, message: PyTree, upload: PyTree, key: PRNGKeyArray) -> PyTree:
        return displaced(message, upload, self.factor)


@dataclass(frozen=True)
class Random:
    """A displacement in a random direction, `factor` times as long as the honest one."""

    factor: float = 100.0

    def __post_init__(self) -> None:
        check_positive(factor=self.factor)

    def __call__(self, message: PyTree, upload: PyTree, key: PRNGKeyArray) -> PyTree:
        leaves, structure = jax.tree.flatten(message)
        keys = jax.tree.unflatten(structure, list(jax.random.split(key, len(leaves))))
        drawn = jax.tree.map(lambda x, k: jax.random.normal(k, jnp.shape(x), jnp.result_type(x)), message, keys)
        length = optax.tree.norm(optax.tree.sub(upload, message))
        return optax.tree.add_scale(message, ratio(self.factor * length, optax.tree.norm(drawn)), drawn)


class Collusion(abc.ABC):
    """An attack of agents that know the message and all honest uploads, and all send the same."""

    @abc.abstractmethod
    def __call__(self, message: PyTree, honest: PyTree, key: PRNGKeyArray) -> PyTree:
        """Return the upload of every attacker; `honest` are the others' uploads, stacked along the agents' axis."""


@dataclass(frozen=True)
class Opposite(Collusion):
    """Against the mean of the honest displacements, `factor` times as long as their median length.

    At 10 it is the longest upload that a server takes whole by default. At factors around 1 this is inner-product
    manipulation (Xie et al., 2020), which no check of lengths notices.
    """

    factor: float = 10.0

    def __post_init__(self) -> None:
        check_positive(factor=self.factor)

    def __call__(self, message: PyTree, honest: PyTree, key: PRNGKeyArray) -> PyTree:
        moved = jax.tree.map(jnp.subtract, honest, message)
        usual = jnp.median(jax.vmap(optax.tree.norm)(moved))
        mean = jax.tree.map(lambda x: jnp.mean(x, axis=0), moved)
        return optax.tree.add_scale(message, -ratio(self.factor * usual, optax.tree.norm(mean)), mean)


@dataclass(frozen=True)
class ALittle(Collusion):
    """Every coordinate's honest mean, `deviations` standard deviations nearer to and past the message.

    Attackers stay within the spread of the honest uploads, and so look like them (Baruch et al., 2019).
    """

    deviations: float = 1.5

    def __post_init__(self) -> None:
        check_positive(deviations=self.deviations)

    def __call__(self, message: PyTree, honest: PyTree, key: PRNGKeyArray) -> PyTree:
        def aside(sent: Array, x: Array) -> Array:
            mean = jnp.mean(x, axis=0)
            return mean - self.deviations * jnp.sign(mean - sent) * jnp.std(x, axis=0)

        return jax.tree.map(aside, message, honest)


ATTACKS = registry("attack", sign_flip=SignFlip, scaled=Scaled, random=Random, opposite=Opposite, a_little=ALittle)


class AttackState(NamedTuple):
    """The server's private state: the inner algorithm's, and the number of rounds so far."""

    inner: PyTree
    rounds: Integer[Array, ""]


class Attacked(Wrapper):
    """Replace the uploads of the last `agents` agents on their way to the server.

    Attackers do the honest work first, and see only the message and their own upload; in a `Collusion` they see the
    honest uploads instead of theirs. All seeds share the attack's random numbers, which depend on the round alone.
    """

    attack: Attack | Collusion = eqx.field(static=True)
    agents: int = eqx.field(static=True)

    def __init__(self, inner: Algorithm, attack: Attack | Collusion, agents: int):
        check_federated(inner, "upload to attack")
        check_counts(agents=agents)
        self.inner, self.attack, self.agents = inner, attack, agents

    @property
    def least_agents(self) -> int:
        """At least one agent is honest."""
        return max(self.agents + 1, self.inner.least_agents)

    def check_participation(self, agents: int, participants: int, weights: Any) -> None:
        """Require all agents in every round: attackers are identified by their position in the fleet."""
        if participants < agents:
            raise UserError(
                "attacks are simulated with all agents in every round: leave out participation, or the attack"
            )
        super().check_participation(agents, participants, weights)

    def init(self, params: Params) -> tuple[ServerState, PyTree]:
        server, client = self.inner.init(params)
        return ServerState(server.message, AttackState(server.private, jnp.zeros((), jnp.int32))), client

    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        inner, rounds = state.private
        if len(weights) <= self.agents:
            raise UserError(f"{self.agents} agents attack, and {len(weights)} sent something: none of them is honest")
        keys = jax.random.split(jax.random.fold_in(jax.random.key(DRAWN), rounds), self.agents)
        honest, own = (jax.tree.map(lambda x, part=part: x[part], uploads) for part in self._parts)
        message = self.inner.unchanged_upload(state.message)
        check_displacement(message, jax.tree.map(lambda x: x[0], own), "attacks are")
        sent = self._sent(message, honest, own, keys)
        uploads = jax.tree.map(lambda x, y: jnp.concatenate([x, y]), honest, sent)
        after = self.inner.server(ServerState(state.message, inner), uploads, weights)
        return ServerState(after.message, AttackState(after.private, rounds + 1))

    def _sent(self, message: PyTree, honest: PyTree, own: PyTree, keys: Key[jax.Array, " attacker"]) -> PyTree:
        """The uploads of the attackers."""
        if isinstance(self.attack, Collusion):
            one = self.attack(message, honest, keys[0])
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.agents, *x.shape)), one)
        return jax.vmap(self.attack, in_axes=(None, 0, 0))(message, own, keys)

    @property
    def _parts(self) -> tuple[slice, slice]:
        return slice(None, -self.agents), slice(-self.agents, None)


def displaced(message: PyTree, upload: PyTree, factor: float) -> PyTree:
    """Move the message by a multiple of the upload's displacement."""
    return jax.tree.map(lambda sent, x: sent + factor * (x - sent), message, upload)
