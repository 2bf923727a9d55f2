"""Measurements and claims: noiseless Fast-FedPG comes to rest at a stationary point of f, FedAvg-PG does not.

The names and settings of the measured functions are part of the names of the committed measurement files.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from perfedrl.algorithms import FastFedPG, FedAvgPG
from perfedrl.studies.claims import Claim, everywhere, point, single
from perfedrl.studies.measurement_cache import Arrays, Measurement
from perfedrl.theory.noiseless_limits import CONVERGED, noiseless_limit
from perfedrl.theory.witness import attracting_witness

Evidence = Mapping[str, Arrays]
"""The measured arrays by measurement."""
RESTS = "rests"
DEEPEST = 1e-12
ALPHA, BETA = 0.5, 0.1
LOCAL_STEPS = (1, 2, 5, 10, 20, 50, 100)
SHOWN = 20
"""The number of local steps at which drift is claimed."""


class Rests(NamedTuple):
    """Limits of noiseless rounds by local steps: |grad f|, f, and the distance moved in the last two rounds.

    The names of the fields are those of the arrays in the measurement files.
    """

    gradient: np.ndarray
    value: np.ndarray
    moved: np.ndarray


def rests(local_steps: Sequence[int], alpha: float, beta: float) -> dict[str, Rests]:
    """The limits of FedAvg-PG and Fast-FedPG on two bandits with opposed rewards."""
    fleet, policy = attracting_witness()
    found = {}
    for name, kind in (("fedavg-pg", FedAvgPG), ("fast-fedpg", FastFedPG)):
        made = [noiseless_limit(fleet, policy, kind(alpha, beta, local_steps=tau)) for tau in local_steps]
        found[name] = Rests(*(np.asarray([getattr(r, what) for r in made]) for what in ("bias", "value", "moved")))
    return found


def converged(arrays: Arrays, name: str) -> np.ndarray:
    """Whether a method converged, by local steps, rather than oscillating."""
    return arrays[f"{name}.moved"] <= CONVERGED


def drift_claims(evidence: Evidence) -> list[Claim]:
    """The gradient vanishes where Fast-FedPG rests; where FedAvg-PG rests it grows with the local steps."""
    found = evidence[RESTS]
    plain, fast = found["fedavg-pg.gradient"], found["fast-fedpg.gradient"]
    at, resting = LOCAL_STEPS.index(SHOWN), converged(found, "fast-fedpg")
    lost = found["fast-fedpg.value"][at] - found["fedavg-pg.value"][at]

    def one(what: str, paper: float, value: float, low: float, high: float) -> Claim:
        return single("fast-fedpg", what, paper, point(value), low, high)

    many = resting & (np.asarray(LOCAL_STEPS) > 1)
    several = f"local steps from 2 to {max(np.asarray(LOCAL_STEPS)[many])}"
    return [
        one(f"length of grad f at rest, FedAvg-PG, {SHOWN} local steps (>= 0.01)", np.nan, plain[at], 0.01, np.inf),
        one(f"length of grad f at rest, Fast-FedPG, {SHOWN} local steps (<= {DEEPEST:g})", 0.0, fast[at], 0.0, DEEPEST),
        one(f"return that FedAvg-PG's rest lacks, {SHOWN} local steps (> 0)", np.nan, lost, 1e-9, np.inf),
        everywhere(
            "fast-fedpg",
            f"{several} at which FedAvg-PG rests off the optimum (grad f longer than 1e-3)",
            plain[many] > 1e-3,
        ),
        everywhere("fast-fedpg", f"{several} at which Fast-FedPG rests on it (shorter than 1e-11)", fast[many] < 1e-11),
        everywhere("fast-fedpg", "more local steps that make FedAvg-PG's rest worse", np.diff(plain) > 0),
    ]


def measurements(_seeds: int) -> list[Measurement]:
    """The limits by local steps, which have no seeds."""
    return [Measurement(RESTS, rests, {"local_steps": list(LOCAL_STEPS), "alpha": ALPHA, "beta": BETA})]
