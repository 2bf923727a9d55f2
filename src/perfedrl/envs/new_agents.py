"""New agents of a family: their settings, the values of the training agents, and how a task is made."""

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perfedrl.envs.base import Task
from perfedrl.envs.tabular import TabularMDP
from perfedrl.errors import UserError, nearest

Settings = Mapping[str, Any]
"""The settings of one agent, by name."""

Make = Callable[[Any, Settings], Any]
"""An agent's task of the fleet and complete settings -> the task of a new agent."""

MOST_NUMBERS = 9
"""A setting of more numbers is not set by hand, and its values are not shown in tables."""

FAR = 0.5
"""A setting is far from training when its distance from the nearest training agent is more than this share of the
diagonal of the training agents' range."""


@dataclass(frozen=True, eq=False)
class NewAgents:
    """Makes agents that a fleet does not have.

    `agents` are the settings of the fleet's agents, training agents first. `extra` are settings that only new agents
    have, with their defaults. With `open`, other names are settings too, and `make` rejects unknown ones. `hints` say
    what a setting is, where its name and its values do not.
    """

    make: Make
    agents: Sequence[Settings]
    extra: Settings = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    open: bool = False
    several_kinds: bool = False
    """Whether agents differ in more than their settings, so that a new agent must be like a certain one."""

    # All compare equal, so that fleets of equal tasks have equal structures in JAX.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, NewAgents)

    def __hash__(self) -> int:
        return hash(NewAgents)

    def task(self, fleet: Any, given: Settings, like: int | None) -> Any:
        """Make the task of a new agent; settings that are not given are those of agent `like`, or of all agents."""
        known = {**self.agents[0], **self.extra}
        for name, value in given.items():
            if name not in known and not self.open:
                raise UserError(f"agents of this fleet have no setting {name!r}{nearest(name, known)}")
            check_value(name, value, known.get(name))
        if self.several_kinds and like is None:
            raise UserError(
                "the fleet's agents are of several kinds: say which agent the new one is like, by its number"
            )
        missing = [name for name in self.varying if name not in given]
        if missing and like is None:
            # A name that no agent has may be another parameter of the environment, or a typing error.
            other = [name for name in given if name not in known and "did you mean" in nearest(name, known)]
            unlike = f"; the fleet's agents have no setting {other[0]!r}{nearest(other[0], known)}" if other else ""
            raise UserError(
                f"say also {' and '.join(missing)} of the new agent ({'; '.join(map(self.about, missing))}), or say "
                f"which agent's to take, by its number{unlike}"
            )
        base = fleet.agent(like or 0)
        typed = {name: as_trained(value, [agent.get(name) for agent in self.agents]) for name, value in given.items()}
        return self.make(base, {**self.extra, **self.agents[like or 0], **typed})

    @property
    def varying(self) -> list[str]:
        """The settings in which the fleet's agents differ."""
        first = self.agents[0]
        return [x for x in first if any(not np.array_equal(first[x], agent[x]) for agent in self.agents)]

    def describe(self) -> str:
        """The settings of a new agent and the values of the fleet's agents, those that differ first."""
        names = sorted([*self.agents[0], *self.extra], key=lambda name: name not in self.varying)
        return "; ".join([*map(self.about, names), *(["any other parameter of the environment"] if self.open else [])])

    def about(self, name: str) -> str:
        """One setting: what it is, and the values of the fleet's agents."""
        hint = f" ({self.hints[name]})" if name in self.hints else ""
        if name in self.extra:
            return f"{name}{hint}"
        low, high = value_range([agent[name] for agent in self.agents])
        return f"{name}{hint}: {low}" + (f" to {high}" if high != low else "")

    def warnings(self, given: Settings, training: int) -> list[str]:
        """Say in numbers which settings of a new agent are far from those of the training agents."""
        trained = {name: [agent[name] for agent in self.agents[:training]] for name in self.agents[0]}
        said = [far_from(name, value, trained[name]) for name, value in given.items() if name in trained]
        alone = [name for name in given if name not in trained and name not in self.extra]
        return [line for line in said if line] + [f"{name} is set for this agent alone" for name in alone]


def check_value(name: str, value: Any, like: Any) -> None:
    """Reject a value that is not finite, or that is not as many numbers as another agent has."""
    own, other = as_numbers([value]), as_numbers([like])
    if other is not None and (own is None or own.shape != other.shape):
        raise UserError(f"{name} must be {count_of(other.size)}, got {value!r}")
    if own is not None and not np.isfinite(own).all():
        raise UserError(f"{name} must be finite; it is {format_value(value)}")


