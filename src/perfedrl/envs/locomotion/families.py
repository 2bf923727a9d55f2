"""Fleets of the meta-RL literature's locomotion tasks: agents differ in their tasks or in their bodies.

An episode has 100 decisions. All agents are determined by `seed`. Episodes are played on all cores, or by `workers`
processes. docs/locomotion.md has the formulas, their sources and the departures from them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from perfedrl.envs.fleet import Fleet, fleet
from perfedrl.envs.gym import GymTask, gymnasium_fleet
from perfedrl.envs.gym.episodes import WorkerCount
from perfedrl.envs.gym.fleet import with_settings
from perfedrl.envs.new_agents import NewAgents, Settings, as_numbers, count_of
from perfedrl.errors import UserError, nearest
from perfedrl.gym_environment import mujoco_worlds as worlds
from perfedrl.types import Array, Trajectory

HERE = f"{worlds.__name__}:"
HORIZON = 99
BASES = {"body_mass": 1.5, "body_inertia": 1.5, "dof_damping": 1.3, "geom_friction": 1.5}
"""Each number of a body's model is multiplied by base ** u, with u uniform on [-limit, limit]."""

FARTHEST = 3.0
ANT_SPEED = 13
"""Index of the first velocity in an ant's observation, after the positions."""


def half_cheetah_dir(
    agents: int = 2,
    held_out: int = 0,
    seed: int = 0,
    horizon: int = HORIZON,
    discount: float = 0.99,
    frame_skip: int = 5,
    velocity_scale: float = 1.0,
    parallel: int = 16,
    processes: bool = False,
    workers: WorkerCount = "auto",
) -> Fleet:
    """Cheetahs that run forward or backward (Finn et al., 2017); there are only these two tasks.

    A decision lasts `frame_skip` hundredths of a second. Observed velocities are multiplied by `velocity_scale`:
    joints turn by about 10 rad/s, and with 0.1 velocities are as large as angles.
    """
    options, vary = cheetah(frame_skip, velocity_scale), {"direction": {"list": [1.0, -1.0]}}
    more = playing(horizon, discount, parallel, processes, workers)
    made = make_fleet(worlds.half_cheetah_direction, vary, agents, held_out, seed, options=options, **more)
    return with_outcomes(made, lambda _: partial(running, velocity_scale))


def half_cheetah_vel(
    agents: int = 10,
    held_out: int = 5,
    seed: int = 0,
    fastest: float = 2.0,
    horizon: int = HORIZON,
    discount: float = 0.99,
    frame_skip: int = 5,
    velocity_scale: float = 1.0,
    parallel: int = 16,
    processes: bool = False,
    workers: WorkerCount = "auto",
) -> Fleet:
    """Cheetahs that run at a velocity of their own, uniform on [0, fastest]: 2 in MAML, 3 in ProMP and PEARL."""
    positive(fastest=fastest)
    more = playing(horizon, discount, parallel, processes, workers)
    options, vary = cheetah(frame_skip, velocity_scale), {"velocity": {"uniform": [0.0, fastest]}}
    made = make_fleet(worlds.half_cheetah_velocity, vary, agents, held_out, seed, options=options, **more)
    return with_outcomes(made, lambda _: partial(running, velocity_scale))


def ant_dir(
    agents: int = 10,
    held_out: int = 5,
    seed: int = 0,
    directions: Literal["circle", "line"] = "circle",
    horizon: int = HORIZON,
    discount: float = 0.99,
    parallel: int = 16,
    processes: bool = False,
    workers: WorkerCount = "auto",
) -> Fleet:
    """Ants that walk along a direction of their own: any (ProMP, PEARL), or forward and backward (MAML)."""
    line = {"list": [0.0, float(np.pi)]}
    vary = {"angle": line if directions == "line" else {"uniform": [0.0, float(2 * np.pi)]}}
    more = playing(horizon, discount, parallel, processes, workers)
    made = make_fleet(worlds.ant_direction, vary, agents, held_out, seed, **more)
    return with_outcomes(made, lambda values: partial(walking, values["angle"]))


def ant_goal(
    agents: int = 10,
    held_out: int = 5,
    seed: int = 0,
    horizon: int = HORIZON,
    discount: float = 0.99,
    parallel: int = 16,
    processes: bool = False,
    workers: WorkerCount = "auto",
) -> Fleet:
    """Ants that walk to a goal of their own, uniform in the disk of radius 3 (ProMP, PEARL)."""
    rng = np.random.default_rng([seed, 2])
    goals = [in_disk(*rng.random(2)) for _ in range(max(agents, 0) + max(held_out, 0))]
    more = playing(horizon, discount, parallel, processes, workers)
    made = make_fleet(worlds.ant_to_goal, {"goal": one_by_one(goals, agents)}, agents, held_out, seed, **more)
    return with_outcomes(made, lambda values: partial(arriving, values["goal"]))


def hopper_mass(
    agents: int = 10,
    held_out: int = 5,
    seed: int = 0,
    vary: Sequence[str] = ("body_mass",),
    limit: float = 3.0,
    horizon: int = HORIZON,
    discount: float = 0.99,
    parallel: int = 16,
    processes: bool = False,
    workers: WorkerCount = "auto",
) -> Fleet:
    """Hoppers with bodies of their own: every part's mass times 1.5^u, u uniform on [-limit, limit] (ProMP, PEARL).

    `vary` may name more of the body: body_inertia, dof_damping (times 1.3^u), geom_friction.
    """
    more = playing(horizon, discount, parallel, processes, workers)
    return bodies(worlds.hopper, agents, held_out, seed, vary, limit, **more)


