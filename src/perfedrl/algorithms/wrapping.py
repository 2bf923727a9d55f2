"""Algorithms around algorithms: what a wrapper does not change is the inner one's."""

import numbers
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray, PyTree

from perfedrl.algorithms.base import Algorithm, ServerState
from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective
from perfedrl.types import Array, Params


class Wrapping(eqx.Module):
    """An algorithm that changes some of another's functions and hands on the rest, with what else that one offers.

    The inner algorithm is a child of the pytree, so its step sizes stay leaves.
    """

    inner: Any

    agents_work = False
    """Whether an agent's own process runs what the wrapper adds to `client`; else it is the server's, or simulated."""

    def __getattr__(self, name: str) -> Any:
        """The inner algorithm's own: adaptation_steps, diagnostics and the like, where it has them."""
        if name == "inner" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.inner, name)

    @property
    def trajectories_per_round(self) -> int:
        return self.inner.trajectories_per_round

    @property
    def least_agents(self) -> int:
        """How many agents a round needs."""
        return least_agents(self.inner)

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


def unwrapped(algorithm: Algorithm) -> Algorithm:
    """The algorithm inside all wrappers."""
    while isinstance(algorithm, Wrapping):
        algorithm = algorithm.inner
    return algorithm


def of_agents(algorithm: Algorithm) -> Algorithm:
    """What an agent's own process runs: the algorithm with those wrappers alone whose work is the agent's."""
    while isinstance(algorithm, Wrapping) and not algorithm.agents_work:
        algorithm = algorithm.inner
    return algorithm


def as_upload(algorithm: Algorithm, message: PyTree) -> PyTree:
    """A message with what an upload holds of it: all, unless the algorithm keeps some of it with the agents."""
    less = getattr(algorithm, "as_upload", None)
    return message if less is None else less(message)


def with_own(algorithm: Algorithm, message: PyTree, state: PyTree) -> PyTree:
    """A message as an agent sees it: with its own values of what an algorithm keeps with the agents."""
    more = getattr(algorithm, "with_own", None)
    return message if more is None else more(message, state)


def least_agents(algorithm: Algorithm) -> int:
    """How many agents a round of an algorithm needs; 1 where it says nothing of that."""
    return getattr(algorithm, "least_agents", 1)


def trajectories_after(algorithm: Algorithm, rounds: int) -> int:
    """What so many rounds cost each agent, where rounds differ in cost by the algorithm's own account."""
    own = getattr(algorithm, "trajectories_after", None)
    return rounds * algorithm.trajectories_per_round if own is None else own(rounds)


def check_serves(algorithm: Algorithm, fleet: Fleet, policy: Any) -> None:
    """Refuse agents or a policy that an algorithm cannot serve, where it says which it can: `check(fleet, policy)`."""
    own = getattr(algorithm, "check", None)
    if own is not None:
        own(fleet, policy)


def check_learned(algorithm: Algorithm, fleet: Fleet, policy: Any, what: str) -> None:
    """Refuse messages that hold more than what is learned, beside what the algorithm refuses itself.

    What is learned is the parameters, and a step size where that is: what has their structure below or beside it.
    """
    check_serves(algorithm, fleet, policy)
    inside = unwrapped(algorithm)
    start = jax.eval_shape(policy.init, jax.random.key(0))
    sent, own = (jax.eval_shape(lambda x, a=a: a.init(x)[0].message, start) for a in (algorithm, inside))
    learned = own if getattr(inside, "learn_alpha", "no") != "no" else start
    if len({jax.tree.structure(sent), jax.tree.structure(learned)}) > 1:
        name = type(inside).__name__
        raise UserError(f"{what} parameters, and a message of {name} holds more than these: leave it out")


def check_federated(algorithm: Algorithm, what: str) -> None:
    """Refuse to wrap an algorithm that sends nothing."""
    if not getattr(algorithm, "federated", True):
        raise UserError(f"{type(algorithm).__name__} trains every agent alone and sends nothing: there is no {what}")


def check_agents(algorithm: Algorithm, agents: int, weights: Any = None) -> None:
    """Refuse a fleet that is too small for an algorithm, and weights that are not one positive number per agent."""
    least = least_agents(algorithm)
    if agents < least:
        raise UserError(f"the aggregation and the attack need at least {least} training agents; there are {agents}")
    if weights is None:
        return
    if not hasattr(weights, "__len__"):
        raise UserError(f"weights must be a list of numbers, one per training agent; it is {weights!r}")
    if len(weights) != agents:
        raise UserError(f"weights must be one number per training agent, {agents}; there are {len(weights)}")
    number = lambda w: isinstance(w, numbers.Real) and not isinstance(w, bool)  # noqa: E731
    if not all(number(w) and 0 < w <= LARGEST_WEIGHT for w in weights):
        raise UserError(f"weights must be positive numbers up to {LARGEST_WEIGHT:g}; they are {list(weights)}")


def check_participation(algorithm: Algorithm, agents: int, participation: Any, weights: Any = None) -> int:
    """How many agents a share of the fleet is, at least 1; refused where it is none, or too few for an algorithm."""
    number = isinstance(participation, numbers.Real) and not isinstance(participation, bool)
    if not number or not 0 < participation <= 1:
        raise UserError(f"participation is a share of the agents, above 0 and at most 1; it is {participation!r}")
    present, least = max(1, round(participation * agents)), least_agents(algorithm)
    if present < least:
        raise UserError(
            f"a round needs at least {least} agents for its aggregation; participation = {participation:g} of {agents} "
            f"lets {present} take part"
        )
    own = getattr(algorithm, "check_participation", None)
    if own is not None:
        own(agents, present, weights)
    return present


LARGEST_WEIGHT = float(np.float32(1e30))
"""So that sums of weights are finite in single precision."""
