"""A fleet: the agents' tasks stacked along a leading axis, a training part and a held-out part."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from perfedrl.envs.base import DataTask, PlayedTask, Task
from perfedrl.envs.tabular import TabularMDP, widen
from perfedrl.errors import UserError


class Roster(Sequence[Any]):
    """Tasks that bring samplers of their own, side by side; what one says of itself, all say.

    To JAX it is a single leaf: nothing in it is traced.
    """

    def __init__(self, tasks: Sequence[Any]):
        self._tasks = tuple(tasks)

    def __getitem__(self, i: Any) -> Any:
        return Roster(self._tasks[i]) if isinstance(i, slice) else self._tasks[i]

    def __len__(self) -> int:
        return len(self._tasks)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tasks[0], name)

    def close(self) -> None:
        """Close what the tasks keep open."""
        for task in self._tasks:
            if hasattr(task, "close"):
                task.close()


class Fleet(eqx.Module):
    """Tasks of the agents that train together and, maybe, of agents that never take part in training."""

    train: Any
    held_out: Any = None

    @property
    def traceable(self) -> bool:
        """Whether JAX can trace the tasks; those that bring samplers of their own are played in Python."""
        return not isinstance(self.train, Roster)

    def close(self) -> None:
        """Close what agents keep open between rounds; it opens again when it is needed."""
        for part in (self.train, self.held_out):
            if isinstance(part, Roster):
                part.close()

    @property
    def agents(self) -> int:
        return _count(self.train)

    @property
    def held_out_agents(self) -> int:
        return 0 if self.held_out is None else _count(self.held_out)

    def task(self, i: int, *, held_out: bool = False) -> Any:
        """The task of one agent."""
        part, count = (self.held_out, self.held_out_agents) if held_out else (self.train, self.agents)
        if not 0 <= i < count:
            kind = "held-out" if held_out else "training"
            raise UserError(f"there is no {kind} agent {i}: the fleet has {count}, numbered from 0")
        return jax.tree.map(lambda x: x[i], part)


def fleet(
    train: Sequence[Task | PlayedTask | DataTask], held_out: Sequence[Task | PlayedTask | DataTask] = ()
) -> Fleet:
    """Make a fleet of single tasks. All must have the same shapes, horizon and discount."""
    if not train:
        raise UserError("a fleet needs at least one training agent")
    if any(brings_sampler(task) for task in (*train, *held_out)):
        return roster(train, held_out)
    tasks: list[Any] = [*train, *held_out]
    stacked, n = stack(tasks), len(train)
    return Fleet(
        train=jax.tree.map(lambda x: x[:n], stacked),
        held_out=jax.tree.map(lambda x: x[n:], stacked) if held_out else None,
    )


def roster(train: Sequence[Any], held_out: Sequence[Any]) -> Fleet:
    """A fleet of tasks that bring samplers of their own."""
    first, tasks = train[0], (*train, *held_out)
    for i, task in enumerate(tasks):
        if not brings_sampler(task):
            raise UserError(f"agents of one fleet must be of one kind: agent {i} brings no sampler of its own")
        for what in ("horizon", "discount", "observation_size", "actions", "action_size"):
            one, other = getattr(first, what, None), getattr(task, what, None)
            if one != other:
                raise UserError(f"agents of one fleet must be alike: agent 0 has {what} {one}, agent {i} has {other}")
    return Fleet(Roster(train), Roster(held_out) if held_out else None)


def brings_sampler(task: Any) -> bool:
    """Whether an agent is sampled by what it brings, `task.sampler(policy)`, and not by tracing its steps."""
    return hasattr(task, "sampler")


def brings_examples(task: Any) -> bool:
    """Whether an agent has labelled examples to learn from (a `DataTask`), and no episodes."""
    return hasattr(task, "examples")


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
    for i, task in enumerate(tasks):
        if type(task) is not type(tasks[0]):
            raise UserError(f"agents of one fleet must be of one kind: agent {i} is not like agent 0")
        for what, came in _signature(task).items():
            if came != first.get(what):
                raise UserError(
                    f"agents of one fleet must be alike: agent 0 has {what} {first.get(what)}, agent {i} has {came}"
                )


def _signature(task: Task | DataTask) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(task)
    shapes = {f"{jax.tree_util.keystr(path, simple=True)} of shape": np.shape(leaf) for path, leaf in leaves}
    return {"horizon": task.horizon, "discount": task.discount, **dict(reversed(shapes.items()))}


def _count(tasks: Any) -> int:
    return len(jax.tree.leaves(tasks)[0])