def walker_mass(
    agents: int = 10,
    held_out: int = 5,
    seed: int = 0,
    vary: Sequence[str] = ("body_mass",),
    limit: float = 3.0,
    horizon: int = HORIZON,
    discount: float = 0.99,
    parallel: int = 16,
    processes: bool = False,
    workers: WorkerCount = "auto",
) -> Fleet:
    """Walkers with bodies of their own, in the same way as `hopper_mass`."""
    more = playing(horizon, discount, parallel, processes, workers)
    return bodies(worlds.walker, agents, held_out, seed, vary, limit, **more)


def playing(horizon: int, discount: float, parallel: int, processes: bool, workers: WorkerCount) -> dict[str, Any]:
    """Collect the settings of episodes and of how they are played."""
    return {
        "horizon": horizon,
        "discount": discount,
        "parallel": parallel,
        "processes": processes,
        "workers": workers,
    }


def cheetah(frame_skip: int, velocity_scale: float) -> dict[str, Any]:
    """Check the options that all cheetahs share."""
    positive(frame_skip=frame_skip, velocity_scale=velocity_scale)
    return {"frame_skip": frame_skip, "velocity_scale": velocity_scale}


def positive(**settings: float) -> None:
    """Check that settings are finite and positive."""
    for name, value in settings.items():
        if not 0 < value < float("inf"):
            raise UserError(f"{name} must be a finite number > 0; it is {value}")


def make_fleet(world: Callable[..., Any], vary: Any, agents: int, held_out: int, seed: int, **more: Any) -> Fleet:
    """Make a fleet in one kind of environment, after checking that MuJoCo is installed."""
    worlds.mujoco()
    return gymnasium_fleet(HERE + world.__name__, vary, agents, held_out, seed, **more)


def bodies(
    world: Callable[..., Any], agents: int, held_out: int, seed: int, vary: Sequence[str], limit: float, **more: Any
) -> Fleet:
    """Make a fleet of agents whose body models are multiplied, each part with random numbers of its own."""
    if not vary or isinstance(vary, str):
        raise UserError(f"vary must be a list of the parts that differ between bodies, from {', '.join(worlds.BODY)}")
    for name in vary:
        if name not in worlds.BODY:
            raise UserError(f"vary: a body has no {name!r}{nearest(name, worlds.BODY)}")
    positive(limit=limit)
    env, drawn = world(), {}
    for name in vary:
        rng = np.random.default_rng([seed, worlds.BODY.index(name)])
        size = getattr(env.model, name).size
        powers = rng.uniform(-limit, limit, (max(agents, 0) + max(held_out, 0), size))
        drawn[name] = one_by_one([worlds.Factors((BASES[name] ** u).tolist()) for u in powers], agents)
    env.close()
    return with_outcomes(make_fleet(world, drawn, agents, held_out, seed, **more), lambda _: upright)


def one_by_one(values: list[Any], agents: int) -> dict[str, list[Any]]:
    """State the values of all agents, for `vary`."""
    return {"train": values[:agents], "held_out": values[agents:]}


def in_disk(area: float, turn: float) -> tuple[float, float]:
    """Draw a point of the disk of goals, uniform by area, with two uniforms."""
    r, angle = FARTHEST * np.sqrt(area), 2 * np.pi * turn
    return float(r * np.cos(angle)), float(r * np.sin(angle))


def with_outcomes(made: Fleet, of: Callable[[Mapping[str, Any]], Callable[[Trajectory], dict[str, Array]]]) -> Fleet:
    """Add outcomes to a fleet, from a function of each agent's own parameters."""

    def own(task: GymTask) -> GymTask:
        return replace(task, name=task.name.replace(HERE, ""), more_outcomes=of(task.recipe.values))

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


def running(velocity_scale: float, episode: Trajectory) -> dict[str, Array]:
    """The mean forward velocity over the decisions."""
    return {"velocity": over_time(episode, episode.obs[:, worlds.CHEETAH_POSITIONS]) / velocity_scale}


def walking(angle: float, episode: Trajectory) -> dict[str, Array]:
    """The mean velocity in the agent's direction, and whether it never fell."""
    x, y = episode.obs[:, ANT_SPEED], episode.obs[:, ANT_SPEED + 1]
    return {"velocity": over_time(episode, x * np.cos(angle) + y * np.sin(angle)), "upright": never_fell(episode)}


def arriving(goal: tuple[float, float], episode: Trajectory) -> dict[str, Array]:
    """The distance from the goal at the last decision."""
    return {"distance": jnp.linalg.norm(episode.obs[-1, :2] - jnp.asarray(goal))}


def upright(episode: Trajectory) -> dict[str, Array]:
    """The share of the episode before a fall, and whether it never fell."""
    return {"stood": jnp.mean(episode.mask), "upright": never_fell(episode)}


def over_time(episode: Trajectory, x: Array) -> Array:
    """Return the mean over the decisions of an episode."""
    return jnp.sum(x * episode.mask) / jnp.sum(episode.mask)


def never_fell(episode: Trajectory) -> Array:
    """Whether the last decision was reached; a fall at the last decision is not visible."""
    return episode.mask[-1]
