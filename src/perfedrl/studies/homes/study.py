"""Configs and claims: batteries in homes that nobody trained in, after one step from some of their own days.

Settings were chosen on the fleet of seed 0. There homes 7, 9, 11 and 14 are held out, here 7, 8, 14 and 17, with other
batteries and tariffs.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float

from perfedrl.experiments.config import Config, parse_config
from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.studies.claims import Claim, point, single
from perfedrl.studies.homes.rules import rule_savings
from perfedrl.studies.measurement_cache import Measurement

NAME = "homes"
PERSONAL, SHARED, TOLD, SCRATCH = "personalized", "shared", "told its tariff", "from scratch"
RULES = "rules"
BUDGETS = (0, 5, 10, 20, 50)
DAYS = 20
"""The budget of the claims, in days of an agent's own."""

FLEET: Mapping[str, Any] = MappingProxyType({"agents": 22, "held_out": 8, "seed": 1})
SEEN = ("peak_start", "capacity", "power", "feed_in")
"""What a policy sees that is told its tariff and its battery."""

ROUNDS, QUICK_ROUNDS = 150, 2
CLIPPED: Mapping[str, Any] = MappingProxyType({"alpha": 3.0, "beta": 0.02, "local_steps": 3, "anneal": ROUNDS})


def config(key: str, seeds: int, quick: bool, algorithm: Mapping[str, Any], **more: Any) -> Config:
    """A config with the settings that all runs of the study share."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    measured = {"trajectories": DAYS, "episodes": 20 if quick else 200, "repeats": 1 if quick else 4, "rollouts": 1}
    settings = {
        "name": f"{NAME}-{key.replace(' ', '-')}",
        "seeds": seeds,
        "rounds": rounds,
        "evaluate_every": rounds,  # histories and optimizers' states of ten seeds are large
        "extensible": False,
        "start": "per-seed",
        "fleet": {"env": "homes", **FLEET},
        "policy": {"name": "mlp", "hidden": [32]},
        "advantage": {"name": "gae", "gae_lambda": 0.95},
        "algorithm": dict(algorithm),
        "evaluation": {"name": "monte-carlo", "few_shot": BUDGETS, **measured},
    }
    return parse_config({**settings, **more})


def configs(seeds: int, quick: bool) -> dict[str, Config]:
    """An initialization for one step, one shared policy, one that sees tariff and battery, and no training at all.

    The first has an entropy bonus, since a policy that no longer explores learns nothing from its own days. Without it
    the shared policy saves more.
    """
    promp = {"name": "promp", **CLIPPED, "m_in": 20, "m_out": 20, "learn_alpha": "per-parameter"}
    fedppo = {"name": "fedppo", **CLIPPED, "m": 40}
    sighted = {"name": "mlp", "hidden": [32], "sees": list(SEEN)}
    alone = {"name": "from-scratch", "alpha": 10.0, "steps": 4}
    return {
        PERSONAL: config(PERSONAL, seeds, quick, promp, entropy=0.003),
        SHARED: config(SHARED, seeds, quick, fedppo),
        TOLD: config(TOLD, seeds, quick, fedppo, policy=sighted),
        SCRATCH: config(SCRATCH, seeds, quick, alone, rounds=1, evaluate_every=1),
    }


def measurements(_seeds: int) -> list[Measurement]:
    """What rules and perfect foresight save in the same homes."""
    return [Measurement(RULES, rule_savings, {"fleet": dict(FLEET)})]


def savings(evidence: Mapping[Any, Any], key: str, days: int) -> Float[np.ndarray, "seed agent"]:
    """Dollars per day that unseen homes save after one step from so many of their own days; 0 is without a step."""
    deployed = evidence[key].deployed
    (at,) = np.flatnonzero(deployed.budgets == days)
    return deployed.outcomes["savings"][:, at]


def claims(evidence: Mapping[Any, Any]) -> list[Claim]:
    """What unseen homes save with each controller, then how the personalized one compares."""
    return [*table(evidence), *comparisons(evidence)]


def table(evidence: Mapping[Any, Any]) -> list[Claim]:
    """Mean savings over unseen homes by controller, in dollars per day; nothing is asked of these numbers."""
    rules = evidence[RULES]

    def row(what: str, measured: Interval) -> Claim:
        return single(NAME, f"dollars per day: {what}", np.nan, measured, -np.inf, np.inf)

    def of(key: str, days: int) -> Interval:
        return mean_interval(savings(evidence, key, days).mean(axis=-1))

    return [
        row("self-use at all hours", point(rules["self_use"].mean())),
        row("a rule that is told the tariff", point(rules["tariff_rule"].mean())),
        row("shared policy", of(SHARED, 0)),
        row(f"shared policy, one step from {DAYS} days", of(SHARED, DAYS)),
        row(f"from scratch, {DAYS} days", of(SCRATCH, DAYS)),
        row("initialization without a step", of(PERSONAL, 0)),
        *(row(f"initialization, one step from {days} days", of(PERSONAL, days)) for days in BUDGETS[1:]),
        row("shared policy that sees tariff and battery", of(TOLD, 0)),
        row("perfect foresight, by linear programming", point(rules["foresight"].mean())),
    ]


def comparisons(evidence: Mapping[Any, Any]) -> list[Claim]:
    """One step from 20 days beside rules and the shared policy: the mean, the share of the way, the worst home."""
    rules, own = evidence[RULES], savings(evidence, PERSONAL, DAYS)
    after, shared = mean_interval(own.mean(axis=-1)), mean_interval(savings(evidence, SHARED, 0).mean(axis=-1))
    told = mean_interval(savings(evidence, TOLD, 0).mean(axis=-1))
    bounds = {
        "of the shared policy without a step": shared.high,
        "of the policy that sees tariff and battery": told.high,
        "of self-use at all hours": float(rules["self_use"].mean()),
        "of the rule that is told the tariff": float(rules["tariff_rule"].mean()),
    }
    what = f"savings after one step from {DAYS} days, above those"
    above = [Claim(NAME, f"{what} {whose}", x, *after, met=bool(after.low > x)) for whose, x in bounds.items()]
    best = float(rules["foresight"].mean())
    way = mean_interval((own.mean(axis=-1) - shared.mean) / (best - shared.mean))
    worst = mean_interval((own - rules["self_use"]).min(axis=-1))
    return [
        *above,
        single(NAME, "share of the way from the shared policy to perfect foresight (>= 0.5)", 0.5, way, 0.5, np.inf),
        single(NAME, "savings less those of self-use, in the home with the least (>= 0)", 0.0, worst, 0.0, np.inf),
    ]
