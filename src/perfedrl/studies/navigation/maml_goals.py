"""MAML's own test of 2-D navigation: the saved initialization, personalized for the forty goals of MAML's test.

The names and settings of the measured functions are part of the names of the committed measurement files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from perfedrl.algorithms import ServerState
from perfedrl.envs.fleet import fleet
from perfedrl.estimators import Sampled
from perfedrl.estimators.advantages import ADVANTAGES
from perfedrl.experiments.stats import mean_interval
from perfedrl.experiments.store import Run
from perfedrl.simulation.simulator import Simulation
from perfedrl.studies.claims import Claim, single
from perfedrl.studies.measurement_cache import Measurement

MAML_BEFORE, MAML_AFTER, MAML_WORST, MAML_TRAJECTORIES = -40.41, -11.71, -29.68, 40
"""MAML's score before and after one gradient step, that of its worst goal, and the least number of trajectories of the
step: a batch has at least 4,000 decisions, and an episode at most 100."""

TARGET, STRETCH_TRAJECTORIES = -11.7, 20
GOAL_BUDGETS = (0, 10, 20, 40, 100)
AS_TRAINED, GENERALIZED = "advantages as in training", "generalized advantages"

ADVANTAGES_OF = MappingProxyType(
    {AS_TRAINED: {}, GENERALIZED: {"name": "gae", "gae_lambda": 0.95, "normalize": False, "discounted": True}}
)
"""How the step at deployment weights decisions: as the run does, or by generalized advantages in the same unit."""


class GoalScores(NamedTuple):
    """Undiscounted returns by budget and goal. The names of the fields are those of the arrays in the files."""

    goals: Float[np.ndarray, "goal 2"]
    score: Float[np.ndarray, "seed budget goal"]


def maml_goals() -> Float[np.ndarray, "goal 2"]:
    """The goals of MAML's test, which draws them from NumPy's legacy generator with seed 1."""
    return np.random.RandomState(1).uniform(-0.5, 0.5, (40, 2))


def scores_on_maml_goals(run: Run, budgets: Sequence[int], advantage: Mapping[str, Any]) -> GoalScores:
    """Personalize a run's initialization for every goal of MAML's test with one step from each budget.

    Repeats and episodes are those of the run's own deployment. `advantage` is a table as in a config; an empty one
    keeps the run's.
    """
    experiment, goals = run.config.experiment, maml_goals()
    agent, like = experiment.agent, experiment.fleet.task(0)
    if advantage:
        form = ADVANTAGES[advantage["name"]](**{name: x for name, x in advantage.items() if name != "name"})
        kept = agent.forms
        agent = Sampled(experiment.policy, kept.curvature, kept.baseline, kept.entropy, advantage=form)
    changed = replace(
        experiment,
        fleet=fleet([like], [replace(like, goal=goal) for goal in goals]),
        agent=agent,
        evaluation=replace(experiment.evaluation, agent=agent, few_shot=tuple(budgets), rollouts=0),
    )
    simulation = Simulation(changed, run.config.seeds)
    state = simulation.start()._replace(server=ServerState(run.message))
    deployed = simulation.deploy(state, run.config.rounds)
    assert deployed is not None
    return GoalScores(goals, deployed.outcomes["score"])


def measurements_of(run: Any) -> list[Measurement]:
    """The scores on MAML's goals with both kinds of advantages; `run` is the key of the study's run."""
    budgets = list(GOAL_BUDGETS)
    return [
        Measurement(name, scores_on_maml_goals, {"budgets": budgets, "advantage": dict(table)}, run)
        for name, table in ADVANTAGES_OF.items()
    ]


def maml_claims(evidence: Mapping[Any, Any]) -> list[Claim]:
    """Scores on MAML's goals before the step and after it, mean and worst goal, from 40 trajectories and from 20."""

    def scores(name: str, budget: int) -> Float[np.ndarray, "seed goal"]:
        return evidence[name]["score"][:, GOAL_BUDGETS.index(budget)]

    def claim(what: str, paper: float, values: Float[np.ndarray, " seed"], least: float) -> Claim:
        asked = f" (>= {least:g})" if np.isfinite(least) else ""
        return single("navigation", f"MAML's 40 goals: {what}{asked}", paper, mean_interval(values), least, np.inf)

    claims = [claim("score before adaptation", MAML_BEFORE, scores(AS_TRAINED, 0).mean(axis=-1), -np.inf)]
    for name in ADVANTAGES_OF:
        for m in (MAML_TRAJECTORIES, STRETCH_TRAJECTORIES):
            found, own = scores(name, m), m == MAML_TRAJECTORIES
            after = f"after one step from {m} trajectories, {name}"
            mean, worst = found.mean(axis=-1), found.min(axis=-1)
            claims.append(claim(f"score {after}", MAML_AFTER if own else np.nan, mean, TARGET))
            claims.append(claim(f"worst goal {after}", MAML_WORST if own else np.nan, worst, -np.inf))
    return claims
