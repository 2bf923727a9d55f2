"""A study: the configs it trains, the claims it checks, the figures it draws, and the extra it needs."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from perfedrl.errors import UserError
from perfedrl.experiments.config import Config
from perfedrl.experiments.store import Run
from perfedrl.report.plots import Plot
from perfedrl.studies.claims import Claim
from perfedrl.studies.measurement_cache import Measurement
from perfedrl.types import Progress

Runs = Mapping[Any, Run]
"""The runs of a study by the keys of its configs: (variant, alpha), say."""


class Extra(NamedTuple):
    """An optional dependency: its package, the module that is imported, and the extra that installs it."""

    package: str
    module: str
    name: str

    @property
    def installed(self) -> bool:
        try:
            importlib.import_module(self.module)
        except ImportError:
            return False
        return True


DP_ACCOUNTING = Extra("dp-accounting", "dp_accounting", "federation")
GYMNASIUM = Extra("gymnasium", "gymnasium", "gym")
MUJOCO = Extra("mujoco", "mujoco", "mujoco")


def no_configs(_seeds: int, _quick: bool) -> dict[Any, Config]:
    """The configs of a study that trains nothing by a config."""
    return {}


def no_measurements(_seeds: int) -> Sequence[Measurement]:
    """The measurements of a study that keeps none."""
    return ()


def same_runs(runs: Mapping[Any, Any], _progress: Progress) -> Mapping[Any, Any]:
    """The evidence of a study whose claims are computed from its runs and cached arrays directly."""
    return runs


@dataclass(frozen=True)
class Study:
    """One study of the registry.

    `configs` takes the number of seeds and whether the run is a quick one. `claims` and `figures` take the study's
    evidence: what `measure` computes from the runs and from the arrays of `measurements`, by default just these.
    """

    name: str
    title: str
    configs: Callable[[int, bool], dict[Any, Config]]
    claims: Callable[[Any], list[Claim]]
    figures: Callable[[Any], list[Plot]]
    measure: Callable[[Any, Progress], Any] = same_runs
    seeds: int = 10
    """The number of seeds of the full study."""
    measurements: Callable[[int], Sequence[Measurement]] = no_measurements
    """The measurements for a number of seeds; their arrays are cached beside the runs."""
    extra: Extra | None = None
    """The optional dependency without which the study cannot run."""

    @property
    def missing(self) -> str:
        """The optional package that is not installed, and how to install it; empty where nothing is missing."""
        if self.extra is None or self.extra.installed:
            return ""
        return (
            f'{self.name} needs {self.extra.package}, which is not installed: pip install "perfedrl[{self.extra.name}]"'
        )

    def check_installed(self) -> None:
        """Raise a `UserError` where the study's optional dependency is missing."""
        if self.missing:
            raise UserError(self.missing)


def final(run: Run) -> np.ndarray:
    """The return after adaptation at the end of training, mean over training agents, one value per seed."""
    return run.history.after[:, -1].mean(axis=-1)
