"""Fleets of Gymnasium environments: unseen cart-poles and pendulums before and after one step, and from scratch.

Every setting was chosen on the equal JAX fleets `cart-pole` and `pendulum`, with other agents and other seeds than
here; those of training from scratch too, as the best of four step sizes or more, for one step and for several. Those
of the pendulums are a fourth attempt (docs/gym_fleets.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from perfedrl.envs.variation import vary_agents
from perfedrl.experiments.config import Config, make_config
from perfedrl.experiments.stats import mean_interval
from perfedrl.studies.base import Claim, Experiment, Runs

META, FEDAVG, ONCE, SPLIT = "per-fedavg-pg", "fedavg-pg", "from scratch, one step", "from scratch, split"
SCORE = "score"
AGENTS, UNSEEN, FLEET_SEED = 8, 3, 0


@dataclass(frozen=True)
class Study:
    """One fleet: what varies, how both methods train under one budget, and how an agent learns from scratch.

    `budget` is what an unseen agent personalizes with, and what it has from scratch: in one step, or in `pieces`.
    """

    name: str
    title: str
    fleet: Mapping[str, Any]
    vary: str
    low_high: tuple[float, float]
    policy: Mapping[str, Any]
    rounds: int
    meta: Mapping[str, Any]
    fedavg: Mapping[str, Any]
    budget: int
    pieces: int
    once: float
    """The step size of a single step from scratch, and that of several."""
    split: float
    seeds: int
    episodes: int = 50
    quick: Mapping[str, Any] = field(default_factory=lambda: {"local_steps": 1})

    def fleet_table(self, quick: bool, **more: Any) -> dict[str, Any]:
        how = {"agents": AGENTS, "held_out": UNSEEN, "seed": FLEET_SEED, "vary": {self.vary: list(self.low_high)}}
        return {"env": "gymnasium", **self.fleet, **how, **({"horizon": 9} if quick else {}), **more}

    def config(self, name: str, seeds: int, quick: bool, **settings: Any) -> Config:
        shared = {"seeds": seeds, "start": "per-seed", "baseline": "ridge", "policy": dict(self.policy)}
        return make_config({"name": f"{self.name}-{name}", **shared, "fleet": self.fleet_table(quick), **settings})

    def trained(self, name: str, algorithm: Mapping[str, Any], seeds: int, quick: bool) -> Config:
        """Federated training, and then the unseen agents without a step and after one."""
        rounds, episodes = (1, 2) if quick else (self.rounds, self.episodes)
        budget = 4 if quick else self.budget
        evaluation = {"name": "monte-carlo", "trajectories": budget, "episodes": episodes}
        evaluation |= {"few_shot": (0, budget), "repeats": 1 if quick else 2}
        settings = {"rounds": rounds, "evaluate_every": max(1, rounds // 2), "evaluation": evaluation}
        return self.config(name, seeds, quick, algorithm={**algorithm, **(self.quick if quick else {})}, **settings)

    def scratch(self, name: str, beta: float, steps: int, seeds: int, quick: bool) -> Config:
        """The unseen agents alone, each from fresh parameters, with the trajectories of one personalization."""
        unseen = [x[self.vary] for x in vary_agents({self.vary: list(self.low_high)}, AGENTS, UNSEEN, FLEET_SEED)[1]]
        own = {"agents": UNSEEN, "held_out": 0, "vary": {self.vary: {"train": unseen}}}
        m = (4 if quick else self.budget) // steps
        settings = {"rounds": steps, "evaluate_every": steps, "fleet": self.fleet_table(quick, **own)}
        settings["evaluation"] = {
            "name": "monte-carlo",
            "trajectories": 0,
            "episodes": 2 if quick else 2 * self.episodes,
        }
        return self.config(name, seeds, quick, algorithm={"name": "local-pg", "beta": beta, "m": m}, **settings)

    def configs(self, seeds: int, quick: bool) -> dict[str, Config]:
        return {
            META: self.trained("personalized", self.meta, seeds, quick),
            FEDAVG: self.trained("fedavg", self.fedavg, seeds, quick),
            ONCE: self.scratch("scratch", self.once, 1, seeds, quick),
            SPLIT: self.scratch("scratch-split", self.split, 2 if quick else self.pieces, seeds, quick),
        }


def scores(runs: Runs) -> dict[tuple[str, str], Float[np.ndarray, " seed"]]:
    """The mean score of the unseen agents, by method and moment: "before" any trajectory of theirs, and "after"."""
    found: dict[tuple[str, str], Float[np.ndarray, " seed"]] = {}
    for key in (META, FEDAVG):
        before, after = np.moveaxis(runs[key].deployed.outcomes[SCORE].mean(axis=-1), 1, 0)
        found |= {(key, "before"): before, (key, "after"): after}
    for key in (ONCE, SPLIT):
        for when, at in (("before", 0), ("after", -1)):
            found[key, when] = runs[key].history.outcomes[f"{when}.{SCORE}"][:, at].mean(axis=-1)
    return found


def claims(study: Study, runs: Runs) -> list[Claim]:
    """One step beats no step, and as many trajectories from scratch: 95 % intervals over seeds that do not overlap."""
    found = scores(runs)
    after = mean_interval(found[META, "after"])
    others = {
        "the shared initialization's": found[META, "before"],
        "that from scratch in one step": found[ONCE, "after"],
        f"that from scratch in {study.pieces} steps": found[SPLIT, "after"],
    }
    what = f"score of unseen agents after one step from {study.budget} trajectories, above the upper bound of"
    bounds = {whose: mean_interval(values).high for whose, values in others.items()}
    return [
        Claim(study.name, f"{what} {whose}", bound, *after, met=bool(after.low > bound))
        for whose, bound in bounds.items()
    ]


CART_POLES = Study(
    name="cart-poles",
    title="Gymnasium cart-poles of different length",
    fleet={"id": "CartPole-v1", "horizon": 199, "parallel": 20},
    vary="length",
    low_high=(0.1, 0.9),
    policy={"name": "mlp", "hidden": [32]},
    rounds=10,
    meta={
        **{"name": "per-fedavg-pg", "variant": "exact", "control": "shrink", "alpha": 0.5, "beta": 0.01, "clip": 30.0},
        **{"local_steps": 5, "m_in": 20, "m_h": 20, "m_out": 20},
    },
    fedavg={"name": "fedavg-pg", "alpha": 0.01, "beta": 0.03, "local_steps": 5, "m": 60},
    budget=20,
    pieces=2,
    once=1.0,
    split=0.03,
    seeds=5,
)

PENDULUMS = Study(
    name="pendulums",
    title="Gymnasium pendulums under different gravity",
    fleet={"id": "Pendulum-v1", "horizon": 99, "discount": 0.97, "parallel": 10},
    vary="g",
    low_high=(5.0, 15.0),
    policy={"name": "gaussian-mlp", "hidden": [32], "initial_std": 2.0},
    rounds=60,
    meta={
        **{"name": "per-fedavg-pg", "variant": "first-order", "alpha": 1.5e-3, "beta": 0.05, "clip": 1.0},
        **{"local_steps": 5, "m_in": 30, "m_out": 10},
    },
    fedavg={"name": "fedavg-pg", "alpha": 5e-4, "beta": 2e-3, "local_steps": 5, "m": 40},
    budget=50,
    pieces=5,
    once=2e-3,
    split=1e-3,
    seeds=8,
)

STUDIES = {study.name: study for study in (CART_POLES, PENDULUMS)}


def experiment(study: Study) -> Experiment:
    return Experiment(study.name, study.title, study.configs, partial(claims, study), seeds=study.seeds)


GYM_FLEETS = tuple(experiment(study) for study in STUDIES.values())
