"""Clusters of initializations: several shared ones, and every agent trains the one that serves it best (IFCA)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Integer, PRNGKeyArray, PyTree

from perfedrl.algorithms.base import Algorithm, ServerState, average, select
from perfedrl.algorithms.checks import check_choice, check_counts
from perfedrl.algorithms.fine_tuned import FineTuned
from perfedrl.algorithms.per_fedavg_pg import PerFedAvgPG
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, adapt
from perfedrl.key_domains import CLUSTER_CHOICE
from perfedrl.types import Array, Params

VARIANTS = ("plain", "first-order", "exact")
MOST_CLUSTERS = 100


class ClusteredMessage(NamedTuple):
    """A message: the initializations on a leading axis, and each one's share of the agents in the last round.

    In an upload `theta` is the displacement of the chosen initialization, without that axis, and `members` has a 1 in
    its place.
    """

    theta: PyTree
    members: PyTree[Float[Array, " clusters"]]


class ClusterState(NamedTuple):
    """An agent's state: the initialization that it chose last, -1 before it took part."""

    choice: Float[Array, ""]


class Clustered(Algorithm):
    """Train `clusters` initializations; in every round an agent chooses one of them and trains it alone.

    An agent chooses the initialization with the largest value of the objective that its steps climb, estimated from
    `m_choose` trajectories of each: the return with `variant = "plain"`, which are those of FedAvg-PG, and the return
    after an adaptation step, from m_in further trajectories, with "first-order" and "exact", those of Per-FedAvg-PG.
    The server averages every initialization over the agents that chose it. One that nobody chose is replaced by the
    parameters of the agent that is farthest from the mean of its own cluster; with `reseed = False` it stays.

    All initializations start equal, and ties are broken at random, which makes the first difference between them. At
    deployment at most half of an agent's trajectories are for the choice and the others for `deployment_steps` steps.
    With one cluster it is FedAvg-PG or Per-FedAvg-PG.
    """

    inner: FineTuned | PerFedAvgPG
    clusters: int = eqx.field(static=True)
    m_choose: int = eqx.field(static=True)
    variant: str = eqx.field(static=True)
    reseed: bool = eqx.field(static=True)

    averages_by_choice = True

    def __init__(
        self,
        alpha: float,
        beta: float,
        clusters: int = 2,
        m_choose: int = 10,
        variant: Literal["plain", "first-order", "exact"] = "plain",
        local_steps: int = 5,
        m: int = 30,
        m_in: int = 10,
        m_h: int = 10,
        m_out: int = 10,
        deployment_steps: int = 1,
        reseed: bool = True,
    ):
        check_choice("variant", variant, VARIANTS)
        check_counts(clusters=clusters, m_choose=m_choose, deployment_steps=deployment_steps)
        if clusters > MOST_CLUSTERS:
            raise UserError(f"clusters must be at most {MOST_CLUSTERS}; it is {clusters}")
        self.clusters, self.m_choose, self.variant, self.reseed = clusters, m_choose, variant, reseed
        self.inner = (
            FineTuned(alpha, beta, local_steps, m, deployment_steps)
            if variant == "plain"
            else PerFedAvgPG(
                alpha, beta, local_steps, m_in, m_h, m_out, variant=variant, deployment_steps=deployment_steps
            )
        )

    @property
    def trajectories_per_round(self) -> int:
        """Those of the local steps, and of the choice where there is one."""
        return self.inner.trajectories_per_round + (self.clusters * sum(self._batches) if self.clusters > 1 else 0)

    def init(self, params: Params) -> tuple[ServerState, ClusterState]:
        dtype = jnp.result_type(*jax.tree.leaves(params))
        theta = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.clusters, *jnp.shape(x))), params)
        return ServerState(ClusteredMessage(theta, jnp.zeros(self.clusters, dtype))), ClusterState(-jnp.ones((), dtype))

    def client(
        self, message: ClusteredMessage, state: ClusterState, agent: Objective, key: PRNGKeyArray
    ) -> tuple[ClusteredMessage, ClusterState]:
        """Choose an initialization, take local steps from it, and return how far they led."""
        among, own = jnp.arange(self.clusters), jnp.asarray(state.choice)
        choosing, tie = jax.random.split(jax.random.fold_in(key, CLUSTER_CHOICE))
        # An agent stays where it is unless another initialization is better, and begins anywhere.
        priority = jax.random.uniform(tie, (self.clusters,)) + (among == own)
        choice = self._choice(message, agent, choosing, self._batches, priority)
        start = cluster(message.theta, choice)
        end, _ = self.inner.client(start, (), agent, key)
        members = (among == choice).astype(own.dtype)
        return ClusteredMessage(optax.tree.sub(end, start), members), ClusterState(choice.astype(own.dtype))

    def server(self, state: ServerState, uploads: ClusteredMessage, weights: Float[Array, " n"]) -> ServerState:
        """Move every initialization by the mean displacement of the agents that chose it."""
        theta, members = state.message
        # Whatever an agent sends as its membership, it counts in one cluster, with its own weight.
        choices = jnp.argmax(uploads.members, axis=1)
        chosen = choices[:, None] == jnp.arange(self.clusters)
        by_cluster = jnp.where(chosen, weights[:, None], 0)
        total = jnp.sum(by_cluster, axis=0)

        def mean(start: Params, weights: Float[Array, " n"], empty: Bool[Array, ""]) -> Params:
            moved = average(uploads.theta, jnp.where(empty, 1, weights))
            return select(empty, start, optax.tree.add(start, moved))

        moved = jax.vmap(mean)(theta, by_cluster.T, total == 0)
        if self.reseed and self.clusters > 1:
            ends = optax.tree.add(cluster(theta, choices), uploads.theta)
            moved = reseeded(moved, total == 0, ends, cluster(moved, choices))
        return ServerState(ClusteredMessage(moved, (total / jnp.sum(weights)).astype(members.dtype)))

    def shared(self, message: ClusteredMessage) -> Params:
        """Return the initialization that most agents chose in the last round; in an agent's own message, its own."""
        return cluster(message.theta, jnp.argmax(message.members))

    def with_personal_part(self, message: ClusteredMessage, state: ClusterState) -> ClusteredMessage:
        """Return the message with the agent as the only member of the initialization that it chose last."""
        own = (jnp.arange(self.clusters) == state.choice).astype(message.members.dtype)
        return message._replace(members=jnp.where(state.choice < 0, message.members, own))

    def unchanged_upload(self, message: ClusteredMessage) -> ClusteredMessage:
        """Return no displacement, and the members of the message."""
        return message._replace(theta=jax.tree.map(lambda x: jnp.zeros_like(x[0]), message.theta))

    def measured_part(self, upload: ClusteredMessage) -> ClusteredMessage:
        """Return the displacement alone: a membership has no length to limit."""
        return upload._replace(members=None)

    def personalize(
        self, message: ClusteredMessage, state: ClusterState, agent: Objective, key: PRNGKeyArray, m: int
    ) -> Params:
        """Choose an initialization, and take the steps of deployment from the other trajectories."""
        start = self.starting_point(message, state, agent, key, m)
        return self.inner.personalize(start, (), agent, key, m - self.choosing_trajectories(m))

    def starting_point(
        self, message: ClusteredMessage, state: ClusterState, agent: Objective, key: PRNGKeyArray, m: int
    ) -> Params:
        """Choose as in training; where trajectories do not tell, the last choice, or the largest cluster."""
        own = self.with_personal_part(message, state)
        batches = self._deployment_batches(m)
        if not sum(batches):
            return self.shared(own)
        choosing = jax.random.fold_in(key, CLUSTER_CHOICE)
        return cluster(message.theta, self._choice(message, agent, choosing, batches, own.members))

    def choosing_trajectories(self, m: int) -> int:
        return self.clusters * sum(self._deployment_batches(m))

    def check_participation(self, agents: int, participants: int, weights: Sequence[float] | None) -> None:
        """Reject client sampling where empty clusters are replaced: one is empty where its agents were not drawn."""
        if self.reseed and self.clusters > 1 and participants < agents:
            raise UserError(
                "clustered replaces an initialization that nobody chose, also where its agents were not drawn: set "
                "reseed = false, or participation = 1"
            )

    @property
    def step_sizes(self) -> Mapping[str, Any]:
        return self.inner.step_sizes

    @property
    def personalization_steps(self) -> int:
        inner = self.inner
        return inner.fine_tuning_steps if isinstance(inner, FineTuned) else inner.deployment_steps or 1

    @property
    def curvature_trajectories(self) -> int:
        return self.inner.curvature_trajectories

    @property
    def smallest_curvature_batch(self) -> int:
        return self.inner.smallest_curvature_batch

    def diagnostics(self, state: ClusterState) -> Mapping[str, Array]:
        """Whether the agent chose each initialization last; means over agents are the shares of the clusters."""
        return {f"in cluster {k}": (state.choice == k).astype(state.choice.dtype) for k in range(self.clusters)}

    @property
    def _batches(self) -> tuple[int, int]:
        """Trajectories of each initialization in a choice: of the adaptation before it is measured, and to measure."""
        return (self.inner.m_in if isinstance(self.inner, PerFedAvgPG) else 0), self.m_choose

    def _deployment_batches(self, m: int) -> tuple[int, int]:
        """As `_batches`, from at most half of m trajectories; 0 where these are too few for a choice."""
        share = m // (2 * self.clusters) if self.clusters > 1 else 0
        if self.variant == "plain":
            return 0, share
        return (share // 2, share - share // 2) if share > 1 else (0, 0)

    def _choice(
        self,
        message: ClusteredMessage,
        agent: Objective,
        key: PRNGKeyArray,
        batches: tuple[int, int],
        priority: Float[Array, " clusters"],
    ) -> Integer[Array, ""]:
        """Return the number of the initialization with the largest estimate; of equal ones, that of highest priority.

        All are tried with the same random numbers, so that their differences are less noisy than their values.
        """
        if self.clusters == 1:
            return jnp.zeros((), int)
        (m_in, m), (inner, outer) = batches, jax.random.split(key)

        def value(theta: Params) -> Float[Array, ""]:
            return agent.value(adapt(agent, theta, self.inner.alpha, inner, m_in), outer, m)

        numbers = range(self.clusters)
        values = (
            jax.vmap(value)(message.theta)
            if agent.traceable
            else jnp.stack([value(cluster(message.theta, i)) for i in numbers])
        )
        values = jnp.where(jnp.isnan(values), -jnp.inf, values)
        return jnp.argmax(jnp.where(values == jnp.max(values), priority, -1))


def cluster(theta: PyTree, number: Any) -> Params:
    """Return the initialization of this number; of several numbers, those initializations on a leading axis."""
    return jax.tree.map(lambda x: jnp.asarray(x)[number], theta)


def reseeded(theta: PyTree, empty: Bool[Array, " clusters"], ends: PyTree, means: PyTree) -> PyTree:
    """Replace empty clusters by the agents' parameters `ends` that are farthest from their clusters' `means`.

    Several empty clusters get different agents; without agents away from their means they stay.
    """
    squares = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2, axis=tuple(range(1, x.ndim))), ends, means)
    apart = jax.tree.reduce(jnp.add, squares)
    farthest = jnp.argsort(-apart)
    place = jnp.minimum(jnp.cumsum(empty) - 1, len(apart) - 1)
    agent = farthest[jnp.maximum(place, 0)]
    found = empty & (jnp.cumsum(empty) <= len(apart)) & (apart[agent] > 0)
    return jax.vmap(select)(found, cluster(ends, agent), theta)
