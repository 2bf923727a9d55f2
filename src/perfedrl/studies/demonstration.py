"""The demonstration: what a meta-trained initialization is worth to agents that never took part."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from perfedrl.experiments.config import Config
from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.experiments.store import Run
from perfedrl.studies.curvature.study import recommended
from perfedrl.studies.paper_neural.study import META, SCRATCH_SHOWN, rollout_configs

SEEDS = 5
BUDGETS = (0, 20, 100, 200)


class Row(NamedTuple):
    """One budget: what an unseen agent gets from it, personalized and from scratch."""

    trajectories: int
    personalized_return: Interval
    personalized_success: Interval
    scratch_return: Interval
    scratch_success: Interval


def configs(seeds: int) -> dict[str, Config]:
    """Meta-training on the arc as recommended, and the held-out agents alone, up to 200 trajectories."""
    return {**rollout_configs(seeds, True), META: recommended(seeds)}


def rows(runs: Mapping[str, Run]) -> list[Row]:
    """The table, mean over the three unseen agents and over seeds."""
    deployed, scratch = runs[META].deployed, runs[SCRATCH_SHOWN].history
    table = []
    for budget in BUDGETS:
        (at,) = np.flatnonzero(scratch.trajectories == budget)
        alone = scratch.after[:, at].mean(axis=-1), scratch.outcomes["after.success"][:, at].mean(axis=-1)
        values = deployed.at("return", budget), deployed.at("success", budget), *alone
        table.append(Row(budget, *(mean_interval(x) for x in values)))
    return table
