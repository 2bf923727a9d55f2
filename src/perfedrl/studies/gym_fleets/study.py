"""Configs and claims: unseen Gymnasium cart-poles and pendulums before and after one step, and from scratch.

All settings were chosen on the equivalent JAX fleets `cart-pole` and `pendulum`, with other agents and seeds than
here. Step sizes of training from scratch are the best of at least four, for one step and for several. The settings of
the pendulums are a fourth attempt (docs/gym_fleets.md). ProMP, with clipped steps and a critic, has fewer trajectories.
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
from perfedrl.studies.claims import Claim, point, single

META, FEDAVG, ONCE, SPLIT = "per-fedavg-pg", "fedavg-pg", "from scratch, one step", "from scratch, split"
PROMP = "promp"
SCORE = "score"
AGENTS, UNSEEN, FLEET_SEED = 8, 3, 0
PROMP_SEEDS = 5
"""The most seeds that ProMP trains with."""
REACHED = 0.95
"""The share of FedAvg-PG's gain over an untrained policy for which trajectories are counted."""


@dataclass(frozen=True)
class ProMPSettings:
    """ProMP's own settings on a fleet; `fleet` and `policy` are added to those of the other methods.

    `tolerance` is the share of FedAvg-PG's score by which the lower bound of ProMP's may be less.
    """

    rounds: int
    evaluate_every: int
    algorithm: Mapping[str, Any]
    advantage: Mapping[str, Any]
    fleet: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0


@dataclass(frozen=True)
class GymFleetSetup:
    """One fleet: the parameter that varies, the settings of each method, and those of training from scratch.

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
    promp: ProMPSettings
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

    def trained(self, name: str, algorithm: Mapping[str, Any], seeds: int, quick: bool, **more: Any) -> Config:
        """Federated training, then deployment to the unseen agents without a step and with one."""
        rounds, episodes = (1, 2) if quick else (self.rounds, self.episodes)
        budget = 4 if quick else self.budget
        evaluation = {"name": "monte-carlo", "trajectories": budget, "episodes": episodes}
        evaluation |= {"few_shot": (0, budget), "repeats": 1 if quick else 2}
        settings = {"rounds": rounds, "evaluate_every": max(1, rounds // 2), "evaluation": evaluation, **more}
        return self.config(name, seeds, quick, algorithm={**algorithm, **(self.quick if quick else {})}, **settings)

    def clipped(self, seeds: int, quick: bool) -> Config:
        """Training by ProMP, with its own number of rounds, then deployment as after the other methods."""
        own = self.promp
        more: dict[str, Any] = {"advantage": dict(own.advantage), "policy": {**self.policy, **own.policy}}
        more["fleet"] = self.fleet_table(quick, **own.fleet)
        if not quick:
            more |= {"rounds": own.rounds, "evaluate_every": own.evaluate_every}
        return self.trained("promp", own.algorithm, min(seeds, PROMP_SEEDS), quick, **more)

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
        """The federated methods, and training from scratch in one step and in several."""
        return {
            META: self.trained("personalized", self.meta, seeds, quick),
            FEDAVG: self.trained("fedavg", self.fedavg, seeds, quick),
            PROMP: self.clipped(seeds, quick),
            ONCE: self.scratch("scratch", self.once, 1, seeds, quick),
            SPLIT: self.scratch("scratch-split", self.split, 2 if quick else self.pieces, seeds, quick),
        }


def scores(runs: Runs) -> dict[tuple[str, str], Float[np.ndarray, " seed"]]:
    """The mean score of the unseen agents by method, "before" and "after" their own trajectories."""
    found: dict[tuple[str, str], Float[np.ndarray, " seed"]] = {}
    for key in (META, FEDAVG, PROMP):
        before, after = np.moveaxis(runs[key].deployed.outcomes[SCORE].mean(axis=-1), 1, 0)
        found |= {(key, "before"): before, (key, "after"): after}
    for key in (ONCE, SPLIT):
        for when, at in (("before", 0), ("after", -1)):
            found[key, when] = runs[key].history.outcomes[f"{when}.{SCORE}"][:, at].mean(axis=-1)
    return found


def claims(setup: GymFleetSetup, runs: Runs) -> list[Claim]:
    """Claims about one step of Per-FedAvg-PG's initialization, then about ProMP."""
    return [*step_claims(setup, runs), *promp_claims(setup, runs)]


