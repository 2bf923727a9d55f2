"""Random search of a method's settings on agents and seeds that are not tested."""

import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from perfedrl.errors import UserError
from perfedrl.experiments.config import Config
from perfedrl.experiments.stats import over_agents
from perfedrl.experiments.training import side_by_side
from perfedrl.simulation.observers import Observer, announce
from perfedrl.simulation.run_state import FleetState, RunState
from perfedrl.simulation.simulator import Simulation, every_few
from perfedrl.studies.compare.plan import ComparisonPlan


class Trial(NamedTuple):
    """Tried settings with their score; -inf where training diverged."""

    settings: dict[str, float]
    score: float


def draws(plan: ComparisonPlan, method: str) -> list[dict[str, float]]:
    """The settings to try, drawn log-uniformly from their ranges and rounded to three digits."""
    rng = np.random.default_rng([plan.search_seed, zlib.crc32(method.encode())])
    ranges = plan.ranges(plan.entrants[method])

    def draw(low: float, high: float) -> float:
        return float(f"{np.exp(rng.uniform(np.log(low), np.log(high))):.3g}")

    return [{name: draw(*ends) for name, ends in ranges.items()} for _ in range(plan.trials)]


def search(plan: ComparisonPlan, method: str, observers: Sequence[Observer]) -> list[Trial]:
    """Score all settings on the tuning fleet, trained together where possible."""
    tried = draws(plan, method)
    configs = [plan.config(method, settings, tuning=True) for settings in tried]
    groups: dict[str, list[int]] = {}
    for i, config in enumerate(configs):
        with suppress(UserError):  # incompatible settings score as diverged ones
            groups.setdefault(config.trains_with, []).append(i)
    scores = np.full(len(tried), -np.inf)
    for group in groups.values():
        scores[group] = finals([configs[i] for i in group], f"{plan.name}: tuning {method}", observers)
    return [Trial(settings, float(score)) for settings, score in zip(tried, scores, strict=True)]


def finals(configs: Sequence[Config], label: str, observers: Sequence[Observer]) -> Float[np.ndarray, " config"]:
    """The `score` of each config at the end of training, mean over seeds."""
    simulation, rounds = side_by_side(configs), configs[0].rounds
    state, done = simulation.start(), 0
    for observer in observers:
        observer.on_start(RunState(done, None, None, label, rounds, label))
    try:
        for stop in every_few(rounds, max(1, rounds // 10)):
            state, done = simulation.advance(state, done, stop - done), stop
            announce(observers, RunState(done, None, None, label, rounds, label))
        return score(simulation, state, rounds).reshape(len(configs), -1).mean(axis=1)
    finally:
        simulation.fleet.close()


def score(simulation: Simulation, state: FleetState, rounds: int) -> Float[np.ndarray, " replica"]:
    """The mean of the training agents' return after personalization and the unseen agents' return over budgets.

    Without unseen agents it is the former alone; -inf where it is not finite. Played agents whose environments failed
    do not count.
    """

    def mean(values: Float[np.ndarray, "replica *axes"]) -> Float[np.ndarray, " replica"]:
        flat = values.reshape(len(values), -1)
        return flat.mean(axis=-1) if simulation.fleet.traceable else over_agents(flat)

    training = mean(simulation.measure(state, rounds).after[:, -1])
    deployment = None if simulation.fleet.held_out is None else simulation.deploy(state, rounds)
    unseen = training if deployment is None else mean(deployment.outcomes["return"])
    total = (training + unseen) / 2
    return np.where(np.isfinite(total), total, -np.inf)


def best(trials: Sequence[Trial]) -> Trial:
    """The trial with the highest score, the first of equal ones."""
    return max(trials, key=lambda trial: trial.score)
