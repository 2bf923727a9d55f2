"""Fleets of the meta-RL literature's locomotion tasks: agents differ in their tasks or in their bodies.

An episode has 100 decisions. All agents are determined by `seed`. Every family also has the fields of `Episodes` as
settings. With `engine` "gymnasium" episodes are played in Python on all cores, or by `workers` processes; with "planar"
and "mjx" they are compiled. docs/locomotion.md has the formulas, their sources and the departures from them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from perfedrl.envs.fleet import Fleet
from perfedrl.envs.locomotion import tasks
from perfedrl.envs.locomotion.engines import Episodes, Family, Outcomes, make_fleet, with_episode_settings
from perfedrl.envs.locomotion.outcomes import arriving, running, upright, walking
from perfedrl.envs.new_agents import Settings
from perfedrl.errors import UserError, nearest
from perfedrl.gym_environment import mujoco_worlds as worlds

BASES = {"body_mass": 1.5, "body_inertia": 1.5, "dof_damping": 1.3, "geom_friction": 1.5}
"""Each number of a body's model is multiplied by base ** u, with u uniform on [-limit, limit]."""

FARTHEST = 3.0


@with_episode_settings
def half_cheetah_dir(
    episodes: Episodes,
    agents: int = 2,
    held_out: int = 0,
    seed: int = 0,
    frame_skip: int = 5,
    velocity_scale: float = 1.0,
) -> Fleet:
    """Cheetahs that run forward or backward (Finn et al., 2017); there are only these two tasks.

    A decision lasts `frame_skip` hundredths of a second. Observed velocities are multiplied by `velocity_scale`:
    joints turn by about 10 rad/s, and with 0.1 velocities are as large as angles.
    """
    options, vary = cheetah(frame_skip, velocity_scale), {"direction": {"list": [1.0, -1.0]}}
    family = Family("half-cheetah", worlds.half_cheetah_direction, tasks.CheetahDirection, cheetah_outcomes)
    return make_fleet(family, episodes, vary, agents, held_out, seed, options)


@with_episode_settings
def half_cheetah_vel(
    episodes: Episodes,
    agents: int = 10,
    held_out: int = 5,
    seed: int = 0,
    fastest: float = 2.0,
    frame_skip: int = 5,
    velocity_scale: float = 1.0,
) -> Fleet:
    """Cheetahs that run at a velocity of their own, uniform on [0, fastest]: 2 in MAML, 3 in ProMP and PEARL."""
    positive(fastest=fastest)
    options, vary = cheetah(frame_skip, velocity_scale), {"velocity": {"uniform": [0.0, fastest]}}
    family = Family("half-cheetah", worlds.half_cheetah_velocity, tasks.CheetahVelocity, cheetah_outcomes)
    return make_fleet(family, episodes, vary, agents, held_out, seed, options)


@with_episode_settings
def ant_dir(
    episodes: Episodes,
    agents: int = 10,
    held_out: int = 5,
    seed: int = 0,
    directions: Literal["circle", "line"] = "circle",
) -> Fleet:
    """Ants that walk along a direction of their own: any (ProMP, PEARL), or forward and backward (MAML)."""
    line = {"list": [0.0, float(np.pi)]}
    vary = {"angle": line if directions == "line" else {"uniform": [0.0, float(2 * np.pi)]}}
    family = Family("ant", worlds.ant_direction, tasks.AntDirection, direction_outcomes)
    return make_fleet(family, episodes, vary, agents, held_out, seed)


@with_episode_settings
def ant_goal(
    episodes: Episodes,
    agents: int = 10,
    held_out: int = 5,
    seed: int = 0,
) -> Fleet:
    """Ants that walk to a goal of their own, uniform in the disk of radius 3 (ProMP, PEARL)."""
    rng = np.random.default_rng([seed, 2])
    goals = [in_disk(*rng.random(2)) for _ in range(max(agents, 0) + max(held_out, 0))]
    family = Family("ant", worlds.ant_to_goal, tasks.AntGoal, goal_outcomes)
    return make_fleet(family, episodes, {"goal": one_by_one(goals, agents)}, agents, held_out, seed)


