"""Sight: the numbers of an agent's own task that its policy sees beside the environment's observations.

The numbers are standardized: their mean over the training agents is 0 and their standard deviation 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from perfedrl.envs.base import DataTask
from perfedrl.envs.fleet import Fleet
from perfedrl.envs.new_agents import Settings, as_numbers
from perfedrl.envs.tabular import TabularMDP
from perfedrl.errors import UserError, nearest


@dataclass(frozen=True)
class Sight:
    """Names of parameters of a task, and the constants by which their numbers are standardized, one after the other."""

    names: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]

    def numbers(self, settings: Settings) -> Float[np.ndarray, " k"]:
        """The numbers that an agent sees: (x - mean) / scale of each number x of the named settings, in order."""
        found = np.concatenate([as_vector(name, settings) for name in self.names])
        if found.shape != np.shape(self.mean):
            raise UserError(
                f"sees: the agent has {found.size} numbers of {said(self.names)}, expected {len(self.mean)}"
            )
        return (found - np.asarray(self.mean)) / np.asarray(self.scale)


def sight_of(fleet: Fleet, names: Sequence[str]) -> Sight:
    """Standardize the numbers of the named parameters over the training agents of a fleet."""
    agents = settings_of(fleet)
    for name in names:
        check_seen(name, agents[: fleet.agents])
    rows = np.stack([np.concatenate([as_vector(name, agent) for name in names]) for agent in agents[: fleet.agents]])
    differs = np.ptp(rows, axis=0) > 0  # a number that all agents have is only shifted, to 0
    mean = np.where(differs, rows.mean(axis=0), rows[0])
    scale = np.where(differs, rows.std(axis=0), 1.0)
    return Sight(tuple(names), tuple(mean.tolist()), tuple(scale.tolist()))


def settings_of(fleet: Fleet) -> list[dict[str, Any]]:
    """The settings of every agent, training agents first: those that new agents are made of, and those of its task."""
    if isinstance(fleet.train, TabularMDP | DataTask):
        kind = "numbers of states" if isinstance(fleet.train, TabularMDP) else "labelled examples"
        raise UserError(f"sees needs observations that are vectors, and these agents have {kind}; leave it out")
    tasks = [fleet.agent(i) for i in range(fleet.agents + fleet.held_out_agents)]
    family = fleet.new_agents
    own = [{}] * len(tasks) if family is None else family.agents
    return [{**more, **task.settings} for task, more in zip(tasks, own, strict=True)]


def check_seen(name: str, agents: Sequence[Settings]) -> None:
    """Reject a parameter that the training agents do not have, that is not numbers, or in which they do not differ."""
    differing = [x for x in agents[0] if differ(x, agents)]
    if name not in agents[0]:
        raise UserError(f"sees: agents of this fleet have no parameter {name!r}{nearest(name, differing)}")
    if as_numbers([agent.get(name) for agent in agents]) is None:
        raise UserError(f"sees: {name} must be numbers, as many for every agent; it is {agents[0][name]!r}")
    if name not in differing:
        others = f"they differ in {', '.join(sorted(differing))}" if differing else "they differ in no number"
        raise UserError(f"sees: all training agents have the same {name}, which tells them nothing; {others}")


def differ(name: str, agents: Sequence[Settings]) -> bool:
    """Whether agents differ in the numbers of a setting."""
    rows = as_numbers([agent.get(name) for agent in agents])
    return rows is not None and bool((np.ptp(rows, axis=0) > 0).any())


def as_vector(name: str, settings: Settings) -> Float[np.ndarray, " k"]:
    """The numbers of a setting as a vector."""
    found = as_numbers([settings[name]]) if name in settings else None
    if found is None or not np.isfinite(found).all():
        got = f"{settings[name]!r}" if name in settings else "none"
        raise UserError(f"sees: the agent's policy sees {name}, which must be finite numbers, got {got}")
    return found[0]


def said(names: Sequence[str]) -> str:
    """Some names as text."""
    return ", ".join(names)
