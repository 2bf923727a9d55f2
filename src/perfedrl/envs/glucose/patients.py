"""The thirty people of the simulator: their parameters, and what a clinic knows of them.

`patients.csv` is made of `vpatient_params.csv` and `Quest.csv` of the package simglucose 0.2.11 (Jinyu Xie; MIT
licence in `patients_license.txt`) by `tests/support/simglucose_oracle.py`; columns keep their names there.
"""

import csv
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from perfedrl.envs.glucose.model import Body, Physiology
from perfedrl.errors import UserError, nearest

AGE_GROUPS = ("adult", "adolescent", "child")

HELD_OUT = ("adult#009", "adult#010", "adolescent#009", "adolescent#010", "child#009", "child#010")
"""Who is not seen in training by default: the last two of each age group."""


class Patient(NamedTuple):
    """One row of the table."""

    name: str
    weight: float
    """Body weight (kg)."""
    basal: float
    """The rate that keeps the fasting patient at rest (U/h)."""
    carbohydrate_ratio: float
    """Grams of carbohydrate that a unit of insulin covers."""
    correction_factor: float
    """By how many mg/dL a unit of insulin lowers glucose."""
    physiology: np.ndarray
    """The numbers of `Physiology`, in order."""
    rest: np.ndarray
    """The numbers of `Body`, in order, at rest."""


@lru_cache
def patients() -> Mapping[str, Patient]:
    """Read the table, by name."""
    with resources.files("perfedrl.envs.glucose").joinpath("patients.csv").open(encoding="utf-8") as file:
        return {row["Name"]: parse(row) for row in csv.DictReader(file)}


def parse(row: Mapping[str, str]) -> Patient:
    """Make a patient of a row of the table."""
    number = {name: float(text) for name, text in row.items() if name != "Name"}
    rest = {
        **dict.fromkeys(("solid", "liquid", "gut", "action_on_use"), 0.0),
        "plasma_glucose": number["Gpb"],
        "tissue_glucose": number["Gtb"],
        "plasma_insulin": number["Ipb"],
        "delayed_insulin": number["Ib"],
        "action_on_liver": number["Ib"],
        "liver_insulin": number["Ilb"],
        "depot": number["isc1ss"],
        "dissolved_depot": number["isc2ss"],
        "skin_glucose": number["Gpb"],
    }
    return Patient(
        name=row["Name"],
        weight=number["BW"],
        basal=number["u2ss"] * number["BW"] / 100,  # pmol/kg/min -> U/h
        carbohydrate_ratio=number["CR"],
        correction_factor=number["CF"],
        physiology=np.array([number[name] for name in Physiology._fields]),
        rest=np.array([rest[name] for name in Body._fields]),
    )


def patient(name: Any) -> Patient:
    """Return the patient of a name."""
    known = patients()
    if not isinstance(name, str) or name not in known:
        hint = nearest(name, known) if isinstance(name, str) else ""
        numbers = ", ".join(f"{group}#001 to {group}#010" for group in AGE_GROUPS)
        raise UserError(f"patient must be the name of one that exists: {numbers}; got {name!r}{hint}")
    return known[name]


def split(train: Sequence[str], held_out: Sequence[str]) -> tuple[list[Patient], list[Patient]]:
    """Return the patients who train, all others where none are named, and those who do not."""
    unseen = [patient(name) for name in held_out]
    seen = [patient(name) for name in train] or [x for x in patients().values() if x.name not in held_out]
    names = [x.name for x in (*seen, *unseen)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"every patient can be in a fleet once; {', '.join(twice)} is there more often")
    return seen, unseen
