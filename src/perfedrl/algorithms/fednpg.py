"""FedNPG: federated entropy-regularized natural policy gradient for one shared tabular softmax policy."""

import numbers
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, PRNGKeyArray

from perfedrl.algorithms.base import AveragedParameters, ServerState, local_steps, static
from perfedrl.algorithms.checks import check_counts, check_positive, check_step_sizes, with_trajectories
from perfedrl.compilation import jit
from perfedrl.envs import Fleet, TabularMDP
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, StepKeys, adapt
from perfedrl.exact.soft import soft_action_values, soft_advantages
from perfedrl.exact.tabular import ExactObjective
from perfedrl.policies import TableSoftmax
from perfedrl.policies.tabular import entropies
from perfedrl.types import Array, Params, Scalar, Trajectory

Table = Float[Array, "S A"]


class ActionValues(NamedTuple):
    """An agent's last estimates of its soft action values, and which pairs it ever visited (1; elsewhere 0)."""

    q: Table
    seen: Table


class FedNPG(AveragedParameters):
    """Mirror steps on the mean of the agents' soft action values (Yang et al., 2024; their star topology).

    theta <- (1 - c) theta + c A / entropy, c = beta entropy / (1 - gamma) and A the mean over agents of the soft
    advantages under theta: the paper's step, less a constant per state to which a softmax is invariant, so that theta
    tends to the log-policy itself. As the step is affine in A, every agent takes it with its own A and the server
    averages.

    Exact agents compute their soft action values over an infinite horizon. Other agents keep a table of them and, in
    every round, back it up at the pairs that m trajectories visit.
    """

    alpha: float
    beta: float
    entropy: float = 0.1
    m: int = static(30)

    def __check_init__(self) -> None:
        check_step_sizes(self.alpha, self.beta)
        check_positive(entropy=self.entropy)
        check_counts(m=self.m)

    @property
    def trajectories_per_round(self) -> int:
        return self.m

    def check_supports(self, fleet: Fleet, policy: Any) -> None:
        """Require a table of action values, and a step no longer than soft policy iteration's."""
        if not isinstance(policy, TableSoftmax) or (fleet.traceable and not isinstance(fleet.train, TabularMDP)):
            raise UserError(
                "fednpg needs the policy 'table' on agents with finitely many states (a fleet of TabularMDP): its "
                "natural gradient is a table of action values; fedavg-pg climbs the same mean with any policy"
            )
        if fleet.train.horizon < 1:
            raise UserError("fednpg needs episodes of two decisions or more (horizon >= 1); fedavg-pg can do with one")
        values = self.beta, self.entropy
        most = (1 - fleet.train.discount) / self.entropy
        if all(isinstance(x, numbers.Real) for x in values) and self.beta > most * (1 + 1e-9):
            raise UserError(
                f"fednpg's beta must be at most (1 - discount) / entropy = {most:.6g}, where it is soft policy "
                f"iteration; it is {self.beta}"
            )

    def init(self, params: Params) -> tuple[ServerState, ActionValues]:
        return ServerState(params), ActionValues(jnp.zeros_like(params), jnp.zeros_like(params))

    def client(
        self, message: Table, state: ActionValues, agent: Objective, key: PRNGKeyArray
    ) -> tuple[Table, ActionValues]:
        """Take one mirror step along the agent's own soft advantages."""
        return local_steps(partial(self.step, agent), (message, state), agent, key, 1)

    def step(self, agent: Objective, carry: tuple[Table, ActionValues], keys: StepKeys) -> tuple[Table, ActionValues]:
        """Compute (1 - c) theta + c A / entropy."""
        theta, known = carry
        if isinstance(agent, ExactObjective):
            discount = agent.task.discount
            q = soft_action_values(agent.task, jax.nn.log_softmax(theta), self.entropy)
            known = ActionValues(q, jnp.ones_like(q))
        else:
            agent = with_trajectories(agent, "fednpg")
            discount = agent.discount
            batch = agent.sampler.sample(theta, keys.outer, self.m)
            known = _backed_up(discount, known, theta, batch, self.entropy)
        return _mirror(theta, known.q, self.entropy, self.beta / (1 - discount)), known

    def personalize(self, message: Table, state: Any, agent: Objective, key: PRNGKeyArray, m: int) -> Table:
        return adapt(agent, message, self.alpha, key, m)


def mirror_step(theta: Table, q: Table, entropy: Scalar, step: Scalar) -> Table:
    """Move theta along the soft advantages of q."""
    return (1 - step * entropy) * theta + step * soft_advantages(q, jax.nn.log_softmax(theta), entropy)


def filled(known: ActionValues, theta: Table) -> Table:
    """Fill in pairs that were never visited with the policy's mean over the visited actions of their state."""
    return jnp.where(known.seen > 0, known.q, _usual(known.q, known.seen > 0, theta))


def backed_up(discount: float, known: ActionValues, theta: Table, batch: Trajectory, entropy: Scalar) -> ActionValues:
    """Back up the table once at the pairs of a batch: q(s, a) becomes the mean of r + gamma V(s') over visits.

    V is the table's own, under the policy and with its entropy. In a visited state the other actions keep their
    advantage, not their value: while values rise, an action that was not tried lately would otherwise fall behind and
    never be tried again. The last decision of a trajectory has no successor and does not count as a visit; the value
    after an early end is 0.
    """
    log_policy, q = jax.nn.log_softmax(theta), filled(known, theta)
    v = jnp.sum(jnp.exp(log_policy) * q, axis=-1) + entropy * entropies(log_policy)
    visits, lives = batch.mask[:, :-1], discount * batch.mask[:, 1:]
    target = batch.reward[:, :-1] + lives * v[batch.obs[:, 1:]]
    pair = (batch.obs * theta.shape[1] + batch.action)[:, :-1]

    def into_table(x: Array) -> Table:
        """Sum values over the decisions of each pair of state and action."""
        return jnp.zeros_like(theta).reshape(-1).at[pair].add(x).reshape(theta.shape)

    count, total = into_table(visits), into_table(visits * target)
    here, change = count > 0, total / jnp.maximum(count, 1) - q
    after = ActionValues(q + jnp.where(here, change, _usual(change, here, theta)), jnp.where(here, 1, known.seen))
    return after._replace(q=filled(after, theta))


def _usual(x: Table, some: Bool[Array, "S A"], theta: Table) -> Float[Array, "S 1"]:
    """Mean under the policy over a subset of the actions, by state; 0 where the subset is empty."""
    share = jnp.where(some, jax.nn.softmax(theta), 0)
    total = jnp.sum(share, axis=-1, keepdims=True)
    return jnp.sum(share * x, axis=-1, keepdims=True) / jnp.maximum(total, jnp.finfo(total.dtype).tiny)


# Jitted so that batches of a Python sampler are processed by compiled code too; a caller's jit inlines them.
_backed_up = jit(backed_up, static_argnums=0)
_mirror = jit(mirror_step)
