"""Engines of locomotion fleets: Gymnasium's MuJoCo, played in Python, or physics that JAX compiles.

The agents of a fleet are the same with every engine. An engine in JAX is a function that makes an agent's `Physics`
of the name of a body and factors of its model; add it to `ENGINES` and its name to `Engine`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, Literal, NamedTuple

import numpy as np

from perfedrl.envs.base import check_episode
from perfedrl.envs.fleet import Fleet, family_fleet, fleet
from perfedrl.envs.gym import GymTask, gymnasium_fleet
from perfedrl.envs.gym.episodes import WorkerCount
from perfedrl.envs.gym.fleet import with_settings
from perfedrl.envs.locomotion.mjx_physics import mjx, mjx_physics
from perfedrl.envs.locomotion.planar import planar_physics
from perfedrl.envs.locomotion.tasks import LocomotionTask, Physics
from perfedrl.envs.new_agents import NewAgents, Settings, as_numbers, count_of
from perfedrl.envs.variation import Split, Vary, vary_agents
from perfedrl.errors import UserError, nearest
from perfedrl.gym_environment import mujoco_worlds as worlds
from perfedrl.types import Array, Trajectory

Engine = Literal["gymnasium", "mjx", "planar"]
Outcomes = Callable[[Trajectory], dict[str, Array]]

HERE = f"{worlds.__name__}:"
FRAME_SKIP = {"ant": 5, "hopper": 4, "walker": 4}
"""Gymnasium's steps of the physics in a decision, where a family has no setting for it."""

PARALLEL = 16
"""The default of `parallel`, which only Gymnasium's engine uses."""


class EngineInJax(NamedTuple):
    """An engine whose physics JAX can trace."""

    physics: Callable[[str, Mapping[str, Any]], Physics]
    """Makes the physics of a body with parts of its model multiplied."""
    check: Callable[[], Any]
    """Raises a `UserError` where a package is missing."""


ENGINES = {"mjx": EngineInJax(mjx_physics, mjx), "planar": EngineInJax(planar_physics, worlds.mujoco)}


class Family(NamedTuple):
    """What a family is in every engine."""

    body: str
    world: Callable[..., Any]
    """Makes an agent's environment in Gymnasium."""
    kind: Callable[..., LocomotionTask]
    """Makes an agent's task in JAX."""
    outcomes: Callable[[Settings], Outcomes]
    """An agent's settings -> its outcomes in Gymnasium."""


class Episodes(NamedTuple):
    """How episodes are computed, and their length."""

    engine: Engine = "gymnasium"
    horizon: int = 99
    discount: float = 0.99
    parallel: int = PARALLEL
    processes: bool = False
    workers: WorkerCount = "auto"

    def check(self) -> None:
        """Reject an unknown engine, one whose packages are missing, and settings that it does not have."""
        if self.engine == "gymnasium":
            worlds.mujoco()
            return
        if self.engine not in ENGINES:
            raise UserError(f"engine = {self.engine!r} is unknown{nearest(self.engine, ['gymnasium', *ENGINES])}")
        played = {"processes": self.processes, "parallel": self.parallel != PARALLEL, "workers": self.workers != "auto"}
        if name := next((name for name, given in played.items() if given), None):
            raise UserError(f"{name} is for engine = 'gymnasium', which plays in Python; remove it for {self.engine!r}")
        ENGINES[self.engine].check()
        check_episode(self.horizon, self.discount)


def make_fleet(
    family: Family,
    episodes: Episodes,
    vary: Vary,
    agents: int,
    held_out: int,
    seed: int,
    options: Mapping[str, Any] | None = None,
) -> Fleet:
    """Make a fleet of one family; `options` are the settings that all agents share."""
    episodes.check()
    if episodes.engine in ENGINES:
        split = vary_agents(vary, agents, held_out, seed)
        return traced_fleet(family, episodes, split, {"frame_skip": FRAME_SKIP.get(family.body), **(options or {})})
    played = {name: value for name, value in episodes._asdict().items() if name != "engine"}
    name = HERE + family.world.__name__
    return with_outcomes(gymnasium_fleet(name, vary, agents, held_out, seed, options=options, **played), family)


def traced_fleet(family: Family, episodes: Episodes, split: Split, shared: Mapping[str, Any]) -> Fleet:
    """Make a fleet whose physics JAX can trace, from the settings of its agents."""

    def make(_: Any, settings: Settings) -> LocomotionTask:
        values = {name: like(split.train[0][name], name, x) for name, x in settings.items()}
        factors = {name: x for name, x in values.items() if isinstance(x, worlds.Factors)}
        shapes = {name: np.shape(x) for name, x in split.train[0].items()}
        own = {name: np.asarray(x, float).reshape(shapes[name]) for name, x in values.items() if name not in factors}
        physics = ENGINES[episodes.engine].physics(family.body, factors)
        return family.kind(physics, horizon=episodes.horizon, discount=episodes.discount, **shared, **own)

    return family_fleet(make, split.train, split.held_out)


def with_outcomes(made: Fleet, family: Family) -> Fleet:
    """Add a family's outcomes to a fleet in Gymnasium."""

    def own(task: GymTask) -> GymTask:
        settings = {**task.recipe.options, **task.recipe.values}
        return replace(task, name=task.name.replace(HERE, ""), more_outcomes=family.outcomes(settings))

    def make(task: GymTask, settings: Settings) -> GymTask:
        values = {name: like(task.recipe.values[name], name, x) for name, x in settings.items()}
        return own(with_settings(task, {**task.recipe.options, **values}))

    train, held_out = ([own(task) for task in part] for part in (made.train, made.held_out or ()))
    return fleet(train, held_out, NewAgents(make, [task.recipe.values for task in (*train, *held_out)]))


def like(old: Any, name: str, value: Any) -> Any:
    """Check that a value has as many numbers as another; for factors of a body, one number stands for all."""
    if isinstance(old, worlds.Factors) and np.ndim(value) == 0:
        value = [value] * len(old)
    found = as_numbers([old, value])
    if found is None:
        raise UserError(f"{name} must be {count_of(np.size(old))}, got {value!r}")
    return worlds.Factors(found[1].tolist()) if isinstance(old, worlds.Factors) else value


def with_episode_settings(family: Callable[..., Fleet]) -> Callable[..., Fleet]:
    """Replace a factory's first parameter, its `Episodes`, by the fields of that class, as settings with defaults."""
    _, *own = inspect.signature(family, eval_str=True).parameters.values()
    shared = inspect.signature(Episodes, eval_str=True).parameters.values()

    @wraps(family)
    def make(*arguments: Any, **settings: Any) -> Fleet:
        given = {name: settings.pop(name) for name in Episodes._fields if name in settings}
        return family(Episodes(**given), *arguments, **settings)

    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shared]
    vars(make)["__signature__"] = inspect.Signature([*own, *keyword_only], return_annotation=Fleet)
    return make
