"""Figures of the actuator fleets: scores of unseen agents over the trajectories of training, by method."""

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, Axis, Level, Lines, Plot, Series
from perfedrl.studies.actuators.study import (
    BUDGET,
    FEDAVG,
    FEDPPO,
    FLEETS,
    NAME,
    PROMP,
    SCORE,
    SPECIALISTS,
    ActuatorFleet,
)
from perfedrl.studies.base import Runs

CURVES = (
    (PROMP, "after", False, "ProMP, one step", BLUE),
    (PROMP, "after", True, "ProMP, one step, worst agent", BLUE),
    (PROMP, "before", False, "ProMP, no step", PINK),
    (FEDAVG, "after", False, "FedAvg-PG, one step", GREEN),
    (FEDPPO, "after", False, "FedPPO, one step", ORANGE),
)
"""Method, before or after the step, whether the worst agent instead of the mean, label and color of each line."""


def actuators(runs: Runs) -> list[Plot]:
    """One figure for each fleet."""
    return [curves(fleet, runs) for fleet in FLEETS.values()]


def curves(fleet: ActuatorFleet, runs: Runs) -> Lines:
    """Scores of the unseen agents over training, and the specialists' level."""
    series = []
    for method, when, worst, label, color in CURVES:
        history = runs[fleet.name, method].history
        scores = history.outcomes[f"held_out_{when}.{SCORE}"]
        values = scores.min(axis=-1) if worst else scores.mean(axis=-1)
        series.append(Series(label, history.trajectories.astype(float), values, color, dashed=worst))
    specialists = Level("specialists", float(fleet.scores(runs, SPECIALISTS, "after").mean()), GREY)
    return Lines(
        f"{NAME}-{fleet.name}",
        f"Unseen {fleet.title}, one step from {BUDGET} trajectories",
        Axis("trajectories per training agent"),
        "score",
        tuple(series),
        tuple(runs[fleet.name, PROMP].config.seeds),
        (specialists,),
    )
