"""Whom to trust, beyond the paper: hostile agents against robust aggregation, and what privacy costs.

Strengths of attacks, the clipping length and the noise levels were chosen on seeds that are not among those here.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from perfedrl.experiments.config import Config
from perfedrl.experiments.stats import mean_interval
from perfedrl.experiments.store import Run
from perfedrl.privacy import loss
from perfedrl.studies.base import Claim, Experiment, Runs, everywhere, final, single
from perfedrl.studies.curvature.study import ENTROPY, QUIET, RECIPE
from perfedrl.studies.paper_neural.study import arc

AGENTS, HOSTILE = 10, 2
HONEST = AGENTS - HOSTILE
SPAN = 0.5

MEAN, CLEAN, ALONE, USUAL = "mean", "clean", "alone", "sign-flip 2.5"
AGGREGATIONS: Mapping[str, dict] = MappingProxyType(
    {
        MEAN: {"name": "mean"},
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
"""By two of ten. The flipped displacement is as long as it takes to cancel those of the other eight in the mean."""

WITHIN = 0.9
"""A run withstands an attack where it reaches this share of the clean run's return."""

CLIP, DELTA = 0.25, 1e-5
NOISES = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Of the displacement, in units of the clipping length, on every coordinate."""

TOLERATED = 0.3
NO_PRIVACY, CLIPPED = "no privacy", "clipped"


def recipe(name: str, seeds: int, fleet: dict, **settings) -> Config:
    """The recommended recipe on an arc without held-out agents, measured on training agents only."""
    algorithm = {"name": "per-fedavg-pg", "m_in": 10, "m_out": 10, **RECIPE}
    measured = {"entropy": ENTROPY, "evaluate_every": 50, "evaluation": {"name": "monte-carlo"}}
    return arc(name, seeds, algorithm, **QUIET, **measured, fleet={"env": "arc", "held_out": 0, **fleet}, **settings)


def robustness_configs(seeds: int, quick: bool) -> dict[tuple[str, str], Config]:
    """Every aggregation without an attack and under each; the honest agents alone; a milder attack on the mean."""

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
    """The final return after adaptation of those that are honest in every run, one value per seed."""
    return run.history.after[:, -1, :HONEST].mean(axis=-1)


def robustness(runs: Runs) -> list[Claim]:
    """What the honest agents get under attack, as a share of what they get in the clean run."""
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


def privacy_configs(seeds: int, quick: bool) -> dict[str | float, Config]:
    """Without privacy, with clipping alone, and by noise."""
    epsilon(NOISES[0], 1)  # where the accountant is missing, this says so before anything is trained
    configs: dict[str | float, Config] = {NO_PRIVACY: recipe("not-private", seeds, {})}
    for noise in (0.0, TOLERATED) if quick else (0.0, *NOISES):
        table = {"clip": CLIP, "noise": noise, "delta": DELTA}
        configs[noise or CLIPPED] = recipe(f"private-{noise:g}", seeds, {}, privacy=table)
    return configs


def epsilon(noise: float, rounds: int) -> float:
    """What a run of so many rounds reveals of an agent at most, to four digits."""
    return float(f"{loss(noise, rounds, DELTA):.4g}")


def private(runs: Runs) -> list[Claim]:
    """What privacy leaves of the return; and that what would be called private leaves nothing."""
    plain, claims = final(runs[NO_PRIVACY]).mean(), []
    for key, what in ((CLIPPED, "clipping alone"), (TOLERATED, f"noise {TOLERATED:g}")):
        share = mean_interval(final(runs[key]) / plain)
        claims.append(
            single("privacy", f"return over that without privacy (>= {WITHIN}), {what}", np.nan, share, WITHIN, np.inf)
        )
    noises = [x for x in NOISES if x in runs and x >= TOLERATED]
    if len(noises) > 1:
        means = np.asarray([final(runs[x]).mean() for x in noises])
        last = runs[noises[-1]]
        strict = f"return (<= 0.5) at epsilon = {epsilon(noises[-1], last.config.rounds):g}, noise {noises[-1]:g}"
        claims.append(everywhere("privacy", "steps of noise from 0.3 on that cost return", np.diff(means) < 0))
        claims.append(single("privacy", strict, np.nan, mean_interval(final(last)), -np.inf, 0.5))
    return claims


ROBUSTNESS = Experiment("robustness", "Hostile agents and robust aggregation", robustness_configs, robustness)
PRIVACY = Experiment("privacy", "What privacy costs", privacy_configs, private)
