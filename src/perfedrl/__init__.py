"""Personalized federated reinforcement learning: one shared initialization, one policy-gradient step to make it yours.

The commands of the command line are functions here: `train`, `evaluate`; every part can be swapped for one's own.
"""

from importlib.metadata import version

from perfedrl import algorithms, envs, estimators, exact, policies
from perfedrl.algorithms import FedAvgPG, PerFedAvgPG
from perfedrl.compilation import enable_cache, use_all_cores
from perfedrl.envs import Fleet, TabularMDP, gridworld
from perfedrl.errors import UserError
from perfedrl.experiments.config import Config, load_config, make_config
from perfedrl.experiments.evaluate import evaluate
from perfedrl.experiments.run import train
from perfedrl.experiments.store import Run, load_run
from perfedrl.history import History
from perfedrl.policies import LogLinearSoftmax, TableSoftmax
from perfedrl.simulation import Result, Simulation, simulate

__version__ = version("perfedrl")

__all__ = [
    "Config",
    "FedAvgPG",
    "Fleet",
    "History",
    "LogLinearSoftmax",
    "PerFedAvgPG",
    "Result",
    "Run",
    "Simulation",
    "TableSoftmax",
    "TabularMDP",
    "UserError",
    "algorithms",
    "enable_cache",
    "envs",
    "estimators",
    "evaluate",
    "exact",
    "gridworld",
    "load_config",
    "load_run",
    "make_config",
    "policies",
    "simulate",
    "train",
    "use_all_cores",
]
