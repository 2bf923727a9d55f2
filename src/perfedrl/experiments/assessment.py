"""The evaluation protocol: outcomes of unseen agents after each adaptation step, the same for all fleets."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from perfedrl.algorithms import FedAvgPG, ServerState
from perfedrl.algorithms.checks import check_counts, check_step_sizes
from perfedrl.errors import UserError
from perfedrl.experiments.evaluate import check_shared
from perfedrl.experiments.stats import COSTS, Interval, bootstrap_interval, over_agents
from perfedrl.experiments.store import Run
from perfedrl.key_domains import EVALUATION
from perfedrl.simulation.evaluation import MonteCarlo
from perfedrl.simulation.experiment import PER_SEED
from perfedrl.simulation.measurements import deployed_step_size, step_by_step
from perfedrl.simulation.run_state import FleetState
from perfedrl.simulation.simulator import Simulation

MOST_STEPS = 10_000


class StepOutcomes(NamedTuple):
    """Mean and worst outcomes over agents after `steps` adaptation steps from `trajectories` in total."""

    steps: int
    trajectories: int
    mean: dict[str, Interval]
    worst: dict[str, Interval]


@dataclass(frozen=True)
class Assessment:
    """Outcomes of agents that start from an initialization, before adaptation (step 0) and after each step.

    `outcomes` are means over fresh episodes on axes [seed, step, agent]: "return" is discounted, "score" is not, and
    tasks may add others, such as "success". Every step uses fresh trajectories, none of which is an episode that is
    measured; with an exact evaluation steps are exact and use no trajectories. Costs are per agent: `trained` and
    `exchanged` are the trajectories and bytes of each agent that trained, `received` the bytes of the message that a
    new agent starts from.
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
        """Means over seeds with 95 % bootstrap intervals; the worst agent is determined for each seed."""
        steps = next(iter(self.outcomes.values())).shape[1]
        return [self._row(k) for k in range(steps)]

    def _row(self, k: int) -> StepOutcomes:
        """Outcomes after k steps."""
        at_step = {name: x[:, k] for name, x in self.outcomes.items()}
        mean = {name: bootstrap_interval(over_agents(x)) for name, x in at_step.items()}
        worst = {name: bootstrap_interval(worst_agent(name, x)) for name, x in at_step.items()}
        return StepOutcomes(k, k * self.trajectories, mean, worst)


def worst_agent(outcome: str, values: Float[np.ndarray, "seed agent"]) -> Float[np.ndarray, " seed"]:
    """The outcome of the worst measured agent for every seed: the smallest value, or the largest of a cost."""
    return np.fmax.reduce(values, axis=-1) if outcome in COSTS else np.fmin.reduce(values, axis=-1)


def assess(
    run: Run,
    *,
    steps: int = 3,
    trajectories: int = 20,
    episodes: int | None = None,
    alpha: float | None = None,
    scratch: bool = False,
    held_out: bool | None = None,
) -> Assessment:
    """Measure a run's initialization on its held-out agents (on the training agents if there are none).

    `held_out` chooses one of the two. Agents take up to `steps` policy-gradient steps from `trajectories` trajectories
    each. The step size is `alpha`, or by default the run's step size at deployment. With `scratch` agents start from
    fresh parameters instead. `episodes` is the number of episodes over which an agent is measured, by default that of
    the run.
    """
    check_settings(run, steps, trajectories, episodes, alpha, scratch)
    if held_out and run.config.experiment.fleet.held_out is None:
        raise UserError(f"{run.folder.name} has no held-out agents; leave out held_out = True")
    message = jax.tree.map(lambda x: x[0], run.message)
    simulation, state = simulation_and_state(run, episodes, alpha, scratch)
    fleet = simulation.fleet
    # A round that neither training nor the run's evaluations reach, so that all episodes are fresh.
    moment = EVALUATION + run.config.rounds + 2
    held_out = fleet.held_out is not None if held_out is None else held_out
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


def check_settings(
    run: Run, steps: int, trajectories: int, episodes: int | None, alpha: float | None, scratch: bool
) -> None:
    """Reject invalid settings, before anything compiles."""
    check_counts(steps=steps, trajectories=trajectories, **({} if episodes is None else {"episodes": episodes}))
    if steps > MOST_STEPS:
        raise UserError(f"steps must be at most {MOST_STEPS}, got {steps}")
    if not scratch:
        check_shared(run)
    if alpha is not None:
        check_step_sizes(alpha, 1.0)
    else:
        deployed_step_size(run.config.experiment.algorithm, jax.tree.map(lambda x: x[0], run.message))


def simulation_and_state(
    run: Run, episodes: int | None, alpha: float | None, scratch: bool
) -> tuple[Simulation, FleetState]:
    """A simulation and its state with the run's initialization, or with fresh parameters."""
    experiment = replace(run.config.experiment, start=PER_SEED)
    if episodes is not None and isinstance(experiment.evaluation, MonteCarlo):
        experiment = replace(experiment, evaluation=MonteCarlo(experiment.evaluation.agent, episodes=episodes))
    if scratch and alpha is not None:
        experiment = replace(experiment, algorithm=FedAvgPG(alpha, beta=1.0))
    simulation = Simulation(experiment, run.config.seeds)
    state = simulation.start()
    return simulation, state if scratch else state._replace(server=ServerState(run.message))