def step_claims(setup: GymFleetSetup, runs: Runs) -> list[Claim]:
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


def promp_claims(setup: GymFleetSetup, runs: Runs) -> list[Claim]:
    """ProMP's step reaches FedAvg-PG's score, and its training 95 % of FedAvg-PG's gain with half of the trajectories.

    The first claim is met where the lower bound of the interval is, up to the tolerance, at least FedAvg-PG's mean. In
    the second, FedAvg-PG's gain is that of its mean score over an untrained policy, both without a step, and each
    method has reached the level at the first of its evaluations that shows it.
    """
    found = scores(runs)
    after, goal = mean_interval(found[PROMP, "after"]), float(found[FEDAVG, "before"].mean())
    within = f" less {100 * setup.promp.tolerance:g} %" if setup.promp.tolerance else ""
    what = f"score of unseen agents after ProMP and one step from {setup.budget} trajectories"
    what += f", lower bound at least FedAvg-PG's without a step{within}"
    reached = bool(after.low >= goal - setup.promp.tolerance * abs(goal))
    start = unseen_curve(runs, FEDAVG, "before")[0]
    level = float(start + REACHED * (goal - start))
    theirs, ours = (first_reach(runs, *curve, level) for curve in ((FEDAVG, "before"), (PROMP, "after")))
    trajectories = f"trajectories per training agent until ProMP's step reaches {100 * REACHED:g} % of FedAvg-PG's gain"
    return [
        Claim(setup.name, what, goal, *after, met=reached),
        single(setup.name, f"{trajectories}, at most half of FedAvg-PG's", theirs / 2, point(ours), 0, theirs / 2),
    ]


def unseen_curve(runs: Runs, key: str, when: str) -> Float[np.ndarray, " evaluation"]:
    """The mean score of the unseen agents, over seeds, at each evaluation, "before" or "after" their step."""
    return runs[key].history.outcomes[f"held_out_{when}.{SCORE}"].mean(axis=(0, 2))


def first_reach(runs: Runs, key: str, when: str, level: float) -> float:
    """Trajectories of a training agent up to the first evaluation whose mean score is at least `level`, else nan."""
    reached = np.flatnonzero(unseen_curve(runs, key, when) >= level)
    return float(runs[key].history.trajectories[reached[0]]) if reached.size else float("nan")


PROMP_ALGORITHM: Mapping[str, Any] = {
    **{"name": "promp", "alpha": 1.0, "learn_alpha": "per-parameter"},
    **{"local_steps": 5, "m_in": 20, "m_out": 20, "epochs": 5},
}
"""ProMP's settings on both fleets."""

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
    promp=ProMPSettings(
        rounds=3,
        evaluate_every=1,
        algorithm={**PROMP_ALGORITHM, "beta": 0.02, "anneal": 3},
        advantage={"name": "gae", "gae_lambda": 0.95},
        tolerance=0.02,
    ),
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
    promp=ProMPSettings(
        rounds=15,
        evaluate_every=5,
        algorithm={**PROMP_ALGORITHM, "beta": 0.05, "anneal": 15},
        advantage={"name": "gae", "gae_lambda": 0.95, "times_variance": True},
        fleet={"workers": 2},
        policy={"least_std": 0.3},
    ),
    budget=50,
    pieces=5,
    once=2e-3,
    split=1e-3,
    seeds=8,
)

SETUPS = {setup.name: setup for setup in (CART_POLES, PENDULUMS)}
"""The fleets by the names of their studies."""
