"""The figure of a Gymnasium fleet: scores of unseen agents before and after their first trajectories, by method."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, PINK, Axis, Lines, Plot, Series
from perfedrl.studies.base import Runs
from perfedrl.studies.gym_fleets.study import FEDAVG, META, ONCE, SPLIT, GymFleetSetup, scores


def unseen(setup: GymFleetSetup, runs: Runs) -> list[Plot]:
    """Scores with none and with `budget` trajectories of the unseen agent, by method."""
    found, at = scores(runs), np.asarray([0.0, setup.budget])
    shown = {
        META: ("Per-FedAvg-PG, then one step", BLUE),
        FEDAVG: ("FedAvg-PG, then one step", GREEN),
        ONCE: ("from scratch, one step", GREY),
        SPLIT: (f"from scratch, {setup.pieces} steps", PINK),
    }
    series = tuple(
        Series(label, at, np.stack([found[key, when] for when in ("before", "after")], axis=1), color)
        for key, (label, color) in shown.items()
    )
    axis = Axis("trajectories of the unseen agent", ticks=tuple(at.tolist()))
    seeds = tuple(runs[META].config.seeds)
    return [Lines(setup.name, setup.title, axis, "score of three unseen agents", series, seeds)]
