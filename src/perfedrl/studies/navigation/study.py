"""Config and claims: unseen agents of 2-D navigation after one step, compared with MAML's published numbers.

Settings were chosen on other fleets (fleet seeds 2, 3 and 5; here 0) and other seeds (100 to 196) than are used here.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from perfedrl.experiments.config import Config, parse_config
from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.studies.claims import Claim, single
from perfedrl.studies.measurement_cache import Measurement
from perfedrl.studies.navigation.maml_goals import STRETCH_TRAJECTORIES, TARGET, maml_claims, measurements_of

POINTS = "point navigation"
BUDGETS = (0, 10, 20, 50, 100, 200, 500)

POLICY = MappingProxyType({"name": "gaussian-mlp", "hidden": [], "initial_std": 0.01, "last_scale": 0.0})
"""A linear, nearly deterministic policy that starts by standing still, so that a step depends on the gradient alone."""

RECIPE = MappingProxyType(
    {
        "name": "per-fedavg-pg",
        "variant": "first-order",
        "alpha": 1e-6,
        "beta": 0.003,
        "clip": 1.0,
        "learn_alpha": "per-parameter",
        "alpha_rate": 0.03,
        "local_steps": 5,
        "m_in": 50,
        "m_out": 50,
    }
)
"""Gradient norms are large and vary widely here; clipping far below them gives every local step the length `beta`."""


def point_config(seeds: int, quick: bool = False) -> Config:
    """MAML's setting, 100 decisions from the origin, trained by 100 agents; undiscounted scores by budget.

    With only twenty agents, whose goals are not spread evenly, the initialization overfits to their goals.
    """
    agents = {"agents": 5 if quick else 100, "held_out": 30}
    fleet = {"env": "point-navigation", **agents, "horizon": 99, "discount": 0.99}
    measured = {"trajectories": 20, "episodes": 32, "few_shot": BUDGETS, "repeats": 4, "rollouts": 2}
    return parse_config(
        {
            "name": "point-navigation",
            "seeds": seeds,
            "rounds": 20 if quick else 800,
            "evaluate_every": 20 if quick else 200,
            "start": "per-seed",
            "baseline": "ridge",
            "fleet": fleet,
            "policy": dict(POLICY),
            "algorithm": dict(RECIPE),
            "evaluation": {"name": "monte-carlo", **measured},
        }
    )


def point_configs(seeds: int, quick: bool) -> dict[str, Config]:
    """The configs of the study, a single one."""
    return {POINTS: point_config(seeds, quick)}


def point_measurements(_seeds: int) -> list[Measurement]:
    """The scores of the run's initialization on the goals of MAML's test."""
    return measurements_of(POINTS)


def point_claims(evidence: Mapping[Any, Any]) -> list[Claim]:
    """The claims on the fleet's own unseen agents, and those on the goals of MAML's test."""
    return [*fleet_claims(evidence), *maml_claims(evidence)]


def fleet_claims(runs: Mapping[Any, Any]) -> list[Claim]:
    """The undiscounted return of the fleet's unseen agents before adaptation and after one step from each budget.

    The target is MAML's on other goals and from 40 trajectories. It is asked from 20 on, so the claims show from which
    budget on it is reached.
    """
    deployed = runs[POINTS].deployed

    def score(m: int) -> Interval:
        return mean_interval(deployed.at("score", m))

    claims = [single("navigation", "score before adaptation", np.nan, score(0), -np.inf, np.inf)]
    for m in BUDGETS[1:]:
        asked = m >= STRETCH_TRAJECTORIES
        what = f"score after one step from {m} trajectories" + asked * f" (>= {TARGET:g})"
        claims.append(single("navigation", what, np.nan, score(m), TARGET if asked else -np.inf, np.inf))
    return claims
