"""Measurements and claims: what each aggregation keeps of the honest agents' return against colluding agents.

The names and settings of the measured function are part of the names of the committed measurement files.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float

from perfedrl.experiments.config import Config
from perfedrl.experiments.stats import mean_interval
from perfedrl.simulation.simulator import Simulation
from perfedrl.studies.claims import Claim, single
from perfedrl.studies.measurement_cache import Arrays, Measurement
from perfedrl.studies.paper_tabular.study import tabular
from perfedrl.studies.robustness.study import AGENTS, AGGREGATIONS, MEAN, recipe

MOST_HOSTILE = 3
HONEST_IN_ALL = AGENTS - MOST_HOSTILE
FLEETS = ARC, GRID = "arc", "gridworld"
GOALS = [[0, 0], [0, 4], [4, 0], [4, 4], [0, 2], [2, 0], [2, 4], [4, 2], [1, 1], [3, 3]]
"""The goals of the paper's gridworld, on all sides, and two within; attackers are among the last three."""
THREE: Mapping[str, dict] = {
    "trimmed mean": {"name": "trimmed-mean", "share": MOST_HOSTILE / AGENTS},
    "multi-Krum": {"name": "krum", "malicious": MOST_HOSTILE, "keep": AGENTS - MOST_HOSTILE - 2},
}
RULES: Mapping[str, dict | None] = MappingProxyType(
    {rule: THREE.get(rule, AGGREGATIONS[rule]) for rule in AGGREGATIONS}
)
"""The aggregations, with settings for three hostile agents, in the order of the measured arrays."""
DEFAULT = "geometric median"
CLEAN, OPPOSITE, A_LITTLE = "clean", "opposite", "a-little"
ATTACKS: Mapping[str, str] = MappingProxyType({OPPOSITE: "opposite, 10 times as long", A_LITTLE: "a little is enough"})
WITHIN, RUINED = 0.9, 0.5
"""The share of a return from which on it counts as kept, and below which as ruined."""
GRAIN = np.float32(2**-13)
"""Returns are rounded to multiples of this, which compress well."""

Evidence = Mapping[str, Arrays]
"""The measured arrays by measurement."""


def config_of(fleet: str, rule: str, attack: str, hostile: int) -> Config:
    """Ten agents on the arc by the recommended recipe, or on the gridworld by the paper's exact variant."""
    settings: dict[str, Any] = {"aggregation": RULES[rule]}
    if attack != CLEAN:
        settings["attack"] = {"name": attack, "agents": hostile}
    if fleet == ARC:
        return recipe("collusion", 1, {"goals": AGENTS}, **settings)
    return tabular("exact", 2.0, 1, fleet={"env": "gridworld", "goals": GOALS}, **settings)


def colluding(fleet: str, attack: str, hostile: int, seeds: Sequence[int]) -> dict[str, Float[np.ndarray, "rule seed"]]:
    """The final return after adaptation of the agents that are honest in all runs, by aggregation and seed."""
    after = []
    for rule in RULES:
        config = config_of(fleet, rule, attack, hostile)
        simulation = Simulation(config.experiment, list(seeds))
        state = simulation.advance(simulation.start(), 0, config.rounds)
        history = simulation.measure(state, config.rounds)
        after.append(history.after[:, -1, :HONEST_IN_ALL].mean(axis=-1))
    return {"after": np.round(np.asarray(after, np.float32) / GRAIN) * GRAIN}


def measurement(fleet: str, attack: str, hostile: int) -> str:
    """The name of a measurement."""
    return f"{fleet}, {attack}, {hostile}"


def measurements(seeds: int) -> list[Measurement]:
    """Both fleets without an attack, and with one to three agents in each."""
    common = {"seeds": list(range(seeds))}
    cases = [(CLEAN, 0), *((attack, hostile) for attack in ATTACKS for hostile in range(1, MOST_HOSTILE + 1))]
    return [
        Measurement(
            measurement(fleet, attack, n), colluding, {"fleet": fleet, "attack": attack, "hostile": n, **common}
        )
        for fleet in FLEETS
        for attack, n in cases
    ]


def returns(evidence: Evidence, fleet: str, attack: str, hostile: int) -> dict[str, Float[np.ndarray, " seed"]]:
    """The honest agents' return of each seed by aggregation."""
    name = measurement(fleet, attack, hostile) if hostile else measurement(fleet, CLEAN, 0)
    return dict(zip(RULES, evidence[name]["after"].astype(np.float64), strict=True))


def collusion_claims(evidence: Evidence) -> list[Claim]:
    """What the default costs without an attack, what it keeps under attack, and what one agent leaves of the mean."""
    claims = []
    for fleet in FLEETS:
        clean = returns(evidence, fleet, CLEAN, 0)
        said = f"return by the {DEFAULT} over the mean's, no attack, {fleet} (>= {WITHIN})"
        claims.append(_share(said, clean[DEFAULT], clean[MEAN], WITHIN, np.inf))
        alone = returns(evidence, fleet, OPPOSITE, 1)[MEAN]
        said = f"return by the mean over the clean run's, {ATTACKS[OPPOSITE]}, 1 of {AGENTS}, {fleet} (< {RUINED})"
        claims.append(_share(said, alone, clean[MEAN], -np.inf, np.nextafter(RUINED, 0)))
        for attack, label in ATTACKS.items():
            for n in range(1, MOST_HOSTILE + 1):
                found = returns(evidence, fleet, attack, n)[DEFAULT]
                said = f"return by the {DEFAULT} over its clean run's, {label}, {n} of {AGENTS}, {fleet} (>= {WITHIN})"
                claims.append(_share(said, found, clean[DEFAULT], WITHIN, np.inf))
    return claims


def _share(said: str, values: np.ndarray, reference: np.ndarray, low: float, high: float) -> Claim:
    """A claim about returns of seeds as shares of the mean of others."""
    return single("collusion", said, np.nan, mean_interval(values / reference.mean()), low, high)
