"""The evaluation protocol, the same for every family: what a run is worth to agents that it never saw, step by step."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from perfedrl.algorithms import FedAvgPG, ServerState
from perfedrl.algorithms.base import check_counts, check_step_sizes
from perfedrl.errors import UserError
from perfedrl.experiments.evaluate import check_shared
from perfedrl.experiments.stats import Interval, bootstrap_interval
from perfedrl.experiments.store import Run
from perfedrl.key_domains import EVALUATION
from perfedrl.simulation.evaluation import MonteCarlo
from perfedrl.simulation.experiment import PER_SEED
from perfedrl.simulation.measurements import deployed_step_size, step_by_step
from perfedrl.simulation.run_state import FleetState
from perfedrl.simulation.simulator import Simulation

MOST_STEPS = 10_000


class StepOutcomes(NamedTuple):
    """Outcomes after `steps` adaptation steps: their cost, the mean over agents and the worst agent."""

    steps: int
    trajectories: int
    mean: dict[str, Interval]
    worst: dict[str, Interval]


@dataclass(frozen=True)
class Assessment:
    """What a start is worth to agents before adaptation (step 0) and after each of some policy-gradient steps.

    `outcomes` ("return", which is discounted, "score", which is not, "success", where tasks say so) are means over
    fresh episodes on axes [seed, step, agent]. Every step has fresh trajectories, and no episode that is measured is
    one of them; exact evaluations take exact steps, of no trajectories. Costs are per agent: `trained` and `exchanged`
    are the trajectories and the bytes of those that trained, `received` the bytes of the message that a new agent
    starts from.
    """

    part: str
    start: str
    trajectories: int
    outcomes: Mapping[str, Float[np.ndarray, "seed step agent"]]
    trained: int
    exchanged: int
    received: int

    @property
    def rows(self) -> list[StepOutcomes]:
        """Means over seeds with 95 % bootstrap intervals. The worst agent is found seed by seed."""
        steps = next(iter(self.outcomes.values())).shape[1]
        mean = lambda k: {name: bootstrap_interval(x[:, k].mean(axis=-1)) for name, x in self.outcomes.items()}  # noqa: E731
        worst = lambda k: {name: bootstrap_interval(least(name, x[:, k])) for name, x in self.outcomes.items()}  # noqa: E731
        return [StepOutcomes(k, k * self.trajectories, mean(k), worst(k)) for k in range(steps)]


def least(outcome: str, values: Float[np.ndarray, "seed agent"]) -> Float[np.ndarray, " seed"]:
    """The worst agent's, which of a distance is the largest."""
    return values.max(axis=-1) if outcome == "distance" else values.min(axis=-1)


def assess(
    run: Run,
    *,
    steps: int = 3,
    trajectories: int = 20,
    episodes: int | None = None,
    alpha: float | None = None,
    scratch: bool = False,
) -> Assessment:
    """Measure a run's initialization on its held-out agents (on the training agents, where there are none).

    Agents take up to `steps` policy-gradient steps from `trajectories` trajectories each, with the step size that the
    run deploys with, or `alpha`. With `scratch` they start from fresh parameters instead. `episodes` are those that
    an agent is measured over, as many as in the run when left out.
    """
    check(run, steps, trajectories, episodes, alpha, scratch)
    message = jax.tree.map(lambda x: x[0], run.message)
    simulation, state = beginning(run, episodes, alpha, scratch)
    fleet = simulation.fleet
    # A number of its own, so that neither training nor the run's evaluations draw the same episodes.
    moment, held_out = EVALUATION + run.config.rounds + 2, fleet.held_out is not None
    try:
        measured = simulation.each_agent(partial(step_by_step, steps, trajectories, alpha), state, moment, held_out)
    finally:
        fleet.close()
    costs = run.history.trajectories[-1], run.history.bytes[-1], sum(x.nbytes for x in jax.tree.leaves(message))
    return Assessment(
        "held-out" if held_out else "training",
        "from scratch" if scratch else run.config.algorithm["name"],
        trajectories if isinstance(run.config.experiment.evaluation, MonteCarlo) else 0,
        {name: np.moveaxis(np.asarray(x, float), 1, -1) for name, x in measured.items()},
        *(0 if scratch else int(cost) for cost in costs),
    )


def check(run: Run, steps: int, trajectories: int, episodes: int | None, alpha: float | None, scratch: bool) -> None:
    """Refuse what cannot be assessed, before anything compiles."""
    check_counts(steps=steps, trajectories=trajectories, **({} if episodes is None else {"episodes": episodes}))
    if steps > MOST_STEPS:
        raise UserError(f"steps must be at most {MOST_STEPS}; it is {steps}")
    if not scratch:
        check_shared(run)
    if alpha is not None:
        check_step_sizes(alpha, 1.0)
    else:
        deployed_step_size(run.config.experiment.algorithm, jax.tree.map(lambda x: x[0], run.message))


def beginning(run: Run, episodes: int | None, alpha: float | None, scratch: bool) -> tuple[Simulation, FleetState]:
    """The simulation and its state to assess: with the run's initialization, or with fresh parameters."""
    experiment = replace(run.config.experiment, start=PER_SEED)
    if episodes is not None and isinstance(experiment.evaluation, MonteCarlo):
        experiment = replace(experiment, evaluation=MonteCarlo(experiment.evaluation.agent, episodes=episodes))
    if scratch and alpha is not None:
        experiment = replace(experiment, algorithm=FedAvgPG(alpha, beta=1.0))
    simulation = Simulation(experiment, run.config.seeds)
    state = simulation.start()
    return simulation, state if scratch else state._replace(server=ServerState(run.message))
