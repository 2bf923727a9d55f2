"""The figures of the Gymnasium fleets: unseen agents before and after their first trajectories, by method."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, PINK, Axis, Lines, Plot, Series
from perfedrl.studies import Runs
from perfedrl.studies.gym_fleets import study as gym_fleets_study


def unseen(study: gym_fleets_study.Study, runs: Runs) -> list[Plot]:
    """Scores without a trajectory of the agent's own and with `budget` of them."""
    found, at = gym_fleets_study.scores(runs), np.asarray([0.0, study.budget])
    shown = {
        gym_fleets_study.META: ("Per-FedAvg-PG, then one step", BLUE),
        gym_fleets_study.FEDAVG: ("FedAvg-PG, then one step", GREEN),
        gym_fleets_study.ONCE: ("from scratch, one step", GREY),
        gym_fleets_study.SPLIT: (f"from scratch, {study.pieces} steps", PINK),
    }
    series = tuple(
        Series(label, at, np.stack([found[key, when] for when in ("before", "after")], axis=1), color)
        for key, (label, color) in shown.items()
    )
    axis = Axis("trajectories of the unseen agent", ticks=tuple(at.tolist()))
    seeds = tuple(runs[gym_fleets_study.META].config.seeds)
    return [Lines(study.name, study.title, axis, "score of three unseen agents", series, seeds)]
