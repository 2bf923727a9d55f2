"""Families of the meta-RL literature, beyond the paper: what unseen agents get after one step, beside others' numbers.

Settings were chosen on other fleets (their seeds are 2, 3 and 5, here 0) and on seeds (100 to 196) that are not among
those here.
"""

from types import MappingProxyType

import numpy as np

from perfedrl.experiments.config import Config, make_config
from perfedrl.experiments.stats import mean_interval
from perfedrl.studies.base import Claim, Experiment, Runs, single

POINTS = "point navigation"
MAML_BEFORE, MAML_AFTER, MAML_TRAJECTORIES = -40.41, -11.71, 20
"""MAML's score on unseen goals before and after one gradient step, and the trajectories of that step."""

TARGET = -11.7
BUDGETS = (0, 10, 20, 50, 100, 200, 500)

POLICY = MappingProxyType({"name": "gaussian-mlp", "hidden": [], "initial_std": 0.01, "last_scale": 0.0})
"""Linear, nearly noiseless, from standing still: where a step leads is then a matter of the gradient alone."""

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
"""Gradients are long here and of all lengths: a clip far below them makes every local step `beta` long."""


def point_config(seeds: int, quick: bool = False) -> Config:
    """MAML's setting, a hundred decisions from the origin, learned by a hundred agents; undiscounted scores by budget.

    With twenty agents the initialization fits their goals, which are not spread evenly, and unseen ones less.
    """
    agents = {"agents": 5 if quick else 100, "held_out": 30}
    fleet = {"env": "point-navigation", **agents, "horizon": 99, "discount": 0.99}
    measured = {"trajectories": 20, "episodes": 32, "few_shot": BUDGETS, "repeats": 4, "rollouts": 2}
    return make_config(
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
    return {POINTS: point_config(seeds, quick)}


def point_claims(runs: Runs) -> list[Claim]:
    """The undiscounted return of unseen agents before, and after one step from each budget.

    The target is asked for at MAML's budget and above, so the claims say from which on it is reached.
    """
    deployed = runs[POINTS].deployed
    score = lambda m: mean_interval(deployed.at("score", m))  # noqa: E731
    claims = [single("navigation", "score before adaptation", MAML_BEFORE, score(0), -np.inf, np.inf)]
    for m in BUDGETS[1:]:
        asked = m >= MAML_TRAJECTORIES
        what = f"score after one step from {m} trajectories" + asked * f" (>= {TARGET:g})"
        paper = MAML_AFTER if m == MAML_TRAJECTORIES else np.nan
        claims.append(single("navigation", what, paper, score(m), TARGET if asked else -np.inf, np.inf))
    return claims


NAVIGATION = Experiment("navigation", "2-D navigation after one step", point_configs, point_claims)
