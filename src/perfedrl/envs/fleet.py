"""Fleets: the tasks of the agents that train, and of those held out, stacked along a leading axis."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from perfedrl.contracts import delegated
from perfedrl.envs.base import BaseTask, DataTask, EpisodeFailures, PlayedTask, Task, check_task
from perfedrl.envs.new_agents import NewAgents, Settings, from_leaves
from perfedrl.envs.tabular import TabularMDP, widen
from perfedrl.errors import UserError


class Roster(PlayedTask, Sequence[Any]):
    """A sequence of played tasks, which stands for all of them as a stack does for traced tasks.

    Its members are those of its first task, since the tasks of a fleet agree in them. To JAX it is a single leaf.
    """

    def __init__(self, tasks: Sequence[Any]):
        self._tasks = tuple(tasks)

    def __repr__(self) -> str:
        return f"Roster({', '.join(str(task.settings) for task in self._tasks[:3])}{', ...' if len(self) > 3 else ''})"

    def __getitem__(self, i: Any) -> Any:
        return Roster(self._tasks[i]) if isinstance(i, slice) else self._tasks[i]

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def _first(self) -> PlayedTask:
        return self._tasks[0]

    horizon = delegated("_first")
    discount = delegated("_first")

    # What policies must know of the spaces.
    actions = delegated("_first")
    action_size = delegated("_first")
    observation_size = delegated("_first")
    environment_spaces = delegated("_first")
    seen = delegated("_first")

    # What is measured and shown.
    measured_on = delegated("_first")
    outcomes = delegated("_first")
    settings = delegated("_first")
    sketch = delegated("_first")
    frames = delegated("_first")

    # Navigation in the plane.
    goal = delegated("_first")
    radius = delegated("_first")
    box = delegated("_first")

    # Constants of the theory.
    reward_bound = delegated("_first")
    observation_bound = delegated("_first")

    # Episodes, which are played in Python.
    sampler = delegated("_first")
    outline = delegated("_first")

    @property
    def failures(self) -> EpisodeFailures:
        """The failures of all tasks so far."""
        each = [task.failures for task in self._tasks]
        return EpisodeFailures(sum(x.episodes for x in each), sum(x.restarts for x in each))

    def check(self) -> list[str]:
        """Check the environments of all tasks; return their warnings, each once."""
        return list(dict.fromkeys(warning for task in self._tasks for warning in task.check()))

    def close(self) -> None:
        """Close the open environments of all tasks."""
        for task in self._tasks:
            task.close()


class Fleet(eqx.Module):
    """The tasks of the agents that train together and, optionally, of held-out agents that never train."""

    train: Any
    held_out: Any = None
    family: NewAgents | None = eqx.field(static=True, default=None)
    """How new agents are made, where that does not follow from the tasks."""
    sight: Any = eqx.field(static=True, default=None)
    """Which numbers of their own tasks the agents see: a `Sight`, or None."""

    @property
    def traceable(self) -> bool:
        """Whether JAX can trace the tasks; `PlayedTask`s are played in Python."""
        return not isinstance(self.train, Roster)

    def check(self) -> list[str]:
        """Raise a `UserError` if an environment that is played in Python breaks its contract; return warnings."""
        parts = [part for part in (self.train, self.held_out) if isinstance(part, Roster)]
        return list(dict.fromkeys(warning for part in parts for warning in part.check()))

    def close(self) -> None:
        """Close the environments that played tasks keep open between rounds; they open again on demand."""
        for part in (self.train, self.held_out):
            if isinstance(part, Roster):
                part.close()

    @property
    def agents(self) -> int:
        """Number of training agents."""
        return _count(self.train)

    @property
    def held_out_agents(self) -> int:
        """Number of held-out agents."""
        return 0 if self.held_out is None else _count(self.held_out)

    def task(self, i: int, *, held_out: bool = False) -> Any:
        """The task of one agent."""
        part, count = (self.held_out, self.held_out_agents) if held_out else (self.train, self.agents)
        if not 0 <= i < count:
            kind = "held-out" if held_out else "training"
            raise UserError(f"there is no {kind} agent {i}: the fleet has {count}, numbered from 0")
        return jax.tree.map(lambda x: x[i], part)

    def agent(self, i: int) -> Any:
        """The task of an agent by its number: training agents come first, then held-out ones."""
        return self.task(i) if i < self.agents else self.task(i - self.agents, held_out=True)

    @property
    def new_agents(self) -> NewAgents | None:
        """How agents that the fleet does not have are made; None where nothing of an agent can be set."""
        if self.family is not None:
            return self.family
        return from_leaves([part for part in (self.train, self.held_out) if part is not None])


def family_fleet(
    make: Callable[[Any, Settings], Any], train: Sequence[Settings], held_out: Sequence[Settings], **more: Any
) -> Fleet:
    """Make a fleet from the settings of its agents, by the function that also makes new agents."""

    def tasks(part: Sequence[Settings]) -> list[Any]:
        return [make(None, settings) for settings in part]

    return fleet(tasks(train), tasks(held_out), NewAgents(make, [*train, *held_out], **more))


def fleet(train: Sequence[BaseTask], held_out: Sequence[BaseTask] = (), family: NewAgents | None = None) -> Fleet:
    """Make a fleet of single tasks. All must have the same class, shapes, horizon and discount.

    `family` says how new agents are made, where that does not follow from the tasks.
    """
    if not train:
        raise UserError("a fleet needs at least one training agent")
    tasks: list[Any] = [*train, *held_out]
    for i, task in enumerate(tasks):
        check_task(task, f"agent {i}")
    if any(isinstance(task, PlayedTask) for task in tasks):
        return roster(train, held_out, family)
    stacked, n = stack(tasks), len(train)
    return Fleet(
        train=jax.tree.map(lambda x: x[:n], stacked),
        held_out=jax.tree.map(lambda x: x[n:], stacked) if held_out else None,
        family=family,
    )


def roster(train: Sequence[Any], held_out: Sequence[Any], family: NewAgents | None = None) -> Fleet:
    """Make a fleet of played tasks."""
    first, tasks = train[0], (*train, *held_out)
    for i, task in enumerate(tasks):
        if not isinstance(task, PlayedTask):
            raise UserError(
                f"agents of one fleet must be of one kind: agent {i} brings no sampler of its own, since its class "
                f"{type(task).__name__} is no PlayedTask"
            )
        for (what, one), other in zip(sizes(first).items(), sizes(task).values(), strict=True):
            if one != other:
                raise UserError(f"agents of one fleet must be alike: agent 0 has {what} {one}, agent {i} has {other}")
    return Fleet(Roster(train), Roster(held_out) if held_out else None, family)


def sizes(task: PlayedTask) -> dict[str, Any]:
    """The members in which all played tasks of a fleet agree."""
    return {
        "horizon": task.horizon,
        "discount": task.discount,
        "observation_size": task.observation_size,
        "actions": task.actions,
        "action_size": task.action_size,
    }


def stack(tasks: Sequence[Task | DataTask]) -> Any:
    """Stack single tasks along a new leading axis, agent by agent."""
    mdps = [task for task in tasks if isinstance(task, TabularMDP)]
    if len(mdps) == len(tasks):
        width = max(mdp.successor.shape[-1] for mdp in mdps)
        tasks = [widen(mdp, width) for mdp in mdps]
    _check_alike(tasks)
    return jax.tree.map(lambda *xs: np.stack(xs), *tasks)


def _check_alike(tasks: Sequence[Task | DataTask]) -> None:
    first = _signature(tasks[0])
    structure: Any = jax.tree.structure(tasks[0])
    for i, task in enumerate(tasks):
        if type(task) is not type(tasks[0]):
            raise UserError(f"agents of one fleet must be of one kind: agent {i} is not like agent 0")
        for what, came in _signature(task).items():
            if came != first.get(what):
                raise UserError(
                    f"agents of one fleet must be alike: agent 0 has {what} {first.get(what)}, agent {i} has {came}"
                )
        if jax.tree.structure(task) != structure:
            raise UserError(f"agents of one fleet must be alike: agent {i} has other static fields than agent 0")


def _signature(task: Task | DataTask) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(task)
    shapes = {f"{jax.tree_util.keystr(path, simple=True)} of shape": np.shape(leaf) for path, leaf in leaves}
    return {"horizon": task.horizon, "discount": task.discount, **dict(reversed(shapes.items()))}


def _count(tasks: Any) -> int:
    return len(jax.tree.leaves(tasks)[0])
