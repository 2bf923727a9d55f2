"""Configs and claims: fleets whose actuators differ in gain, sign, lag and dead zone, none of which is observed.

All settings were chosen on fleets of other agents (fleet seed 100) and with other run seeds (from 1000 on). Scores are
sums of rewards of the stochastic policy on fresh episodes of agents that never took part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from perfedrl.envs.variation import vary_agents
from perfedrl.experiments.config import Config, parse_config
from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.studies.base import Runs
from perfedrl.studies.claims import Claim, single

NAME = "actuators"
SEEDS = 10
PROMP, FEDAVG, FEDPPO, SPECIALISTS = "promp", "fedavg-pg", "fedppo", "specialists"
SHARED = {FEDAVG: "FedAvg-PG", FEDPPO: "FedPPO"}
"""The methods that train one policy for all."""
SCORE = "score"

AGENTS, UNSEEN, FLEET_SEED = 8, 4, 0
BUDGET = 20
"""Trajectories of an unseen agent for its step."""
LEAST, MOST = 0.9, 0.5
"""The least share of the specialists' gain for one step after ProMP, and the most for a shared policy, which fails."""


@dataclass(frozen=True)
class ActuatorFleet:
    """One fleet: what varies, and the settings of every method.

    Federated methods have the same trajectories of the same agents. Specialists are the unseen agents, which train with
    as many trajectories: each alone or, where `turned`, together after their actuators were turned to positive gains.
    Opposite actions under the opposite gain are the same task, so that scores are those of agents who know their sign.
    """

    name: str
    title: str
    fleet: Mapping[str, Any]
    vary: Mapping[str, Any]
    policy: Mapping[str, Any]
    advantage: Mapping[str, Any]
    rounds: int
    evaluate_every: int
    algorithms: Mapping[str, Mapping[str, Any]]
    turned: bool = False

    def config(self, method: str, seeds: int, quick: bool) -> Config:
        """The config of one method; quick ones have one round of short episodes."""
        fleet: dict[str, Any] = {"agents": AGENTS, "held_out": UNSEEN, "seed": FLEET_SEED, "vary": dict(self.vary)}
        evaluation: dict[str, Any] = {"name": "monte-carlo", "trajectories": BUDGET, "episodes": 2 if quick else 50}
        if method == SPECIALISTS:
            fleet |= {"agents": UNSEEN, "held_out": 0, "vary": self.of_unseen_agents()}
            evaluation["trajectories"] = 0
        else:
            evaluation |= {"few_shot": (0, BUDGET), "repeats": 1 if quick else 4}
        algorithm = {**self.algorithms[method], **({"local_steps": 1} if quick else {})}
        shared = {"policy": dict(self.policy), "advantage": dict(self.advantage), "start": "per-seed", "seeds": seeds}
        return parse_config(
            {
                **{"name": f"{NAME}-{self.name}-{method}", **shared, "algorithm": algorithm},
                "fleet": {**self.fleet, **fleet, **({"horizon": 9} if quick else {})},
                "rounds": 1 if quick else self.rounds,
                "evaluate_every": 1 if quick else self.evaluate_every,
                "evaluation": evaluation,
            }
        )

    def of_unseen_agents(self) -> dict[str, dict[str, list[float]]]:
        """The variation of a fleet whose training agents are the unseen ones."""
        unseen = vary_agents(self.vary, AGENTS, UNSEEN, FLEET_SEED).held_out
        values = {name: [agent[name] for agent in unseen] for name in self.vary}
        if self.turned:
            values["gain"] = [abs(gain) for gain in values["gain"]]
        return {name: {"train": own} for name, own in values.items()}

    def scores(self, runs: Runs, method: str, when: str) -> Float[np.ndarray, "seed agent"]:
        """Scores of the unseen agents at the end of training, "before" or "after" their step."""
        run = runs[self.name, method]
        if method == SPECIALISTS:
            return run.history.outcomes[f"after.{SCORE}"][:, -1]
        return run.deployed.outcomes[SCORE][:, ("before", "after").index(when)]

    def untrained(self, runs: Runs) -> float:
        """The mean score of the unseen agents under untrained policies."""
        return float(runs[self.name, FEDAVG].history.outcomes[f"held_out_before.{SCORE}"][:, 0].mean())

    def shares(self, runs: Runs, method: str, when: str) -> Float[np.ndarray, " seed"]:
        """Mean scores on a scale on which untrained policies have 0 and the specialists' mean is 1."""
        low, high = self.untrained(runs), float(self.scores(runs, SPECIALISTS, "after").mean())
        return (self.scores(runs, method, when).mean(axis=-1) - low) / (high - low)

    def claims(self, runs: Runs) -> list[Claim]:
        """One step after ProMP reaches the specialists, and shared policies fail; what a step from these gains."""
        step = f"one step from {BUDGET} trajectories"

        def share(method: str, when: str, what: str, least: float, most: float) -> Claim:
            text = f"{self.title}: share of the specialists' gain that unseen agents have {what}"
            return single(NAME, text, np.nan, mean_interval(self.shares(runs, method, when)), least, most)

        def score(values: Float[np.ndarray, " seed"], what: str) -> Claim:
            found: Interval = mean_interval(values)
            return single(NAME, f"{self.title}: score of {what}", np.nan, found, -np.inf, np.inf)

        found = [share(PROMP, "after", f"after ProMP and {step} (>= {LEAST:g})", LEAST, np.inf)]
        for method, said in SHARED.items():
            found.append(share(method, "before", f"under the policy of {said} (<= {MOST:g})", -np.inf, MOST))
            found.append(share(method, "after", f"after {said} and {step}", -np.inf, np.inf))
        after = self.scores(runs, PROMP, "after")
        return [
            *found,
            score(self.scores(runs, SPECIALISTS, "after").mean(axis=-1), "the specialists"),
            score(after.mean(axis=-1), f"unseen agents after ProMP and {step}"),
            score(after.min(axis=-1), f"the worst unseen agent after ProMP and {step}"),
        ]


