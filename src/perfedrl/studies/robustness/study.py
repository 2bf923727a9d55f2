"""Configs and claims: robust aggregation with two hostile agents of ten.

The strengths of the attacks were chosen on seeds that are not used here.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from perfedrl.experiments.config import Config
from perfedrl.experiments.stats import mean_interval
from perfedrl.experiments.store import Run
from perfedrl.studies.base import Runs
from perfedrl.studies.claims import Claim, single
from perfedrl.studies.curvature.study import LOW_VARIANCE
from perfedrl.studies.few_shot.study import ENTROPY, RECIPE
from perfedrl.studies.paper_neural.study import arc

AGENTS, HOSTILE = 10, 2
HONEST = AGENTS - HOSTILE
SPAN = 0.5

MEAN, CLEAN, ALONE, USUAL = "mean", "clean", "alone", "sign-flip 2.5"
AGGREGATIONS: Mapping[str, dict | None] = MappingProxyType(
    {
        MEAN: None,
        "median": {"name": "median"},
        "trimmed mean": {"name": "trimmed-mean", "share": 0.2},
        "geometric median": {"name": "geometric-median"},
        "multi-Krum": {"name": "krum", "malicious": HOSTILE, "keep": AGENTS - HOSTILE - 2},
    }
)
ATTACKS: Mapping[str, dict] = MappingProxyType(
    {
        "sign-flip": {"name": "sign-flip", "scale": HONEST / HOSTILE},
        "scaled": {"name": "scaled", "factor": 100.0},
        "random": {"name": "random", "factor": 100.0},
    }
)
"""Attacks by two of ten agents. The flipped displacements are scaled to cancel those of the other eight in the mean."""

WITHIN = 0.9
"""The share of the clean run's return from which on a run counts as unharmed."""


def recipe(name: str, seeds: int, fleet: dict, **settings) -> Config:
    """The recommended recipe on an arc without held-out agents, evaluated on training agents only."""
    algorithm = {"name": "per-fedavg-pg", "m_in": 10, "m_out": 10, **RECIPE}
    measured = {"entropy": ENTROPY, "evaluate_every": 50, "evaluation": {"name": "monte-carlo"}}
    return arc(
        name, seeds, algorithm, **LOW_VARIANCE, **measured, fleet={"env": "arc", "held_out": 0, **fleet}, **settings
    )


def robustness_configs(seeds: int, quick: bool) -> dict[tuple[str, str], Config]:
    """Each aggregation without and with each attack; the honest agents alone; a milder attack on the mean."""

    def run(under: str, rule: str, fleet: dict, **settings) -> Config:
        name = f"{under}-{rule}".replace(" ", "-").lower()
        return recipe(name, seeds, fleet, aggregation=AGGREGATIONS[rule], **settings)

    rules = (MEAN, "geometric median") if quick else AGGREGATIONS
    attacks = ("sign-flip",) if quick else ATTACKS
    ten = {"goals": AGENTS}
    configs = {(CLEAN, rule): run(CLEAN, rule, ten) for rule in rules}
    for attack in attacks:
        for rule in rules:
            configs[attack, rule] = run(attack, rule, ten, attack={**ATTACKS[attack], "agents": HOSTILE})
    if not quick:
        eight = {"goals": [float(x) for x in np.linspace(-SPAN, SPAN, AGENTS)[:HONEST].round(6)]}
        configs[ALONE, MEAN] = run(ALONE, MEAN, eight)
        configs[USUAL, MEAN] = run(USUAL, MEAN, ten, attack={"name": "sign-flip", "agents": HOSTILE})
    return configs


def honest(run: Run) -> np.ndarray:
    """The final return after adaptation of the agents that are honest in all runs, one value per seed."""
    return run.history.after[:, -1, :HONEST].mean(axis=-1)


def robustness(runs: Runs) -> list[Claim]:
    """The honest agents' return under attack, as a share of their return in the clean run."""
    clean, claims = honest(runs[CLEAN, MEAN]).mean(), []
    for (attack, rule), run in runs.items():
        if attack not in ATTACKS:
            continue
        bound, low, high = (
            (f"< {WITHIN}", -np.inf, np.nextafter(WITHIN, 0)) if rule == MEAN else (f">= {WITHIN}", WITHIN, np.inf)
        )
        share = mean_interval(honest(run) / clean)
        what = f"return over the clean run's ({bound}), {attack}, {rule}"
        claims.append(single("robustness", what, np.nan, share, low, high))
    return claims
