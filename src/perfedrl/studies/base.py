"""A number of the paper beside ours, and when it counts as met."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfedrl.experiments.config import Config
from perfedrl.experiments.stats import Interval, mean_interval, median_interval, share_interval
from perfedrl.experiments.store import Run
from perfedrl.studies.measurement_cache import Measurement
from perfedrl.types import Progress

Runs = Mapping[Any, Run]
"""The runs of an experiment, by what tells them apart: (variant, alpha), say."""


@dataclass(frozen=True)
class Claim:
    """A number of the paper beside ours, with the 95 % interval of ours over seeds."""

    experiment: str
    claim: str
    paper: float
    measured: float
    low: float
    high: float
    met: bool


@dataclass(frozen=True)
class Experiment:
    """An experiment of the paper: the configs behind it, as a function of (seeds, quick), and what it claims.

    Claims are read off its evidence: the runs themselves, or what `measure` makes of them.
    """

    name: str
    title: str
    configs: Callable[[int, bool], dict[Any, Config]]
    claims: Callable[[Any], list[Claim]]
    measure: Callable[[Runs, Progress], Any] = lambda runs, _progress: runs
    seeds: int = 10
    """How many seeds it is meant for."""
    kept: Callable[[int], Sequence[Measurement]] = lambda _seeds: ()
    """What it measures once for so many seeds and keeps beside the runs; with them it is what `measure` gets."""


def final(run: Run) -> np.ndarray:
    """The return after adaptation when training has ended, mean over training agents, one value per seed."""
    return run.history.after[:, -1].mean(axis=-1)


def near(
    experiment: str, claim: str, paper: float, values: np.ndarray, tolerance: float, most: float = np.inf
) -> Claim:
    """A claim that is met when the mean over seeds lies within the tolerance of the paper's number.

    `most` is the largest value there can be, where the interval ends too.
    """
    mean, low, high = mean_interval(values)
    measured = Interval(mean, low, min(high, most))
    return Claim(experiment, claim, paper, *measured, met=bool(abs(measured.mean - paper) <= tolerance))


def median(experiment: str, claim: str, paper: float, values: np.ndarray, low: float, high: float) -> Claim:
    """A claim that is met when the median over seeds lies from low to high."""
    measured = median_interval(values)
    return Claim(experiment, claim, paper, *measured, met=bool(low <= measured.mean <= high))


def fraction(experiment: str, claim: str, paper: float, holds: np.ndarray, low: float, high: float) -> Claim:
    """A claim that is met when the fraction of seeds for which something holds lies from low to high."""
    measured = share_interval(int(np.sum(holds)), len(holds))
    return Claim(experiment, claim, paper, *measured, met=bool(low <= measured.mean <= high))


def everywhere(experiment: str, claim: str, holds: np.ndarray) -> Claim:
    """A claim about an order that the paper says holds everywhere: the share of places where it does."""
    measured = float(np.mean(holds))
    return Claim(experiment, claim, 1.0, measured, measured, measured, met=measured == 1.0)


def single(experiment: str, claim: str, paper: float, measured: Interval, low: float, high: float) -> Claim:
    """A claim about one number, which is met when it lies from low to high."""
    return Claim(experiment, claim, paper, *measured, met=bool(low <= measured.mean <= high))