PROMP_STEPS: Mapping[str, Any] = {
    **{"name": "promp", "alpha": 1.0, "learn_alpha": "per-parameter"},
    **{"local_steps": 5, "m_in": 20, "m_out": 20, "epochs": 5},
}
ALONE: Mapping[str, Any] = {"local_steps": 5, "m": 40}
"""As many trajectories as ProMP has in a local step."""

CART_POLES = ActuatorFleet(
    name="cart-poles",
    title="cart-poles",
    fleet={"env": "cart-pole"},
    vary={"gain": {"plus_minus": [0.5, 1.5]}, "lag": [0.0, 0.04], "dead_zone": [0.0, 0.2]},
    policy={"name": "mlp", "hidden": [32]},
    advantage={"name": "gae", "gae_lambda": 0.95},
    rounds=20,
    evaluate_every=5,
    algorithms={
        PROMP: {**PROMP_STEPS, "beta": 0.01, "anneal": 20},
        FEDAVG: {"name": "fedavg-pg", **ALONE, "alpha": 1.0, "beta": 1.0},
        FEDPPO: {"name": "fedppo", **ALONE, "alpha": 1.0, "beta": 0.01, "epochs": 5, "anneal": 20},
        SPECIALISTS: {"name": "local-pg", **ALONE, "beta": 1.0},
    },
)

PENDULUMS = ActuatorFleet(
    name="pendulums",
    title="pendulums",
    fleet={"env": "pendulum", "max_torque": 8.0, "horizon": 99, "discount": 0.97},
    vary={"gain": {"plus_minus": [0.7, 1.3]}, "lag": [0.0, 0.05], "dead_zone": [0.0, 0.1]},
    policy={"name": "gaussian-mlp", "hidden": [32], "initial_std": 3.0, "least_std": 0.5, "last_scale": 0.0},
    advantage={"name": "gae", "gae_lambda": 0.95, "times_variance": True},
    rounds=100,
    evaluate_every=25,
    algorithms={
        PROMP: {**PROMP_STEPS, "alpha": 3.0, "beta": 0.01, "anneal": 100},
        FEDAVG: {"name": "fedavg-pg", **ALONE, "alpha": 0.3, "beta": 0.03},
        FEDPPO: {"name": "fedppo", **ALONE, "alpha": 0.3, "beta": 0.01, "epochs": 5, "anneal": 100},
        SPECIALISTS: {"name": "fedppo", **ALONE, "alpha": 0.3, "beta": 0.01, "epochs": 5, "anneal": 100},
    },
    turned=True,
)

FLEETS = {fleet.name: fleet for fleet in (CART_POLES, PENDULUMS)}
"""The fleets by name."""


def configs(seeds: int, quick: bool) -> dict[Any, Config]:
    """One config for each fleet and method."""
    return {
        (fleet.name, method): fleet.config(method, seeds, quick)
        for fleet in FLEETS.values()
        for method in fleet.algorithms
    }


def claims(runs: Runs) -> list[Claim]:
    """The claims of all fleets."""
    return [claim for fleet in FLEETS.values() for claim in fleet.claims(runs)]
