"""Evaluation of a saved run: the return of every agent before and after adaptation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from perfedrl import exact
from perfedrl.algorithms import FedAvgPG, ServerState
from perfedrl.algorithms.checks import check_step_sizes
from perfedrl.envs import TabularMDP
from perfedrl.errors import UserError
from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.experiments.store import Run
from perfedrl.simulation.measurements import deployed_step_size
from perfedrl.simulation.simulator import Simulation

ROUNDING = 1e-6
"""Relative differences of returns below this are rounding errors of single precision."""


class AgentReturn(NamedTuple):
    """One agent's mean return over the run's seeds, and the optimal return of a finite MDP.

    Agents are numbered as in `personalize`: held-out agents follow the training agents.
    """

    agent: int
    part: str
    before: Interval
    after: Interval
    optimum: float | None


def evaluate(run: Run, alpha: float | None = None) -> list[AgentReturn]:
    """Evaluate every training and held-out agent with the run's evaluation; samples are fresh.

    Agents adapt as the run's algorithm does, or, with `alpha`, by one policy-gradient step of that size.
    """
    check_shared(run)
    experiment, message = run.config.experiment, run.message
    if alpha is not None:
        # FedAvg-PG personalizes by one policy-gradient step from the shared parameters; nothing is trained here.
        check_step_sizes(alpha, 1.0)
        if experiment.algorithm.averages_by_choice:
            raise UserError(
                f"agents of {run.config.algorithm['name']} choose one of several initializations before their step: "
                "evaluate the run without alpha, or use `perfedrl personalize --alpha`"
            )
        experiment, message = replace(experiment, algorithm=FedAvgPG(alpha, beta=1.0)), run.params
    fleet, simulation = experiment.fleet, Simulation(experiment, run.config.seeds)
    # A round that training never reaches, so that the episodes differ from those of the run's own evaluations.
    state = simulation.start()._replace(server=ServerState(message))
    try:
        measured = simulation.measure(state, run.config.rounds + 1)
    finally:
        fleet.close()
    rows = []
    for part, before, after in (
        ("training", measured.before, measured.after),
        ("held-out", measured.held_out_before, measured.held_out_after),
    ):
        for i in range(before.shape[-1]):
            task = fleet.task(i, held_out=part == "held-out")
            optimum = float(exact.optimal_return(task)) if isinstance(task, TabularMDP) else None
            first, second = (mean_interval(np.asarray(x[:, 0, i], float)) for x in (before, after))
            number = i + (fleet.agents if part == "held-out" else 0)
            rows.append(AgentReturn(number, part, first, second, optimum))
    return rows


class StepLoss(NamedTuple):
    """An agent whose mean return over seeds is lower after its step than before."""

    agent: int
    before: float
    after: float


class StepLosses(NamedTuple):
    """The agents that lose by their step, and the number of agents that were measured."""

    lost: list[StepLoss]
    agents: int


def losses_of_run(run: Run) -> StepLosses:
    """The agents that lose by their step at a run's last evaluation, numbered as in `personalize`."""
    h = run.history
    parts = (h.before, h.held_out_before), (h.after, h.held_out_after)
    return step_losses(*(np.concatenate([x[:, -1].mean(axis=0) for x in part]) for part in parts))


def step_losses(before: Sequence[float] | np.ndarray, after: Sequence[float] | np.ndarray) -> StepLosses:
    """Count the agents whose mean return falls; agents without a number before or after are left out."""
    known = [
        StepLoss(i, float(x), float(y))
        for i, (x, y) in enumerate(zip(before, after, strict=True))
        if np.isfinite([x, y]).all()
    ]
    return StepLosses([row for row in known if row.before - row.after > ROUNDING * abs(row.before)], len(known))


def check_shared(run: Run) -> None:
    """Reject a run without a shared initialization."""
    if not run.config.experiment.algorithm.federated:
        raise UserError(f"{run.folder.name} trained every agent alone and has no shared initialization to adapt")


def adaptation_step_size(run: Run, alpha: float | None, replica: int) -> Any:
    """The step size to adapt with: `alpha`, or that of one of the run's seeds, which may differ between parameters."""
    check_shared(run)
    if alpha is None:
        return deployed_step_size(run.config.experiment.algorithm, jax.tree.map(lambda x: x[replica], run.message))
    check_step_sizes(alpha, 1.0)
    return alpha
