"""Environments: one file per family. A new family is one file here and one line in the registry."""

from perfedrl.envs.arrays import arrays, tabular_fleet
from perfedrl.envs.bandits import WITNESS_FEATURES, bandits
from perfedrl.envs.base import Task
from perfedrl.envs.fleet import Fleet, fleet, stack
from perfedrl.envs.gridworld import gridworld
from perfedrl.envs.navigation import Navigation, PointNavigation, arc, circle, navigation, point_navigation
from perfedrl.envs.random_mdps import mix, random_mdps
from perfedrl.envs.tabular import TabularMDP, unstack
from perfedrl.envs.windy_cliff import windy_cliff
from perfedrl.registry import registry

ENVS = registry(
    "environment",
    arc=arc,
    arrays=arrays,
    bandits=bandits,
    circle=circle,
    gridworld=gridworld,
    navigation=navigation,
    point_navigation=point_navigation,
    random_mdps=random_mdps,
    windy_cliff=windy_cliff,
)

__all__ = [
    "ENVS",
    "WITNESS_FEATURES",
    "Fleet",
    "Navigation",
    "PointNavigation",
    "TabularMDP",
    "Task",
    "arc",
    "arrays",
    "bandits",
    "circle",
    "fleet",
    "gridworld",
    "mix",
    "navigation",
    "point_navigation",
    "random_mdps",
    "stack",
    "tabular_fleet",
    "unstack",
    "windy_cliff",
]
