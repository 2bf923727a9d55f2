"""Checks of an algorithm's settings, of its agents and of users' algorithms, before anything compiles."""

import numbers
from collections.abc import Collection
from typing import Any

import numpy as np

from perfedrl.algorithms.base import Algorithm
from perfedrl.envs.base import DataTask
from perfedrl.envs.fleet import Fleet
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, PolicyObjective

LARGEST_COUNT = 1_000_000
LARGEST_STEP = float(np.finfo(np.float32).max)
LARGEST_WEIGHT = float(np.float32(1e30))
"""Largest weight of an agent, so that sums of weights are finite in single precision."""


def with_trajectories(agent: Objective, name: str) -> PolicyObjective:
    """Return the agent; raise `UserError` if it does not expose its trajectories."""
    if not isinstance(agent, PolicyObjective):
        raise UserError(
            f"{name} needs agents that show their trajectories (a PolicyObjective: a sampler and a policy), "
            f"which {type(agent).__name__} does not"
        )
    return agent


def check_algorithm(value: Any, name: str) -> None:
    """Check that a value is an instance of `Algorithm`."""
    if not isinstance(value, Algorithm):
        raise UserError(
            f"the algorithm {name!r} must subclass perfedrl.algorithms.Algorithm; it is a {type(value).__name__}"
        )


def check_counts(**counts: int) -> None:
    """Check that batch sizes and numbers of local steps are whole numbers from 1 to a million."""
    for name, count in counts.items():
        if not isinstance(count, numbers.Integral) or isinstance(count, bool):
            raise UserError(f"{name} must be a whole number; it is {count!r}")
        if count < 1:
            raise UserError(f"{name} must be at least 1; it is {count}")
        if count > LARGEST_COUNT:
            raise UserError(f"{name} must be at most {LARGEST_COUNT}; it is {count}")


def check_positive(**values: Any) -> None:
    """Check that settings are finite numbers > 0; None and traced values pass."""
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 < value <= LARGEST_STEP:
            raise UserError(f"{name} must be a finite number > 0; it is {value}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that a setting is one of a few words."""
    if value not in choices:
        raise UserError(f"the {name} must be {' or '.join(map(repr, choices))}; it is {value!r}")


def check_step_sizes(alpha: Any, beta: Any) -> None:
    """Check that alpha >= 0 and beta > 0; traced values pass."""
    for name, value, fine, bound in (("alpha", alpha, alpha >= 0, ">= 0"), ("beta", beta, beta > 0, "> 0")):
        if isinstance(value, numbers.Real) and not (fine and value <= LARGEST_STEP):
            raise UserError(f"{name} must be a finite number {bound}; it is {value}")


def check_learned_factor(alpha: Any, learn_alpha: str) -> None:
    """Check that alpha is not 0 where a factor of it is learned; traced values pass."""
    if learn_alpha != "no" and isinstance(alpha, int | float) and alpha == 0:
        raise UserError("learn_alpha multiplies alpha, which is 0 and would stay so")


def check_divergence(name: str, fleet: Fleet, policy: Any) -> None:
    """Check that agents have episodes and a policy whose divergence is known."""
    if isinstance(fleet.train, DataTask):
        raise UserError(f"{name} needs agents with episodes; these have examples")
    if policy.divergence is None:
        raise UserError(f"{name} limits the divergence of a policy, which {type(policy).__name__} does not have")


def check_agents(algorithm: Algorithm, agents: int, weights: Any = None) -> None:
    """Check that a fleet is large enough for an algorithm, and that weights are one positive number per agent."""
    least = algorithm.least_agents
    if agents < least:
        raise UserError(f"the aggregation and the attack need at least {least} training agents; there are {agents}")
    if weights is None:
        return
    if not isinstance(weights, Collection):
        raise UserError(f"weights must be a list of numbers, one per training agent; it is {weights!r}")
    if len(weights) != agents:
        raise UserError(f"weights must be one number per training agent, {agents}; there are {len(weights)}")
    if not all(_is_weight(w) for w in weights):
        raise UserError(f"weights must be positive numbers up to {LARGEST_WEIGHT:g}; they are {list(weights)}")


def _is_weight(w: Any) -> bool:
    return isinstance(w, numbers.Real) and not isinstance(w, bool) and 0 < float(w) <= LARGEST_WEIGHT


def agents_per_round(algorithm: Algorithm, agents: int, participation: Any, weights: Any = None) -> int:
    """Number of agents that a share of the fleet is, at least 1; raise `UserError` if it is too small."""
    number = isinstance(participation, numbers.Real) and not isinstance(participation, bool)
    if not number or not 0 < participation <= 1:
        raise UserError(f"participation is a share of the agents, above 0 and at most 1; it is {participation!r}")
    participants, least = max(1, round(participation * agents)), algorithm.least_agents
    if participants < least:
        raise UserError(
            f"a round needs at least {least} agents for its aggregation; participation = {participation:g} of {agents} "
            f"lets {participants} take part"
        )
    algorithm.check_participation(agents, participants, weights)
    return participants
