"""The interface of a federated algorithm, and the loop that all of them share."""

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray, PyTree

from perfedrl.errors import UserError
from perfedrl.estimators import Objective, PolicyObjective, StepKeys
from perfedrl.types import Array, Params, Whole

LARGEST_COUNT = 1_000_000
LARGEST_STEP = float(np.finfo(np.float32).max)


class ServerState(NamedTuple):
    """What the server holds: `message` is broadcast every round, `private` (optimizer moments, say) never is."""

    message: PyTree
    private: PyTree = ()


@runtime_checkable
class Algorithm(Protocol):
    """A federated algorithm is three functions and a deployment step; the simulator vmaps `client`.

    An algorithm is a pytree: its step sizes are leaves, so that a sweep over them is one vmap and one compilation, and
    its counts are static. What is personal stays in the client state and never enters an upload.
    """

    @property
    def trajectories_per_round(self) -> int:
        """What one round costs each agent."""
        ...

    def init(self, params: Params) -> tuple[ServerState, PyTree]:
        """Return the server's state and the state in which every client starts."""
        ...

    def client(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        """One agent's work in one round: return its upload and its new personal state."""
        ...

    def server(self, state: ServerState, uploads: PyTree, weights: Float[Array, " n"]) -> ServerState:
        """Combine the uploads, stacked along the agents' axis."""
        ...

    def shared(self, message: PyTree) -> Params:
        """The shared initialization that a message carries."""
        ...

    def personalize(self, message: PyTree, state: PyTree, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        """The parameters that one agent deploys, from m trajectories of its own."""
        ...


def local_steps(
    step: Callable[[PyTree, StepKeys], PyTree], carry: PyTree, agent: Objective, key: PRNGKeyArray, count: int
) -> PyTree:
    """theta^0 -> theta^tau, lines 4-7 of Algorithm 1: compiled into one loop, or in Python for a Python sampler.

    What is carried from step to step may hold more than the parameters.
    """
    keys = jax.random.split(key, (count, len(StepKeys._fields)))
    if agent.traceable:
        return jax.lax.scan(lambda carry, k: (step(carry, StepKeys(*k)), None), carry, keys)[0]
    for k in keys:
        carry = step(carry, StepKeys(*k))
    return carry


def repeated(step: Callable[[PyTree, Any], PyTree], carry: PyTree, agent: Objective, count: Whole) -> PyTree:
    """`step(carry, i)` for i = 0 .. count - 1, where the count itself may be traced: none is computed beyond it.

    Under vmap a condition computes both of its branches; this loop goes on only while some lane or agent needs it.
    """
    if agent.traceable:
        return jax.lax.fori_loop(0, count, lambda i, carry: step(carry, i), carry)
    for i in range(int(count)):
        carry = step(carry, i)
    return carry


def average(uploads: PyTree, weights: Float[Array, " n"]) -> PyTree:
    """The weighted mean over agents, line 10 of Algorithm 1."""
    share = weights / jnp.sum(weights)
    return jax.tree.map(lambda x: jnp.sum(x * share.reshape(-1, *[1] * (x.ndim - 1)), axis=0), uploads)


def chosen(first: Bool[Array, ""], one: PyTree, other: PyTree) -> PyTree:
    """One of two trees, by what is known only when a program runs."""
    return jax.tree.map(lambda x, y: jnp.where(first, x, y), one, other)


def with_trajectories(agent: Objective, name: str) -> PolicyObjective:
    """The agent, refused where it is not one that shows its trajectories."""
    if not isinstance(agent, PolicyObjective):
        raise UserError(
            f"{name} needs agents that show their trajectories (a PolicyObjective: a sampler and a policy), "
            f"which {type(agent).__name__} does not"
        )
    return agent


def check_counts(**counts: int) -> None:
    """Refuse batch sizes and numbers of local steps that are not whole numbers from 1 to a million."""
    for name, count in counts.items():
        if not isinstance(count, numbers.Integral) or isinstance(count, bool):
            raise UserError(f"{name} must be a whole number; it is {count!r}")
        if count < 1:
            raise UserError(f"{name} must be at least 1; it is {count}")
        if count > LARGEST_COUNT:
            raise UserError(f"{name} must be at most {LARGEST_COUNT}; it is {count}")


def check_positive(**values: Any) -> None:
    """Refuse settings that are not finite numbers > 0, where they are numbers and not traced; None is no setting."""
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 < value <= LARGEST_STEP:
            raise UserError(f"{name} must be a finite number > 0; it is {value}")


def check_step_sizes(alpha: Any, beta: Any) -> None:
    """Refuse alpha < 0 and beta <= 0, where they are numbers and not traced."""
    for name, value, fine, bound in (("alpha", alpha, alpha >= 0, ">= 0"), ("beta", beta, beta > 0, "> 0")):
        if isinstance(value, numbers.Real) and not (fine and value <= LARGEST_STEP):
            raise UserError(f"{name} must be a finite number {bound}; it is {value}")