@with_episode_settings
def hopper_mass(
    episodes: Episodes,
    agents: int = 10,
    held_out: int = 5,
    seed: int = 0,
    vary: Sequence[str] = ("body_mass",),
    limit: float = 3.0,
) -> Fleet:
    """Hoppers with bodies of their own: every part's mass times 1.5^u, u uniform on [-limit, limit] (ProMP, PEARL).

    `vary` may name more of the body: body_inertia, dof_damping (times 1.3^u), geom_friction.
    """
    family = Family("hopper", worlds.hopper, tasks.Hopper, body_outcomes)
    return bodies(family, episodes, agents, held_out, seed, vary, limit)


@with_episode_settings
def walker_mass(
    episodes: Episodes,
    agents: int = 10,
    held_out: int = 5,
    seed: int = 0,
    vary: Sequence[str] = ("body_mass",),
    limit: float = 3.0,
) -> Fleet:
    """Walkers with bodies of their own, in the same way as `hopper_mass`."""
    family = Family("walker", worlds.walker, tasks.Walker, body_outcomes)
    return bodies(family, episodes, agents, held_out, seed, vary, limit)


def cheetah(frame_skip: int, velocity_scale: float) -> dict[str, Any]:
    """Check the options that all cheetahs share."""
    positive(frame_skip=frame_skip, velocity_scale=velocity_scale)
    return {"frame_skip": frame_skip, "velocity_scale": velocity_scale}


def positive(**settings: float) -> None:
    """Check that settings are finite and positive."""
    for name, value in settings.items():
        if not 0 < value < float("inf"):
            raise UserError(f"{name} must be a finite number > 0; it is {value}")


def bodies(
    family: Family, episodes: Episodes, agents: int, held_out: int, seed: int, vary: Sequence[str], limit: float
) -> Fleet:
    """Make a fleet of agents whose body models are multiplied, each part with random numbers of its own."""
    if not vary or isinstance(vary, str):
        raise UserError(f"vary must be a list of the parts that differ between bodies, from {', '.join(worlds.BODY)}")
    for name in vary:
        if name not in worlds.BODY:
            raise UserError(f"vary: a body has no {name!r}{nearest(name, worlds.BODY)}")
    positive(limit=limit)
    episodes.check()
    env, drawn = family.world(), {}
    for name in vary:
        rng = np.random.default_rng([seed, worlds.BODY.index(name)])
        size = getattr(env.model, name).size
        powers = rng.uniform(-limit, limit, (max(agents, 0) + max(held_out, 0), size))
        drawn[name] = one_by_one([worlds.Factors((BASES[name] ** u).tolist()) for u in powers], agents)
    env.close()
    return make_fleet(family, episodes, drawn, agents, held_out, seed)


def cheetah_outcomes(settings: Settings) -> Outcomes:
    """The outcomes of a cheetah in Gymnasium."""
    return partial(running, settings["velocity_scale"])


def direction_outcomes(settings: Settings) -> Outcomes:
    """The outcomes of an ant with a direction in Gymnasium."""
    return partial(walking, (np.cos(settings["angle"]), np.sin(settings["angle"])))


def goal_outcomes(settings: Settings) -> Outcomes:
    """The outcomes of an ant with a goal in Gymnasium."""
    return partial(arriving, settings["goal"])


def body_outcomes(_: Settings) -> Outcomes:
    """The outcomes of a hopper or a walker in Gymnasium."""
    return upright


def one_by_one(values: list[Any], agents: int) -> dict[str, list[Any]]:
    """State the values of all agents, for `vary`."""
    return {"train": values[:agents], "held_out": values[agents:]}


def in_disk(area: float, turn: float) -> tuple[float, float]:
    """Draw a point of the disk of goals, uniform by area, with two uniforms."""
    r, angle = FARTHEST * np.sqrt(area), 2 * np.pi * turn
    return float(r * np.cos(angle)), float(r * np.sin(angle))
