"""The theory applied to a config: constants, bounds, regime and plans, and what the fleet realizes."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from perfedrl import exact, theory
from perfedrl.errors import UserError
from perfedrl.experiments.config import Config
from perfedrl.experiments.start_parameters import StartTable
from perfedrl.theory import Bound, Given, Plan, Problem, Regime
from perfedrl.theory.first_order_fixed_points import FixedPoint, fixed_points
from perfedrl.theory.fleet_problem import Settings, first_parameters, guarantee, is_tabular, problem, settings
from perfedrl.theory.plan import Bias
from perfedrl.theory.realized_bounds import ROUNDS, RealizedBound, realized
from perfedrl.types import Progress

MOST_PARAMETERS = 300
"""Fixed points are not searched for with more parameters: that needs the Jacobian of the first-order dynamics."""


@dataclass(frozen=True)
class Findings:
    """Results for a config before anything runs; `plans` and `smaller` are empty without an accuracy."""

    config: Config
    problem: Problem
    settings: Settings
    regime: Regime
    bound: Bound | None
    """Theorem 1 at the config's settings; None where it does not apply, with the reason in `silent`."""
    silent: str
    plans: dict[str, Plan]
    smaller: dict[str, Plan]
    """The cheapest plan at smaller adaptation step sizes."""
    first_square: float | None
    """|grad F|^2 at the start, for tabular fleets; accuracies above it are met before training."""


def of_config(
    config: Config,
    epsilon: float | None = None,
    given: Given | None = None,
    bias: Bias = "best",
    gap: float | None = None,
    radius: float | None = None,
    reward_bound: float | None = None,
) -> Findings:
    """Constants, bounds, regime and plans of a config, without training."""
    known = {"start": start(config), "gap": gap, "radius": radius, "reward_bound": reward_bound}
    given = given or Given()
    try:
        return _of_config(config, epsilon, given, bias, known)
    except ArithmeticError as error:
        raise UserError("these numbers are too large or too small to compute with") from error


def _of_config(config: Config, epsilon: float | None, given: Given, bias: Bias, known: dict[str, Any]) -> Findings:
    parts, said = config.experiment, settings(config.experiment.algorithm)
    make = partial(problem, parts.fleet, parts.policy, parts.algorithm, **known)
    p = make()
    regime = theory.regime(p.constants, epsilon)
    try:
        bound, silent = guarantee(p, said, config.rounds), ""
    except UserError as error:
        bound, silent = None, str(error)
    plans: dict[str, Plan] = {}
    smaller: dict[str, Plan] = {}
    if epsilon is not None:
        plans = {
            "cheapest": theory.cheapest(p, epsilon, given, bias),
            "Corollary 1, crude": theory.corollary_1(p, epsilon, "crude"),
            "Corollary 1, sharp": theory.corollary_1(p, epsilon, "sharp"),
        }
        for name, alpha in smaller_steps(regime).items():
            fixed = given if alpha else replace(given, m_in=None, m_h=None)
            try:
                smaller[name] = theory.cheapest(make(alpha=alpha), epsilon, fixed, bias)
            except UserError:
                continue  # the first-order variant has plans at small step sizes only
    first = None
    if is_tabular(parts.fleet, parts.policy):
        theta = first_parameters(parts.policy, known["start"])
        first = float(np.sum(exact.meta_gradient(parts.fleet, theta, said.alpha, parts.policy) ** 2))
    return Findings(config, p, said, regime, bound, silent, plans, smaller, first)


def smaller_steps(regime: Regime) -> dict[str, float]:
    """Adaptation step sizes below the config's: its half, the ends of regimes, and zero; the largest first."""
    ends = {
        "half": regime.alpha / 2,
        "1 / (2 L_J)": regime.moderate,
        "alpha-dagger": regime.dagger,
        "half of vanishing": regime.vanishing / 2,
        "none": 0.0,
    }
    return dict(sorted(((x, a) for x, a in ends.items() if a < regime.alpha), key=lambda item: -item[1]))


def start(config: Config) -> int:
    """The seed of a config's start parameters; the first seed where each seed has its own start."""
    if isinstance(config.start, StartTable):
        raise UserError("the theory is applied to drawn start parameters; set start to a number instead of a run")
    return config.start if isinstance(config.start, int) else config.seeds[0]


@dataclass(frozen=True)
class FleetMeasurements:
    """Realized values of a tabular fleet along a run, and the fixed points of its first-order dynamics."""

    realized: list[RealizedBound]
    fixed_points: list[FixedPoint] | None
    """None where they were not searched for: without adaptation, or with many parameters."""


def measure(found: Findings, progress: Progress = lambda _: None) -> FleetMeasurements | None:
    """Run a tabular fleet for some rounds and measure it; None for other fleets."""
    config, parts = found.config, found.config.experiment
    if not is_tabular(parts.fleet, parts.policy):
        return None
    rounds = min(config.rounds, ROUNDS)
    run: dict[str, Any] = {"rounds": rounds, "seed": config.seeds[0], "start": start(config), "progress": progress}
    rows = realized(found.problem, parts.fleet, parts.policy, parts.algorithm, **run)
    points = None
    if found.settings.alpha > 0 and found.problem.parameters <= MOST_PARAMETERS:
        progress("fixed points")
        points = fixed_points(parts.fleet, parts.policy, found.settings.alpha)
    return FleetMeasurements(rows, points)
