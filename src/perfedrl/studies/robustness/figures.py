"""The figure of the robustness study: honest agents' returns by attack and aggregation."""

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, Level, Plot, Strip, Strips
from perfedrl.studies.base import Runs
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
