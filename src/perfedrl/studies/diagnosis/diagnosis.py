"""Diagnose a fleet: measure what shared and own policies are worth, part by part, and draw the verdict."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from perfedrl.envs import Fleet
from perfedrl.envs.base import DataTask
from perfedrl.errors import UserError
from perfedrl.exact.lqr import is_lqr
from perfedrl.experiments.config import Config, parse_config, whole
from perfedrl.experiments.inspection import describe_agents
from perfedrl.simulation.observers import Observer, Part
from perfedrl.studies.diagnosis.fleet_limits import is_tabular, linear_quadratic_limits, tabular_limits, train_limits
from perfedrl.studies.diagnosis.returns import Arrays, FleetReturns, SavedParts
from perfedrl.studies.diagnosis.training import Training, some_agents
from perfedrl.studies.diagnosis.verdict import Verdict

BUDGETS = (20, 50, 200)
SEEDS, TRAJECTORIES, AGENTS, EPISODES = 3, 2000, 8, 100
"""Defaults; each policy is trained from so many trajectories of an agent, and measured over so many episodes."""
LEAST_TRAJECTORIES, MOST_TRAJECTORIES, MOST_SEEDS, MOST_AGENTS = 100, 1_000_000, 1000, 64


@dataclass(frozen=True)
class Diagnosis:
    """A verdict with the names of the agents it was drawn from, and how many the fleet has."""

    name: str
    verdict: Verdict
    labels: tuple[str, ...]
    fleet_agents: int
    trajectories: int
    seeds: int
    step_sizes: tuple[float, float] | None
    """alpha and beta, where returns are exact."""
    times_variance: bool = False
    """Whether the policy is Gaussian, so that steps were in units of its variance."""

    @property
    def chosen(self) -> str:
        """Which agents were looked at, in words."""
        n = len(self.labels)
        return f"all {n} agents" if n == self.fleet_agents else f"{n} of {self.fleet_agents} agents, evenly chosen"


def diagnose(
    fleet: Fleet,
    policy: Any,
    *,
    name: str = "fleet",
    alpha: float | None = None,
    beta: float | None = None,
    seeds: int = SEEDS,
    trajectories: int = TRAJECTORIES,
    agents: int = AGENTS,
    folder: str | Path | None = None,
    restart: bool = False,
    observers: Sequence[Observer] = (),
) -> Diagnosis:
    """Say whether a fleet needs personalization, how much it would gain, and which mechanism to use.

    Small specialists and one shared policy are trained, each from `trajectories` trajectories of an agent, and every
    policy is measured on every agent. For tabular and linear-quadratic agents these are computed exactly instead. An
    initialization for one gradient step and agents that learn alone show what few trajectories are worth; with exact
    returns they take the step sizes `alpha` and `beta`, which are not needed otherwise. At most `agents` agents, evenly
    chosen, are looked at. With `folder`, finished parts are saved there, and the same call goes on after an
    interruption.
    """
    check_numbers(seeds, trajectories, agents)
    if isinstance(fleet.train, DataTask):
        raise UserError("diagnose needs agents that play episodes, and these have examples")
    if fleet.agents < 2:
        raise UserError("diagnose compares agents, and this fleet has one; give it at least 2")
    chosen = np.unique(np.linspace(0, fleet.agents - 1, min(agents, fleet.agents)).round().astype(int)).tolist()
    exact = is_lqr(fleet, policy) or (is_tabular(fleet) and policy.probabilities is not None)
    if exact and (alpha is None or beta is None):
        raise UserError(
            "set alpha and beta: agents with exact returns take gradient steps of these sizes; in a config take an "
            "algorithm that has both, such as fedavg-pg"
        )
    step_sizes = (float(alpha), float(beta)) if exact and alpha is not None and beta is not None else None
    part, gaussian = some_agents(fleet, chosen), policy.variance is not None
    training = Training(part, policy, range(seeds), trajectories, BUDGETS, EPISODES, step_sizes, observers)
    saved = SavedParts(None if folder is None else Path(folder), restart)
    saved.check_same(training.digest)
    try:
        training.check()
        found = (exact_parts if exact else trained_parts)(training, saved, name)
    finally:
        part.close()
    check_measured(found)
    returns = FleetReturns(**found, budgets=np.asarray(BUDGETS), exact=exact)
    return Diagnosis(
        name, Verdict(returns), labels_of(fleet, chosen), fleet.agents, trajectories, seeds, step_sizes, gaussian
    )


def check_measured(found: Arrays) -> None:
    """Reject returns of agents that could not be measured, as after failures of their environments."""
    for name in ("untrained", "shared", "own"):
        if failed := np.flatnonzero(~np.isfinite(found[name]).all(axis=0)).tolist():
            raise UserError(
                f"agents {', '.join(map(str, failed))} of those that were chosen could not be measured; look at their "
                "environments, then run it again with --restart"
            )


def check_numbers(seeds: int, trajectories: int, agents: int) -> None:
    """Check the numbers of seeds, trajectories and agents."""
    for name, value, least, most in (
        ("seeds", seeds, 2, MOST_SEEDS),
        ("trajectories", trajectories, LEAST_TRAJECTORIES, MOST_TRAJECTORIES),
        ("agents", agents, 2, MOST_AGENTS),
    ):
        if not whole(value) or not least <= value <= most:
            raise UserError(f"{name} must be a whole number from {least} to {most}, got {value}")


def exact_parts(training: Training, saved: SavedParts, name: str) -> Arrays:
    """The returns of a tabular or linear-quadratic fleet: limits are computed, learning is trained."""

    def limits() -> Arrays:
        if is_tabular(training.fleet):
            return tabular_limits(training.fleet)
        return linear_quadratic_limits(training.fleet, training.policy.gain)

    parts = {
        "limits": limits,
        "untrained": training.untrained,
        "initialization": training.initialization,
        "fine-tuning": training.fine_tuning,
        "alone": training.alone,
    }
    found: Arrays = {}
    for number, (part, make) in enumerate(parts.items(), start=1):
        tell(training.observers, name, part, number, len(parts))
        found |= saved.get(part, make)
    return found


def trained_parts(training: Training, saved: SavedParts, name: str) -> Arrays:
    """The returns of a fleet whose policies are trained."""
    agents, parts = training.fleet.agents, training.fleet.agents + 3
    like = jax.eval_shape(training.policy.init, jax.random.key(0))

    def shared_policy() -> Arrays:
        params, found = training.shared_policy()
        return {**found, **{f"params.{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(params))}}

    tell(training.observers, name, "one policy for all", 1, parts)
    shared = saved.get("shared", shared_policy)
    leaves = [shared.pop(f"params.{i}") for i in range(len(jax.tree.leaves(like)))]
    params = jax.tree.unflatten(jax.tree.structure(like), leaves)
    tell(training.observers, name, "an initialization for one step", 2, parts)
    adapted = saved.get("initialization", training.initialization)
    tell(training.observers, name, "fine-tuning", 3, parts)
    adapted |= saved.get("fine-tuning", training.fine_tuning)
    specialists = []
    for agent in range(agents):
        tell(training.observers, name, f"agent {agent}", 4 + agent, parts)
        specialists.append(saved.get(f"agent-{agent}", partial(training.specialist, agent, params)))
    return {**train_limits(shared, specialists), **adapted}


def tell(observers: Sequence[Observer], name: str, part: str, number: int, parts: int) -> None:
    """Tell observers which part of the diagnosis comes next."""
    for observer in observers:
        observer.on_part(Part(name, part, number, parts, parts - number, "parts"))


def labels_of(fleet: Fleet, chosen: Sequence[int]) -> tuple[str, ...]:
    """The agents' numbers with the settings in which they differ, where these are short."""
    _, own = describe_agents(fleet)

    def label(i: int) -> str:
        short = ", ".join(f"{key} {x}" for key, x in own[i].items() if "numbers" not in x)
        return f"{i}: {short}" if short and len(short) <= 40 else str(i)

    return tuple(map(label, chosen))


def diagnose_config(config: Config, results: str | Path = "diagnoses", **settings: Any) -> Diagnosis:
    """Diagnose the fleet and the policy of a config; parts are saved in a folder of `results`.

    The config's algorithm gives the step sizes for exact returns; its normalization and all that concerns training
    alone are left out.
    """
    kept = {
        key: x
        for key, x in config.table.items()
        if key in ("name", "fleet", "policy", "advantage", "algorithm", "code")
    }
    plain = parse_config({**kept, "rounds": 1, "seeds": 1})
    experiment, algorithm = plain.experiment, config.algorithm
    made = {key: settings[key] for key in ("seeds", "trajectories", "agents") if key in settings}
    digest = hashlib.sha256(json.dumps([plain.digest, made], sort_keys=True).encode()).hexdigest()[:10]
    steps = {key: algorithm[key] for key in ("alpha", "beta") if algorithm.get(key)}
    folder = Path(results) / f"{config.name}-{digest}"
    return diagnose(experiment.fleet, experiment.policy, name=config.name, **steps, folder=folder, **settings)
