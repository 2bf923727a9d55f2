"""Measurements and claims: the cost of client sampling, and the share that control variates recover.

The names and settings of the measured functions are part of the names of the committed measurement files.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.studies.claims import Claim, single
from perfedrl.studies.client_sampling.training import MODES, as_published, sampling
from perfedrl.studies.measurement_cache import Arrays, Measurement

Evidence = Mapping[str, Arrays]
"""The measured arrays by measurement."""
SEEDS = 20
REST, LONG = "at rest", "trained for long"
NO_NOISE = "without noise"
BATCHES = (10, 30, 100, 300)
RESTED, ROUNDS, LONG_ROUNDS = 3000, 80, 800
"""Noiseless rounds before a run at rest, rounds after them, and rounds of a long run."""
LAST = 5
"""The number of last evaluations whose mean is taken."""
TARGET = 0.9
"""The share of the gap that control variates are asked to recover."""


def variants() -> dict[str, dict[str, Any]]:
    """Settings of `sampling` by name: trajectories per batch (None without noise), noiseless rounds before, rounds."""
    long = {f"{LONG}, batches of {m}": (m, 0, LONG_ROUNDS) for m in BATCHES[:2]}
    resting = {f"{REST}, batches of {m}": (m, RESTED, ROUNDS) for m in BATCHES}
    found = {**long, **resting, f"{REST}, {NO_NOISE}": (None, RESTED, ROUNDS)}
    return {name: {"m": m, "rested": rest, "rounds": rounds} for name, (m, rest, rounds) in found.items()}


def ends(arrays: Arrays) -> dict[str, np.ndarray]:
    """The return after adaptation at the end, by method and seed."""
    after = {name.removesuffix(".after"): x for name, x in arrays.items() if name.endswith(".after")}
    return {name: x[:, -LAST:].astype(np.float64).mean(axis=1) for name, x in after.items()}


def lead(arrays: Arrays, rounds: int) -> np.ndarray:
    """The lead of full participation over a quarter of the agents after `rounds` rounds, by seed."""
    at = int(np.flatnonzero(arrays["full.rounds"] == rounds)[0])
    return (arrays["full.after"] - arrays["plain.after"])[:, at].astype(np.float64)


def recovered(arrays: Arrays, mode: str) -> Interval:
    """The share of the gap between plain sampling and full participation that a control variate recovers."""
    level = ends(arrays)
    return ratio_interval(level[mode] - level["plain"], level["full"] - level["plain"])


def ratio_interval(x: Float[np.ndarray, " seed"], y: Float[np.ndarray, " seed"], confidence: float = 0.95) -> Interval:
    """mean(x) / mean(y) with Fieller's interval: the ratios r for which x - r y may have mean zero."""
    n, ratio = len(x), float(x.mean() / y.mean())
    if n < 2:
        return Interval(ratio, -np.inf, np.inf)
    (xx, xy), (_, yy) = np.cov(x, y) * stdtrit(n - 1, (1 + confidence) / 2) ** 2 / n
    a, b, c = y.mean() ** 2 - yy, x.mean() * y.mean() - xy, x.mean() ** 2 - xx
    if a <= 0:  # the gap itself may be zero
        return Interval(ratio, -np.inf, np.inf)
    root = np.sqrt(max(0.0, b**2 - a * c))
    return Interval(ratio, float((b - root) / a), float((b + root) / a))


def sampling_claims(evidence: Evidence) -> list[Claim]:
    """The gap and the recovered share in each variant; early in training, with more rounds, a quarter may lead."""
    claims = []
    for variant, arrays in evidence.items():
        if variant.startswith(LONG):
            early = mean_interval(lead(arrays, ROUNDS))
            said = f"F that a quarter costs {variant}, after {ROUNDS} rounds of all agents (> 0)"
            claims.append(single("client-sampling", said, np.nan, early, 1e-9, np.inf))
        level = ends(arrays)
        gap = mean_interval(level["full"] - level["plain"])
        claims.append(single("client-sampling", f"F that a quarter costs {variant} (> 0)", np.nan, gap, 1e-9, np.inf))
        if gap.mean > 0:
            claims += [recovered_claim(arrays, mode, variant) for mode in MODES]
            claims += [recovered_claim(arrays, as_published(mode), variant, ", as published") for mode in MODES]
    return claims


def recovered_claim(arrays: Arrays, name: str, variant: str, how: str = "") -> Claim:
    """The claim that a control variate recovers TARGET of the gap."""
    said = f"share given back by control variates of {name.partition('-')[0]}s{how}, {variant}"
    return single("client-sampling", said, TARGET, recovered(arrays, name), TARGET, np.inf)


def measurements(seeds: int) -> list[Measurement]:
    """Every variant for a number of seeds."""
    common = {"beta": 0.3, "local_steps": 5, "share": 0.25, "memory": 0.1, "stops": 20, "seeds": list(range(seeds))}
    return [Measurement(variant, sampling, {**common, **how}) for variant, how in variants().items()]
