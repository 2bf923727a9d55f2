"""Personalized federated reinforcement learning: one shared initialization, one policy-gradient step to make it yours.

The commands of the command line are functions here (`train`, `personalize`, `evaluate`), and every part can be swapped
for one's own. Names are imported when they are first used: a process that only relays messages, such as the bridge of
a networked fleet, never loads JAX.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfedrl import algorithms, envs, estimators, exact, policies, theory
    from perfedrl.algorithms import FedAvgPG, LocalPG, PerFedAvgPG
    from perfedrl.compilation import enable_cache, use_all_cores
    from perfedrl.envs import (
        EnvironmentCheck,
        Fleet,
        Navigation,
        PointNavigation,
        TabularMDP,
        acrobot,
        arc,
        cart_pole,
        check_env,
        circle,
        gridworld,
        gymnasium_fleet,
        homes,
        mountain_car,
        pendulum,
        point_navigation,
    )
    from perfedrl.errors import UserError
    from perfedrl.experiments.assessment import Assessment, assess
    from perfedrl.experiments.config import Config, load_config, make_config
    from perfedrl.experiments.evaluate import evaluate
    from perfedrl.experiments.inspection import Inspection, inspect
    from perfedrl.experiments.personalize import Personalized, personalize
    from perfedrl.experiments.store import Run, load_run
    from perfedrl.experiments.training import train
    from perfedrl.policies import GaussianMLP, LogLinearSoftmax, MLPSoftmax, TableSoftmax
    from perfedrl.saved_policies.file import SavedPolicy, load_policy
    from perfedrl.simulation.evaluation import MonteCarlo
    from perfedrl.simulation.experiment import Experiment
    from perfedrl.simulation.history import Deployment, History
    from perfedrl.simulation.observers import Observer
    from perfedrl.simulation.run_state import RunState
    from perfedrl.simulation.simulator import Result, Simulation, simulate
    from perfedrl.studies.diagnosis import Diagnosis, diagnose

__version__ = version("perfedrl")

_HOME = {
    "algorithms": "FedAvgPG LocalPG PerFedAvgPG",
    "compilation": "enable_cache use_all_cores",
    "envs": "EnvironmentCheck Fleet Navigation PointNavigation TabularMDP acrobot arc cart_pole check_env circle "
    "gridworld gymnasium_fleet homes mountain_car pendulum point_navigation",
    "errors": "UserError",
    "simulation.evaluation": "MonteCarlo",
    "experiments.config": "Config load_config make_config",
    "experiments.evaluate": "evaluate",
    "experiments.inspection": "Inspection inspect",
    "experiments.personalize": "Personalized personalize",
    "experiments.assessment": "Assessment assess",
    "experiments.training": "train",
    "experiments.store": "Run load_run",
    "saved_policies.file": "SavedPolicy load_policy",
    "simulation.history": "Deployment History",
    "policies": "GaussianMLP LogLinearSoftmax MLPSoftmax TableSoftmax",
    "simulation": "Result Simulation simulate",
    "simulation.experiment": "Experiment",
    "simulation.observers": "Observer",
    "simulation.run_state": "RunState",
    "studies.diagnosis": "Diagnosis diagnose",
}
"""The modules in which the package's functions and classes live."""

_MODULES = ("algorithms", "envs", "estimators", "exact", "policies", "theory")
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = [
    "Assessment",
    "Config",
    "Deployment",
    "Diagnosis",
    "EnvironmentCheck",
    "Experiment",
    "FedAvgPG",
    "Fleet",
    "GaussianMLP",
    "History",
    "Inspection",
    "LocalPG",
    "LogLinearSoftmax",
    "MLPSoftmax",
    "MonteCarlo",
    "Navigation",
    "Observer",
    "PerFedAvgPG",
    "Personalized",
    "PointNavigation",
    "Result",
    "Run",
    "RunState",
    "SavedPolicy",
    "Simulation",
    "TableSoftmax",
    "TabularMDP",
    "UserError",
    "acrobot",
    "algorithms",
    "arc",
    "assess",
    "cart_pole",
    "check_env",
    "circle",
    "diagnose",
    "enable_cache",
    "envs",
    "estimators",
    "evaluate",
    "exact",
    "gridworld",
    "gymnasium_fleet",
    "homes",
    "inspect",
    "load_config",
    "load_policy",
    "load_run",
    "make_config",
    "mountain_car",
    "pendulum",
    "personalize",
    "point_navigation",
    "policies",
    "simulate",
    "theory",
    "train",
    "use_all_cores",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"perfedrl.{name}")
    if name in _MODULE_OF:
        return getattr(import_module(f"perfedrl.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'perfedrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
