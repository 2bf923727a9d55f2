"""Figures of the glucose study: time in range by days, every patient's outcomes, and days before and after the step."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from perfedrl.envs.glucose.task import MORNING
from perfedrl.report.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    Axis,
    DotPanel,
    Dots,
    Level,
    Lines,
    Marks,
    Plot,
    Series,
    exact_series,
)
from perfedrl.studies.glucose.daily_profile import PERCENTILES
from perfedrl.studies.glucose.study import (
    BUDGETS,
    CEILING,
    DAYS,
    PERSONALIZED,
    PROFILE,
    RULES,
    SCRATCH,
    SHARED,
    UNSEEN,
    by_patient,
)


def glucose(evidence: Mapping[Any, Any]) -> list[Plot]:
    """Time in range by days, outcomes of every patient, and the days of the worst patient and of one who gains."""
    inside = by_patient(evidence, PERSONALIZED, DAYS, "in_range").mean(axis=0)
    gain = inside - by_patient(evidence, PERSONALIZED, 0, "in_range").mean(axis=0)
    shown = {"glucose-days-worst": int(np.argmin(inside)), "glucose-days-gain": int(np.argmax(gain))}
    return [by_days(evidence), patients(evidence), *(days(evidence, *which) for which in shown.items())]


def by_days(evidence: Mapping[Any, Any]) -> Lines:
    """Time in range of unseen patients over the days that they personalize from: the mean patient and the worst."""
    run = evidence[PERSONALIZED]

    def series(key: str, label: str, color: str, worst: bool = False) -> Series:
        found = evidence[key].deployed.outcomes["in_range"]
        return Series(
            label, np.asarray(BUDGETS), found.min(axis=-1) if worst else found.mean(axis=-1), color, dashed=worst
        )

    lines = (
        series(PERSONALIZED, "personalized (promp)", BLUE),
        series(PERSONALIZED, "personalized, worst patient", BLUE, worst=True),
        series(SHARED, "one policy (fedppo), fine-tuned", ORANGE),
        series(SHARED, "one policy, fine-tuned, worst patient", ORANGE, worst=True),
        series(SCRATCH, "from scratch", PINK),
    )
    ceiling = by_patient(evidence, CEILING, 0, "in_range").mean()
    levels = (
        Level("sees the clinical numbers", float(ceiling), GREEN),
        Level("basal-bolus rule", float(evidence[RULES]["basal_bolus.in_range"].mean()), GREY),
        Level("PID controller", float(evidence[RULES]["pid.in_range"].mean()), SKY),
    )
    return Lines(
        "glucose-by-days",
        "Unseen patients",
        Axis("the patient's own days", ticks=BUDGETS),
        "time in 70 to 180 mg/dL",
        lines,
        tuple(run.config.seeds),
        levels,
        percent=True,
    )


def patients(evidence: Mapping[Any, Any]) -> Dots:
    """Time in range and below 70 mg/dL of every unseen patient by name."""

    def panel(outcome: str, label: str) -> DotPanel:
        methods = {
            "before the step": (by_patient(evidence, PERSONALIZED, 0, outcome).mean(axis=0), PINK),
            f"after {DAYS} days": (by_patient(evidence, PERSONALIZED, DAYS, outcome).mean(axis=0), BLUE),
            "basal-bolus rule": (evidence[RULES][f"basal_bolus.{outcome}"], GREY),
        }
        none = np.zeros(len(UNSEEN), bool)
        marks = tuple(Marks(name, 100 * np.asarray(x), color, none) for name, (x, color) in methods.items())
        return DotPanel(label, marks, scale="linear")

    panels = panel("in_range", "% of time in 70 to 180 mg/dL"), panel("below_70", "% of time below 70 mg/dL")
    return Dots("glucose-patients", "Unseen patients by name", UNSEEN, panels)


def days(evidence: Mapping[Any, Any], name: str, patient: int) -> Lines:
    """Percentiles of a patient's readings over the day, before the step and after it, with the bounds of the range."""
    profile = evidence[PROFILE]["readings"][:, patient]
    hours = MORNING / 60 + 24 / profile.shape[-1] * np.arange(profile.shape[-1])
    median, low, high = PERCENTILES.index(50), 0, len(PERCENTILES) - 1
    lines = [
        exact_series(f"{when}, {said}", hours, profile[at, k], color, dashed=k != median)
        for at, (when, color) in enumerate((("before", PINK), (f"after {DAYS} days", BLUE)))
        for k, said in ((median, "median"), (low, "5 %"), (high, "95 %"))
    ]
    axis = Axis("hour of the day (beyond 24: the next morning)", ticks=(6.0, 9.0, 12.0, 15.0, 18.0, 21.0, 24.0, 27.0))
    levels = Level("180 mg/dL", 180.0, GREY), Level("70 mg/dL", 70.0, ORANGE)
    return Lines(name, f"Days of {UNSEEN[patient]}", axis, "sensor (mg/dL)", tuple(lines), (), levels)
