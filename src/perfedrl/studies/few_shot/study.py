"""Configs and claims: few-shot personalization with the recommended recipe.

The recipe was chosen by the returns of *training* agents after 20 and 200 trajectories, on seeds that are not used
here.
"""

from types import MappingProxyType

import numpy as np

from perfedrl.experiments.config import Config
from perfedrl.experiments.stats import mean_interval, mean_share_interval
from perfedrl.studies.base import Runs
from perfedrl.studies.claims import Claim, everywhere, single
from perfedrl.studies.curvature.study import LOW_VARIANCE
from perfedrl.studies.paper_neural.study import BUDGETS, META, ROLLOUTS, arc

SEEDS = 20

RECIPE = MappingProxyType(
    {"variant": "first-order", "alpha": 0.1, "deployment_alpha": 0.2, "beta": 0.3, "clip": 0.6, "local_steps": 5}
)
"""The recommended settings on the arc, used with the entropy bonus below and the low-variance estimators."""

ENTROPY = 0.05
RECOMMENDED, BASELINES_ONLY = "recommended", "baselines"
HELD_OUT_BEST = 4.32
"""The return of an optimal agent on the held-out goals."""


def recommended(seeds: int) -> Config:
    """The recommended recipe on the arc: 15,000 trajectories per agent, then deployment to the held-out agents."""
    evaluation = {"name": "monte-carlo", "few_shot": BUDGETS, "repeats": 10, "rollouts": ROLLOUTS}
    algorithm = {"name": "per-fedavg-pg", "m_in": 10, "m_out": 10, **RECIPE}
    settings = {"entropy": ENTROPY, "evaluate_every": 25, "evaluation": evaluation}
    return arc("recommended", seeds, algorithm, **LOW_VARIANCE, **settings)


def few_shot_configs(seeds: int, _quick: bool) -> dict[str, Config]:
    """The paper's run, the same with baselines in training and adaptation, and the recommended recipe."""
    evaluation = {"name": "monte-carlo", "few_shot": BUDGETS, "repeats": 10, "rollouts": ROLLOUTS}
    algorithm = {"name": "per-fedavg-pg", "variant": "first-order", "m_in": 10, "m_out": 10}
    algorithm |= {"alpha": 1.0, "beta": 0.2, "local_steps": 5}
    settings = {"evaluate_every": 25, "evaluation": evaluation}
    return {
        META: arc("first-order", seeds, algorithm, **settings),
        BASELINES_ONLY: arc("first-order-baselines", seeds, algorithm, **LOW_VARIANCE, **settings),
        RECOMMENDED: recommended(seeds),
    }


def few_shot(runs: Runs) -> list[Claim]:
    """Return and success of held-out agents after one step, by budget."""
    deployed = runs[RECOMMENDED].deployed
    zero = deployed.at("return", 0).mean()
    helped = [deployed.at("return", m).mean() >= zero for m in BUDGETS if m >= 20]
    from_20, from_200 = (mean_interval(deployed.at("return", m)) for m in (20, 200))
    success = mean_share_interval(deployed.at("success", 200))
    return [
        single("fewshot", "return after one step from 20 trajectories (>= 2.3)", np.nan, from_20, 2.3, np.inf),
        single("fewshot", "return after one step from 200 trajectories (>= 2.7)", 1.94, from_200, 2.7, np.inf),
        single("fewshot", "success after one step from 200 trajectories (>= 0.90)", 0.86, success, 0.9, 1.0),
        everywhere("fewshot", "budgets from 20 on at which a step does not hurt", np.asarray(helped)),
    ]
