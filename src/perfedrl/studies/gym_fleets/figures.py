"""The figure of a Gymnasium fleet: scores of unseen agents before and after their first trajectories, by method."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, Axis, Lines, Plot, Series
from perfedrl.studies.base import Runs
from perfedrl.studies.gym_fleets.study import FEDAVG, META, ONCE, PROMP, SPLIT, GymFleetSetup, scores


def unseen(setup: GymFleetSetup, runs: Runs) -> list[Plot]:
    """Scores with none and with `budget` trajectories of the unseen agent, by method."""
    found, at = scores(runs), np.asarray([0.0, setup.budget])
    seeds = {key: len(found[key, "before"]) for key in (META, PROMP)}
    fewer = f" ({seeds[PROMP]} seeds)" if seeds[PROMP] != seeds[META] else ""
    shown = {
        META: ("Per-FedAvg-PG, then one step", BLUE),
        FEDAVG: ("FedAvg-PG, then one step", GREEN),
        PROMP: (f"ProMP, then one step{fewer}", ORANGE),
        ONCE: ("from scratch, one step", GREY),
        SPLIT: (f"from scratch, {setup.pieces} steps", PINK),
    }
    series = tuple(
        Series(label, at, np.stack([found[key, x] for x in ("before", "after")], axis=1), color, dashed=key == PROMP)
        for key, (label, color) in shown.items()
    )
    axis = Axis("trajectories of the unseen agent", ticks=tuple(at.tolist()))
    numbers = tuple(runs[META].config.seeds)
    return [Lines(setup.name, setup.title, axis, "score of three unseen agents", series, numbers)]
