"""Figures of hostile agents: honest agents' returns by attack and aggregation, and by the number that collude."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, SKY, Axis, Level, Lines, Plot, Series, Strip, Strips
from perfedrl.studies.base import Runs
from perfedrl.studies.robustness import collusion
from perfedrl.studies.robustness.study import AGGREGATIONS, ALONE, CLEAN, MEAN, USUAL, WITHIN, honest

TITLES = {
    CLEAN: "no attack",
    ALONE: "the eight alone",
    USUAL: "sign flipped × 2.5",
    "sign-flip": "sign flipped × 4",
    "scaled": "scaled × 100",
    "random": "random × 100",
}


def robustness(runs: Runs) -> list[Plot]:
    """The honest agents' return of each seed by attack and aggregation."""
    strips = tuple(
        Strip(f"{TITLES[attack]}: {rule}", honest(runs[attack, rule]), color(attack, rule))
        for attack in TITLES
        for rule in AGGREGATIONS
        if (attack, rule) in runs
    )
    clean = float(honest(runs[CLEAN, MEAN]).mean())
    levels = (Level("mean, no attack", clean, GREEN), Level("90 % of it", WITHIN * clean, GREY))
    seeds = tuple(runs[CLEAN, MEAN].config.seeds)
    title = "Two hostile agents of ten"
    return [
        Strips("robustness", title, "return of the eight honest agents after adaptation", strips, seeds, levels),
    ]


def color(attack: str, rule: str) -> str:
    """Grey without hostile agents, orange for the plain mean under attack, blue for robust aggregation."""
    if attack in (CLEAN, ALONE):
        return GREY
    return ORANGE if rule == MEAN else BLUE


RULE_COLORS = dict(zip(collusion.RULES, (ORANGE, SKY, PINK, BLUE, GREEN), strict=True))


def colluding(evidence: collusion.Evidence) -> list[Plot]:
    """The honest agents' return by the number of colluding agents, for each fleet and attack."""
    return [by_number(evidence, fleet, attack) for fleet in collusion.FLEETS for attack in collusion.ATTACKS]


def by_number(evidence: collusion.Evidence, fleet: str, attack: str) -> Lines:
    """One line per aggregation."""
    numbers = range(collusion.MOST_HOSTILE + 1)
    found = [collusion.returns(evidence, fleet, attack, n) for n in numbers]
    series = tuple(
        Series(rule, np.asarray(numbers, float), np.stack([x[rule] for x in found], axis=1), color)
        for rule, color in RULE_COLORS.items()
    )
    return Lines(
        f"collusion-{fleet}-{attack}",
        f"{collusion.ATTACKS[attack]}, {fleet}",
        Axis(f"hostile agents of {collusion.AGENTS}", ticks=tuple(map(float, numbers))),
        "return of the honest agents",
        series,
        tuple(range(len(found[0][collusion.MEAN]))),
    )
