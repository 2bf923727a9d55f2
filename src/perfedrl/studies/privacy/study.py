"""Configs and claims: the return that clipped and noised uploads cost.

The clipping length and the noise levels were chosen on seeds that are not used here.
"""

import numpy as np

from perfedrl.experiments.config import Config
from perfedrl.experiments.stats import mean_interval
from perfedrl.privacy import loss
from perfedrl.studies.base import Runs, final
from perfedrl.studies.claims import Claim, everywhere, single
from perfedrl.studies.robustness.study import WITHIN, recipe

CLIP, DELTA = 0.25, 1e-5
NOISES = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Standard deviations of the noise on each coordinate, in units of the clipping length."""

TOLERATED = 0.3
"""The noise level that is claimed to cost little."""
NO_PRIVACY, CLIPPED = "no privacy", "clipped"


def privacy_configs(seeds: int, quick: bool) -> dict[str | float, Config]:
    """Training without privacy, with clipping alone, and at each noise level."""
    epsilon(NOISES[0], 1)  # fails before anything is trained where the accountant is missing
    configs: dict[str | float, Config] = {NO_PRIVACY: recipe("not-private", seeds, {})}
    for noise in (0.0, TOLERATED) if quick else (0.0, *NOISES):
        table = {"clip": CLIP, "noise": noise, "delta": DELTA}
        configs[noise or CLIPPED] = recipe(f"private-{noise:g}", seeds, {}, privacy=table)
    return configs


def epsilon(noise: float, rounds: int) -> float:
    """The privacy loss of an agent in a run of `rounds` rounds, to four digits."""
    return float(f"{loss(noise, rounds, DELTA):.4g}")


def private(runs: Runs) -> list[Claim]:
    """The share of the return that is left with clipping and noise; strong privacy leaves almost none."""
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
