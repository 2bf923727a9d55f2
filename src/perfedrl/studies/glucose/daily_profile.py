"""A patient's days before and after personalization, as percentiles of the sensor's readings over the day."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfedrl.algorithms import ServerState
from perfedrl.envs.fleet import Fleet
from perfedrl.experiments.store import Run
from perfedrl.simulation.simulator import Simulation

PERCENTILES = (5, 25, 50, 75, 95)
"""Those of the ambulatory glucose profile."""


class DailyProfile(NamedTuple):
    """Percentiles of readings (mg/dL) of every unseen patient. The names of the fields are those in the files."""

    budgets: Int[np.ndarray, " budget"]
    readings: Float[np.ndarray, "budget patient percentile T"]


def daily_profile(run: Run, budgets: Sequence[int], days: int) -> DailyProfile:
    """Personalize a run's first seed once from each budget, and play some days of each patient."""
    experiment = run.config.experiment
    fleet: Fleet = experiment.fleet
    evaluation = replace(experiment.evaluation, few_shot=tuple(budgets), repeats=1, episodes=days, rollouts=days)
    simulation = Simulation(replace(experiment, evaluation=evaluation), run.config.seeds)
    state = simulation.start()._replace(server=ServerState(run.message))
    deployed = simulation.deploy(state, run.config.rounds)
    assert deployed is not None
    readings = np.asarray(fleet.train.reading(deployed.rollouts[0]))
    found = np.percentile(readings, PERCENTILES, axis=2)
    return DailyProfile(np.asarray(budgets), np.moveaxis(found, 0, 2).astype(np.float32))
