"""The same search for every method: settings drawn at random, tried on agents and seeds that no test sees."""

import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from perfedrl.errors import UserError
from perfedrl.experiments.config import Config
from perfedrl.experiments.training import side_by_side
from perfedrl.simulation.observers import Observer, announce
from perfedrl.simulation.run_state import FleetState, RunState
from perfedrl.simulation.simulator import Simulation, every_few
from perfedrl.studies.compare.plan import Plan


class Trial(NamedTuple):
    """Settings that were tried, and what they scored; -inf where training diverged."""

    settings: dict[str, float]
    score: float


def draws(plan: Plan, method: str) -> list[dict[str, float]]:
    """The settings to try, log-uniform on their ranges, three digits each."""
    rng = np.random.default_rng([plan.search_seed, zlib.crc32(method.encode())])
    ranges = plan.ranges(plan.entrants[method])
    draw = lambda low, high: float(f"{np.exp(rng.uniform(np.log(low), np.log(high))):.3g}")  # noqa: E731
    return [{name: draw(*ends) for name, ends in ranges.items()} for _ in range(plan.trials)]


def search(plan: Plan, method: str, observers: Sequence[Observer]) -> list[Trial]:
    """Try every setting on the tuning fleet, all side by side."""
    tried = draws(plan, method)
    configs = [plan.config(method, settings, tuning=True) for settings in tried]
    groups: dict[str, list[int]] = {}
    for i, config in enumerate(configs):
        with suppress(UserError):  # settings that do not go together score as those that diverge
            groups.setdefault(config.trains_with, []).append(i)
    scores = np.full(len(tried), -np.inf)
    for group in groups.values():
        scores[group] = finals([configs[i] for i in group], f"{plan.name}: tuning {method}", observers)
    return [Trial(settings, float(score)) for settings, score in zip(tried, scores, strict=True)]


def finals(configs: Sequence[Config], label: str, observers: Sequence[Observer]) -> Float[np.ndarray, " config"]:
    """The score of each config at the end, mean over seeds: that of `score`."""
    simulation, rounds = side_by_side(configs), configs[0].rounds
    state, done = simulation.start(), 0
    for observer in observers:
        observer.on_start(RunState(done, None, None, label, rounds, label))
    for stop in every_few(rounds, max(1, rounds // 10)):
        state, done = simulation.advance(state, done, stop - done), stop
        announce(observers, RunState(done, None, None, label, rounds, label))
    return score(simulation, state, rounds).reshape(len(configs), -1).mean(axis=1)


def score(simulation: Simulation, state: FleetState, rounds: int) -> Float[np.ndarray, " replica"]:
    """Half what training agents get after personalization, half what unseen ones do, mean over budgets.

    Where a method serves no unseen agents it is the former alone; -inf where it is no number.
    """
    training = simulation.measure(state, rounds).after[:, -1].mean(axis=-1)
    deployment = None if simulation.fleet.held_out is None else simulation.deploy(state, rounds)
    unseen = training if deployment is None else deployment.outcomes["return"].mean(axis=(1, 2))
    total = (training + unseen) / 2
    return np.where(np.isfinite(total), total, -np.inf)


def best(trials: Sequence[Trial]) -> Trial:
    """The trial of the highest score, the first of equal ones."""
    return max(trials, key=lambda trial: trial.score)
