"""Fleets of the simulator's thirty people."""

from collections.abc import Sequence
from typing import Any

from perfedrl.envs.fleet import Fleet, family_fleet
from perfedrl.envs.glucose.patients import HELD_OUT, Patient, patient, split
from perfedrl.envs.glucose.task import Dosing, GlucoseDay, RiskName
from perfedrl.envs.new_agents import Settings


def glucose(
    patients: Sequence[str] = (),
    held_out: Sequence[str] = HELD_OUT,
    minutes: int = 15,
    announced: bool = True,
    dosing: Dosing = "factor",
    risk: RiskName = "magni",
    discount: float = 0.99,
) -> Fleet:
    """People with type 1 diabetes (UVA/Padova 2008): the named `patients`, or all but those held out.

    A decision every `minutes` sets the basal rate of a pump and, where meals are `announced`, their bolus.
    """
    seen, unseen = split(patients, held_out)

    def make(base: Any, settings: Settings) -> GlucoseDay:  # noqa: ARG001
        return day_of(patient(settings["patient"]), minutes, announced, dosing, risk, discount)

    names = [[{"patient": x.name} for x in part] for part in (seen, unseen)]
    return family_fleet(make, *names, hints={"patient": "a name of the table"})


def day_of(
    person: Patient, minutes: int, announced: bool, dosing: Dosing, risk: RiskName, discount: float
) -> GlucoseDay:
    """Make the task of a patient."""
    return GlucoseDay(
        weight=person.weight,
        basal=person.basal,
        carbohydrate_ratio=person.carbohydrate_ratio,
        correction_factor=person.correction_factor,
        physiology=person.physiology,
        rest=person.rest,
        minutes=minutes,
        announced=announced,
        dosing=dosing,
        risk=risk,
        discount=discount,
    )
