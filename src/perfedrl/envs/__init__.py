"""Environments, one file per family. A new family is a file and a registry entry."""

from collections.abc import Mapping
from typing import Any

from perfedrl.envs.adapters import brax_fleet, gymnax_fleet
from perfedrl.envs.arrays import arrays, tabular_fleet
from perfedrl.envs.bandits import WITNESS_FEATURES, bandits
from perfedrl.envs.base import BaseTask, DataTask, PlayedTask, Task
from perfedrl.envs.classification import Classification, Examples, classification
from perfedrl.envs.control import (
    Acrobot,
    CartPole,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
    acrobot,
    cart_pole,
    mountain_car,
    mountain_car_continuous,
    pendulum,
)
from perfedrl.envs.fleet import Fleet, fleet, stack
from perfedrl.envs.glucose import GlucoseDay, glucose
from perfedrl.envs.gridworld import gridworld
from perfedrl.envs.gym import EnvironmentCheck, check_env, gymnasium_fleet
from perfedrl.envs.homes import HomeBattery, homes
from perfedrl.envs.locomotion import ant_dir, ant_goal, half_cheetah_dir, half_cheetah_vel, hopper_mass, walker_mass
from perfedrl.envs.lqr import LinearQuadratic, lqr
from perfedrl.envs.navigation import Navigation, PointNavigation, arc, circle, navigation, point_navigation
from perfedrl.envs.new_agents import NewAgents
from perfedrl.envs.random_mdps import mix, random_mdps
from perfedrl.envs.tabular import TabularMDP, unstack
from perfedrl.envs.windy_cliff import windy_cliff
from perfedrl.registry import registry

ENVS = registry(
    "environment",
    Fleet,
    acrobot=acrobot,
    ant_dir=ant_dir,
    ant_goal=ant_goal,
    arc=arc,
    arrays=arrays,
    bandits=bandits,
    brax=brax_fleet,
    cart_pole=cart_pole,
    circle=circle,
    classification=classification,
    glucose=glucose,
    gridworld=gridworld,
    gymnasium=gymnasium_fleet,
    gymnax=gymnax_fleet,
    half_cheetah_dir=half_cheetah_dir,
    half_cheetah_vel=half_cheetah_vel,
    homes=homes,
    hopper_mass=hopper_mass,
    lqr=lqr,
    mountain_car=mountain_car,
    mountain_car_continuous=mountain_car_continuous,
    navigation=navigation,
    pendulum=pendulum,
    point_navigation=point_navigation,
    random_mdps=random_mdps,
    walker_mass=walker_mass,
    windy_cliff=windy_cliff,
)

PLAYED = frozenset(
    {
        "ant-dir",
        "ant-goal",
        "gymnasium",
        "half-cheetah-dir",
        "half-cheetah-vel",
        "hopper-mass",
        "walker-mass",
    }
)
"""Families that are played in Python, unless a fleet names another `engine` than Gymnasium."""


def played_in_python(table: Mapping[str, Any]) -> bool:
    """Whether a config's fleet names a family that is played in Python: over a network only the agents have it."""
    return table.get("env") in PLAYED and table.get("engine", "gymnasium") == "gymnasium"


__all__ = [
    "ENVS",
    "PLAYED",
    "WITNESS_FEATURES",
    "Acrobot",
    "BaseTask",
    "CartPole",
    "Classification",
    "DataTask",
    "EnvironmentCheck",
    "Examples",
    "Fleet",
    "GlucoseDay",
    "HomeBattery",
    "LinearQuadratic",
    "MountainCar",
    "MountainCarContinuous",
    "Navigation",
    "NewAgents",
    "Pendulum",
    "PlayedTask",
    "PointNavigation",
    "TabularMDP",
    "Task",
    "acrobot",
    "arc",
    "arrays",
    "bandits",
    "brax_fleet",
    "cart_pole",
    "check_env",
    "circle",
    "classification",
    "fleet",
    "glucose",
    "gridworld",
    "gymnasium_fleet",
    "gymnax_fleet",
    "homes",
    "lqr",
    "mix",
    "mountain_car",
    "mountain_car_continuous",
    "navigation",
    "pendulum",
    "played_in_python",
    "point_navigation",
    "random_mdps",
    "stack",
    "tabular_fleet",
    "unstack",
    "windy_cliff",
]
