"""A saved run's initialization, agent by agent, before and after adaptation, by exact dynamic programming."""

from typing import NamedTuple

import numpy as np

from perfedrl import exact
from perfedrl.envs import unstack
from perfedrl.errors import UserError
from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.experiments.store import Run


class AgentReturn(NamedTuple):
    """One agent's expected return, over the run's seeds, beside the best that any policy reaches."""

    agent: str
    part: str
    before: Interval
    after: Interval
    optimum: float


def evaluate(run: Run, alpha: float | None = None) -> list[AgentReturn]:
    """Evaluate every training and held-out agent, with the run's own adaptation step size or another one."""
    alpha = run.config.algorithm.get("alpha") if alpha is None else alpha
    if alpha is None:
        raise UserError(
            f"the algorithm of {run.folder.name} has no adaptation step size alpha: say which to adapt with"
        )
    if not 0 <= alpha < np.inf:
        raise UserError(f"alpha must be a finite number >= 0; it is {alpha}")
    parts = run.config.parts
    rows = []
    for part, tasks in (("training", parts.fleet.train), ("held-out", parts.fleet.held_out)):
        if tasks is None:
            continue
        returns = np.asarray(exact.returns_of_many(tasks, run.params, alpha, parts.policy))
        for i, mdp in enumerate(unstack(tasks)):
            before, after = (mean_interval(returns[:, k, i]) for k in (0, 1))
            rows.append(AgentReturn(str(i), part, before, after, float(exact.optimal_return(mdp))))
    return rows
