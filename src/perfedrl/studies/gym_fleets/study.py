"""Configs and claims: unseen Gymnasium cart-poles and pendulums before and after one step, and from scratch.

All settings were chosen on the equivalent JAX fleets `cart-pole` and `pendulum`, with other agents and seeds than
here. Step sizes of training from scratch are the best of at least four, for one step and for several. The settings of
the pendulums are a fourth attempt (docs/gym_fleets.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from perfedrl.envs.variation import vary_agents
from perfedrl.experiments.config import Config, parse_config
from perfedrl.experiments.stats import mean_interval
from perfedrl.studies.base import Runs
from perfedrl.studies.claims import Claim

META, FEDAVG, ONCE, SPLIT = "per-fedavg-pg", "fedavg-pg", "from scratch, one step", "from scratch, split"
SCORE = "score"
AGENTS, UNSEEN, FLEET_SEED = 8, 3, 0


@dataclass(frozen=True)
class GymFleetSetup:
    """One fleet: the parameter that varies, the settings of both methods, and those of training from scratch.

    `budget` is the number of trajectories of an unseen agent, for personalization and for training from scratch, there
    in one step or in `pieces` steps.
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
    """The step size of training from scratch in one step."""
    split: float
    """The step size of training from scratch in several steps."""
    seeds: int
    episodes: int = 50
    quick: Mapping[str, Any] = field(default_factory=lambda: {"local_steps": 1})

    def fleet_table(self, quick: bool, **more: Any) -> dict[str, Any]:
        """The config's table of the fleet."""
        how = {"agents": AGENTS, "held_out": UNSEEN, "seed": FLEET_SEED, "vary": {self.vary: list(self.low_high)}}
        return {"env": "gymnasium", **self.fleet, **how, **({"horizon": 9} if quick else {}), **more}

    def config(self, name: str, seeds: int, quick: bool, **settings: Any) -> Config:
        """A config with the settings that all runs of the fleet share."""
        shared = {"seeds": seeds, "start": "per-seed", "baseline": "ridge", "policy": dict(self.policy)}
        return parse_config({"name": f"{self.name}-{name}", **shared, "fleet": self.fleet_table(quick), **settings})

    def trained(self, name: str, algorithm: Mapping[str, Any], seeds: int, quick: bool) -> Config:
        """Federated training, then deployment to the unseen agents without a step and with one."""
        rounds, episodes = (1, 2) if quick else (self.rounds, self.episodes)
        budget = 4 if quick else self.budget
        evaluation = {"name": "monte-carlo", "trajectories": budget, "episodes": episodes}
        evaluation |= {"few_shot": (0, budget), "repeats": 1 if quick else 2}
        settings = {"rounds": rounds, "evaluate_every": max(1, rounds // 2), "evaluation": evaluation}
        return self.config(name, seeds, quick, algorithm={**algorithm, **(self.quick if quick else {})}, **settings)

    def scratch(self, name: str, beta: float, steps: int, seeds: int, quick: bool) -> Config:
        """Each unseen agent alone from fresh parameters, with as many trajectories as one personalization."""
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
        """Both federated methods, and training from scratch in one step and in several."""
        return {
            META: self.trained("personalized", self.meta, seeds, quick),
            FEDAVG: self.trained("fedavg", self.fedavg, seeds, quick),
            ONCE: self.scratch("scratch", self.once, 1, seeds, quick),
            SPLIT: self.scratch("scratch-split", self.split, 2 if quick else self.pieces, seeds, quick),
        }


def scores(runs: Runs) -> dict[tuple[str, str], Float[np.ndarray, " seed"]]:
    """The mean score of the unseen agents by method, "before" and "after" their own trajectories."""
    found: dict[tuple[str, str], Float[np.ndarray, " seed"]] = {}
    for key in (META, FEDAVG):
        before, after = np.moveaxis(runs[key].deployed.outcomes[SCORE].mean(axis=-1), 1, 0)
        found |= {(key, "before"): before, (key, "after"): after}
    for key in (ONCE, SPLIT):
        for when, at in (("before", 0), ("after", -1)):
            found[key, when] = runs[key].history.outcomes[f"{when}.{SCORE}"][:, at].mean(axis=-1)
    return found


def claims(setup: GymFleetSetup, runs: Runs) -> list[Claim]:
    """One step beats no step and training from scratch with as many trajectories: 95 % intervals do not overlap."""
    found = scores(runs)
    after = mean_interval(found[META, "after"])
    others = {
        "the shared initialization's": found[META, "before"],
        "that from scratch in one step": found[ONCE, "after"],
        f"that from scratch in {setup.pieces} steps": found[SPLIT, "after"],
    }
    what = f"score of unseen agents after one step from {setup.budget} trajectories, above the upper bound of"
    bounds = {whose: mean_interval(values).high for whose, values in others.items()}
    return [
        Claim(setup.name, f"{what} {whose}", bound, *after, met=bool(after.low > bound))
        for whose, bound in bounds.items()
    ]


CART_POLES = GymFleetSetup(
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

PENDULUMS = GymFleetSetup(
    name="pendulums",
    title="Gymnasium pendulums under different gravity",
    fleet={"id": "Pendulum-v1", "horizon": 99, "discount": 0.97, "parallel": 10, "scale_actions": False},
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

SETUPS = {setup.name: setup for setup in (CART_POLES, PENDULUMS)}
"""The fleets by the names of their studies."""
