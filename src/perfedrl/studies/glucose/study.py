"""Configs and claims: people with type 1 diabetes whom no training saw, personalized from a few of their own days.

All numbers are of the stochastic policy on fresh days. Settings were chosen where numbers 009 and 010 of each age group
were unseen (docs/cases/glucose.md). Here these train, and 007 and 008, on whom nothing was chosen, are unseen.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from perfedrl.experiments.config import Config, parse_config
from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.studies.claims import Claim, everywhere, point, single
from perfedrl.studies.glucose.clinical_rules import rule_outcomes
from perfedrl.studies.glucose.daily_profile import daily_profile
from perfedrl.studies.measurement_cache import Measurement

NAME = "glucose"
SEEDS = 10
UNSEEN = ("adult#007", "adult#008", "adolescent#007", "adolescent#008", "child#007", "child#008")
"""Who is not seen in training; the other 24 train."""
BUDGETS = (0, 5, 10, 20)
"""Days of its own from which a patient personalizes."""
DAYS = BUDGETS[-1]

PERSONALIZED, SHARED, CEILING, SCRATCH = "personalized", "shared", "ceiling", "scratch"
RULES, PROFILE = "clinical rules", "daily profile"

LEAST_IN_RANGE, MOST_BELOW, LEAST_OF_WORST, LEAST_CLOSED = 0.85, 0.04, 0.7, 0.5
"""Goals: time in range and below 70 mg/dL of the mean patient, in range of the worst, and the share of the distance
from the shared policy to the ceiling that personalization closes."""

ROUNDS = 80
POLICY = {"name": "gaussian-mlp", "hidden": [32], "initial_std": 0.5, "least_std": 0.1}
CLINICAL = ["weight", "basal", "carbohydrate_ratio", "correction_factor"]
CLIPPED = {"beta": 1e-2, "anneal": ROUNDS, "local_steps": 2}
ONE_POLICY = {"name": "fedppo", "alpha": 3.0, "m": 40, **CLIPPED}

TABLES: Mapping[str, Mapping[str, Any]] = {
    PERSONALIZED: {
        "policy": POLICY,
        "algorithm": {
            **{"name": "promp", "alpha": 8.0, "learn_alpha": "per-parameter", "m_in": 20, "m_out": 20},
            **CLIPPED,
        },
    },
    SHARED: {"policy": POLICY, "algorithm": ONE_POLICY},
    CEILING: {"policy": {**POLICY, "sees": CLINICAL}, "algorithm": ONE_POLICY},
    SCRATCH: {"policy": POLICY, "algorithm": {"name": "from-scratch", "alpha": 1.0, "steps": 4}},
}


def configs(seeds: int, quick: bool) -> dict[str, Config]:
    """One config for each row of the table; quick ones have three patients and a few rounds."""
    return {key: config(key, seeds, quick) for key in TABLES}


def config(key: str, seeds: int, quick: bool) -> Config:
    """The config of one row."""
    table: dict[str, Any] = {"rounds": 1 if key == SCRATCH else ROUNDS, **TABLES[key]}
    fleet: dict[str, Any] = {"env": "glucose", "held_out": list(UNSEEN), "risk": "kovatchev"}
    measured = {"trajectories": DAYS, "episodes": 40, "few_shot": BUDGETS, "repeats": 4}
    if quick:
        fleet["patients"] = ["adult#001", "adolescent#001", "child#001"]
        table["rounds"] = 1
        few = {name: 2 for name in ("m_in", "m_out", "m") if name in table["algorithm"]}
        table["algorithm"] = {**table["algorithm"], **few}
        measured |= {"episodes": 4, "repeats": 1}
    return parse_config(
        {
            "name": f"{NAME}-{key}",
            "seeds": seeds,
            "start": "per-seed",
            "evaluate_every": table["rounds"],  # a history of ten seeds by patient is large
            "advantage": {"name": "gae", "gae_lambda": 0.95, "times_variance": True},
            "fleet": fleet,
            "evaluation": {"name": "monte-carlo", **measured},
            **table,
        }
    )


def measurements(_seeds: int) -> list[Measurement]:
    """The rules without learning, and a patient's days before and after the step."""
    return [
        Measurement(RULES, rule_outcomes, {"unseen": list(UNSEEN), "seed": 0, "days": 200, "tuning_days": 10}),
        Measurement(PROFILE, daily_profile, {"budgets": [0, DAYS], "days": 200}, PERSONALIZED),
    ]


