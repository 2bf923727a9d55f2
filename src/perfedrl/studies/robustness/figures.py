"""The figures about trust: hostile agents against robust aggregation, and return against privacy."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, Axis, Level, Lines, Plot, Series, Strip, Strips
from perfedrl.studies import Runs
from perfedrl.studies.base import final
from perfedrl.studies.robustness import study as robustness_study

TITLES = {
    robustness_study.CLEAN: "no attack",
    robustness_study.ALONE: "the eight alone",
    robustness_study.USUAL: "sign flipped × 2.5",
    "sign-flip": "sign flipped × 4",
    "scaled": "scaled × 100",
    "random": "random × 100",
}


def robustness(runs: Runs) -> list[Plot]:
    """The honest agents' return of every seed, by attack and aggregation."""
    strips = tuple(
        Strip(f"{TITLES[attack]}: {rule}", robustness_study.honest(runs[attack, rule]), color(attack, rule))
        for attack in TITLES
        for rule in robustness_study.AGGREGATIONS
        if (attack, rule) in runs
    )
    clean = float(robustness_study.honest(runs[robustness_study.CLEAN, robustness_study.MEAN]).mean())
    levels = (Level("mean, no attack", clean, GREEN), Level("90 % of it", robustness_study.WITHIN * clean, GREY))
    seeds = tuple(runs[robustness_study.CLEAN, robustness_study.MEAN].config.seeds)
    title = "Two hostile agents of ten"
    return [
        Strips("robustness", title, "return of the eight honest agents after adaptation", strips, seeds, levels),
    ]


def color(attack: str, rule: str) -> str:
    if attack in (robustness_study.CLEAN, robustness_study.ALONE):
        return GREY
    return ORANGE if rule == robustness_study.MEAN else BLUE


def private(runs: Runs) -> list[Plot]:
    """Return after training by what the run reveals of an agent at most."""
    plain = runs[robustness_study.NO_PRIVACY]
    noises = [x for x in robustness_study.NOISES if x in runs]
    at = np.asarray([robustness_study.epsilon(x, plain.config.rounds) for x in noises])
    values = np.stack([final(runs[x]) for x in noises], axis=1)
    label = f"clipped to {robustness_study.CLIP:g}, noise " + ", ".join(f"{x:g}" for x in reversed(noises))
    series = Series(label, at[::-1], values[:, ::-1], BLUE)
    levels = (
        Level("no privacy", float(final(plain).mean()), GREEN),
        Level("clipped, no noise", float(final(runs[robustness_study.CLIPPED]).mean()), ORANGE),
        Level("untrained", float(plain.history.after[:, 0].mean()), GREY),
    )
    axis = Axis("privacy loss ε of a whole run, at δ = 1e-5", "log", ticks=(10.0, 100.0, 1e3, 1e4))
    seeds = tuple(plain.config.seeds)
    return [Lines("privacy", "What privacy costs", axis, "return after adaptation", (series,), seeds, levels)]
