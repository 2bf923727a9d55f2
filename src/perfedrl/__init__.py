"""Personalized federated reinforcement learning: one shared initialization, one policy-gradient step to make it yours.

The commands of the command line are functions here (`train`, `personalize`, `evaluate`), and every part can be swapped
for one's own.
"""

from importlib.metadata import version

from perfedrl import algorithms, envs, estimators, exact, policies, theory
from perfedrl.algorithms import FedAvgPG, LocalPG, PerFedAvgPG
from perfedrl.compilation import enable_cache, use_all_cores
from perfedrl.envs import Fleet, Navigation, PointNavigation, TabularMDP, arc, circle, gridworld, point_navigation
from perfedrl.errors import UserError
from perfedrl.evaluation import MonteCarlo
from perfedrl.experiments.config import Config, load_config, make_config
from perfedrl.experiments.evaluate import evaluate
from perfedrl.experiments.personalize import Personalized, personalize
from perfedrl.experiments.run import train
from perfedrl.experiments.store import Run, load_run
from perfedrl.history import Deployment, History
from perfedrl.policies import GaussianMLP, LogLinearSoftmax, MLPSoftmax, TableSoftmax
from perfedrl.simulation import Result, Simulation, simulate

__version__ = version("perfedrl")

__all__ = [
    "Config",
    "Deployment",
    "FedAvgPG",
    "Fleet",
    "GaussianMLP",
    "History",
    "LocalPG",
    "LogLinearSoftmax",
    "MLPSoftmax",
    "MonteCarlo",
    "Navigation",
    "PerFedAvgPG",
    "Personalized",
    "PointNavigation",
    "Result",
    "Run",
    "Simulation",
    "TableSoftmax",
    "TabularMDP",
    "UserError",
    "algorithms",
    "arc",
    "circle",
    "enable_cache",
    "envs",
    "estimators",
    "evaluate",
    "exact",
    "gridworld",
    "load_config",
    "load_run",
    "make_config",
    "personalize",
    "point_navigation",
    "policies",
    "simulate",
    "theory",
    "train",
    "use_all_cores",
]