def by_patient(evidence: Mapping[Any, Any], key: str, days: int, outcome: str) -> Float[np.ndarray, "seed patient"]:
    """An outcome of every unseen patient, personalized from some days."""
    deployed = evidence[key].deployed
    (at,) = np.flatnonzero(deployed.budgets == days)
    return deployed.outcomes[outcome][:, at]


def mean_patient(evidence: Mapping[Any, Any], key: str, days: int, outcome: str = "in_range") -> Interval:
    """The mean over patients of an outcome, with its interval over seeds."""
    return mean_interval(by_patient(evidence, key, days, outcome).mean(axis=-1))


def claims(evidence: Mapping[Any, Any]) -> list[Claim]:
    """The goals first, then what each method has of the unseen patients' time."""
    return [*goals(evidence), *table(evidence)]


def goals(evidence: Mapping[Any, Any]) -> list[Claim]:
    """Time in range and below after 20 days, the worst patient, and the comparison with shared policy and ceiling."""
    after = f"unseen patients after one step from {DAYS} days"
    inside = by_patient(evidence, PERSONALIZED, DAYS, "in_range")
    below = mean_patient(evidence, PERSONALIZED, DAYS, "below_70")
    worst = mean_interval(inside.min(axis=-1))
    shared = by_patient(evidence, SHARED, 0, "in_range").mean(axis=-1)
    ceiling = by_patient(evidence, CEILING, 0, "in_range").mean(axis=-1)
    own = mean_interval(inside.mean(axis=-1))
    closed = (own.mean - shared.mean()) / (ceiling.mean() - shared.mean())
    apart = np.asarray(own.low > mean_interval(shared).high)
    return [
        single(NAME, f"in range, {after} (>= {LEAST_IN_RANGE:g})", np.nan, own, LEAST_IN_RANGE, 1.0),
        single(NAME, f"below 70 mg/dL, {after} (<= {MOST_BELOW:g})", np.nan, below, 0.0, MOST_BELOW),
        single(NAME, f"in range, the worst of the {after} (>= {LEAST_OF_WORST:g})", np.nan, worst, LEAST_OF_WORST, 1.0),
        everywhere(NAME, "in range: the interval lies above that of the shared policy", apart),
        single(
            NAME,
            f"share of the distance from the shared policy to the ceiling that is closed (>= {LEAST_CLOSED:g})",
            np.nan,
            point(closed),
            LEAST_CLOSED,
            np.inf,
        ),
    ]


ROWS = (
    *((PERSONALIZED, days, f"promp, {days} days" if days else "promp, before the step") for days in BUDGETS),
    (SHARED, 0, "one policy for all (fedppo)"),
    (SHARED, DAYS, f"fedppo, fine-tuned on {DAYS} days"),
    (SCRATCH, DAYS, f"from scratch, {DAYS} days"),
    (CEILING, 0, "one policy that sees the clinical numbers"),
)
"""Rows of the table: run, days of the step, and name."""

SHOWN = {"in_range": "in range", "below_70": "below 70 mg/dL"}


def table(evidence: Mapping[Any, Any]) -> list[Claim]:
    """Time in range and below 70 mg/dL of every method, as numbers without a goal."""
    found = [
        single(NAME, f"{said}: {name}", np.nan, mean_patient(evidence, key, days, outcome), -np.inf, np.inf)
        for key, days, name in ROWS
        for outcome, said in SHOWN.items()
    ]
    for rule, name in (("basal_bolus", "basal-bolus rule, own clinical numbers"), ("pid", "PID controller")):
        for outcome, said in SHOWN.items():
            value = point(evidence[RULES][f"{rule}.{outcome}"].mean())
            found.append(single(NAME, f"{said}: {name}", np.nan, value, -np.inf, np.inf))
    return found