def from_leaves(stacks: Sequence[Any]) -> NewAgents | None:
    """How new agents are made of stacks of tasks in JAX, whose settings are their leaves; None for other tasks."""
    if not isinstance(stacks[0], Task) or isinstance(stacks[0], TabularMDP) or stacks[0].seen is not None:
        return None
    agents = [settings for stack in stacks for settings in leaf_settings(stack)]
    return NewAgents(with_leaves, agents) if agents[0] else None


def drawn_agents(make: Make, agents: Sequence[Settings]) -> NewAgents:
    """How new agents are made in a family whose agents are drawn at random: `agent_seed` draws another one."""
    return NewAgents(make, agents, {"agent_seed": 0}, {"agent_seed": "a number >= 0 that draws the agent"})


def new_agent_seed(settings: Settings) -> int:
    """The number that draws a new agent."""
    seed = settings["agent_seed"]
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or seed < 0:
        raise UserError(f"agent_seed must be a whole number >= 0; it is {seed!r}")
    return int(seed)


def leaf_settings(stack: Task) -> list[dict[str, Any]]:
    """The fields of each of some stacked tasks that are arrays of a few numbers."""
    static = {x.name for x in dataclasses.fields(stack) if x.metadata.get("static", False)}
    leaves = {name: x for name, x in stack.settings.items() if name not in static and "." not in name}
    count = len(next(iter(leaves.values()), ()))
    few = {
        name: x
        for name, x in leaves.items()
        if np.size(x) <= MOST_NUMBERS * count and np.issubdtype(x.dtype, np.number)
    }
    return [{name: x[i] for name, x in few.items()} for i in range(count)]


def with_leaves(task: Task, settings: Settings) -> Task:
    """Return a task with other values of its fields, which it checks itself."""
    old = {name: np.asarray(task.settings[name]) for name in settings}
    changed = {name: np.asarray(value, old[name].dtype).reshape(old[name].shape) for name, value in settings.items()}
    return dataclasses.replace(task, **changed)


def count_of(size: int) -> str:
    """A number of numbers, in words."""
    return "a number" if size == 1 else f"{size} numbers"


def as_trained(value: Any, trained: Sequence[Any]) -> Any:
    """Return a whole number as a float where the training agents have floats."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return float(value) if whole and all(isinstance(x, float | np.floating) for x in trained) else value


def as_numbers(values: Sequence[Any]) -> np.ndarray | None:
    """Return values of one size as rows of numbers; None where they are not numbers."""
    try:
        rows = np.stack([np.ravel(np.asarray(x, float)) for x in values])
    except (TypeError, ValueError):
        return None
    return rows if not any(x is None or isinstance(x, bool) for x in values) else None


def value_range(values: Sequence[Any]) -> tuple[str, str]:
    """The smallest and the largest of some values, component by component, as text; of other things the first two."""
    rows = as_numbers(values)
    if rows is not None:
        return format_value(rows.min(axis=0)), format_value(rows.max(axis=0))
    texts = sorted({str(x) for x in values})
    return texts[0], texts[-1]


def far_from(name: str, value: Any, trained: Sequence[Any]) -> str:
    """Say that a value is far from those of the training agents, in numbers; an empty text where it is not."""
    rows, own = as_numbers(trained), as_numbers([value])
    low, high = value_range(trained)
    if rows is None or own is None or own.shape[1] != rows.shape[1]:
        known = str(value) in {str(x) for x in trained}
        return "" if known else f"no training agent has {name} {value}; they have {low} to {high}"
    distance = float(np.linalg.norm(rows - own, axis=1).min())
    diagonal = float(np.linalg.norm(rows.max(axis=0) - rows.min(axis=0)))
    if distance <= FAR * diagonal:
        return ""
    shown = format_value(own[0])
    if diagonal == 0:
        return f"{name} {shown}: all training agents have {low}, so the shared policy was never trained for another"
    return (
        f"{name} {shown} is far outside what was trained on: training agents have {low} to {high}, the nearest is "
        f"{distance:.3g} away, and their range measures {diagonal:.3g}; the step may not help"
    )


def format_value(value: Any, digits: int = 4) -> str:
    """A setting as text: numbers with some digits, separated by commas."""
    if isinstance(value, str | bool):
        return str(value)
    found = np.ravel(value)
    if found.size > MOST_NUMBERS:
        return f"{found.size} numbers"
    return ",".join(f"{x:.{digits}g}" for x in found) if np.issubdtype(found.dtype, np.number) else str(value)
