"""Configs and claims: half-cheetahs that differ in direction or in velocity, their rivals and their ceilings.

All numbers are scores of the stochastic policy on fresh episodes: sums of rewards over 100 decisions. Rates were chosen
among two to five on the same fleets, the context's step size among two runs of this study (docs/locomotion.md).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from perfedrl.experiments.config import Config, parse_config
from perfedrl.experiments.stats import mean_interval
from perfedrl.experiments.store import Run
from perfedrl.studies.base import Runs
from perfedrl.studies.claims import Claim, single

NAME = "locomotion"
SEEDS = 8
FEWER_SEEDS = 4
"""Seeds of every row but the first."""

DIRECTION, SAMPLED, DIRECTION_CEILING = "direction", "direction, client sampling", "direction, ceiling"
VELOCITY, CONTEXT, FEDPPO, VELOCITY_CEILING = "velocity", "velocity, context", "velocity, fedppo", "velocity, ceiling"

MAML_SCORE = 293.0
"""MAML's score after one step from 20 trajectories, over 200 decisions of 0.01 s instead of 100 of 0.05 s."""

AGENTS, TRAJECTORIES = 40, 20
ROUNDS_PER_BATCH, BATCHES = 5, 500
ROUNDS = ROUNDS_PER_BATCH * BATCHES
SAMPLED_ROUNDS, SAMPLED_ANNEALING = 240, 400
EVALUATIONS = 10

ADVANTAGE = {"name": "gae", "gae_lambda": 0.97, "times_variance": True}
KEPT_BATCHES = {"epochs": 1, "optimizer": "sgd", "beta": 1.0, "rounds_per_batch": ROUNDS_PER_BATCH}
"""Agents send gradients on the same batches for several rounds; the server's Adam steps along their mean."""


def server(rate: float) -> dict[str, Any]:
    """The table of the server's optimizer: Adam with a rate that falls to a twentieth over all rounds."""
    return {"optimizer": "adam", "rate": rate, "b2": 0.999, "eps": 1e-8, "anneal": ROUNDS}


def gaussian(least_std: float, **more: Any) -> dict[str, Any]:
    """The table of the policy: two layers of 64, and a standard deviation from 1 down to `least_std`."""
    return {"name": "gaussian-mlp", "hidden": [64, 64], "initial_std": 1.0, "least_std": least_std, **more}


PROMP = {"name": "promp", "alpha": 1.0, "learn_alpha": "per-parameter", "m_in": TRAJECTORIES, "m_out": TRAJECTORIES}
ONE_POLICY = {"name": "fedppo", "alpha": 0.3, "m": 2 * TRAJECTORIES, **KEPT_BATCHES}
CHEETAHS = {"agents": AGENTS, "discount": 0.99, "velocity_scale": 0.1, "engine": "planar"}
BOTH_WAYS = {"env": "half-cheetah-dir", **CHEETAHS}
VELOCITIES = {"env": "half-cheetah-vel", **CHEETAHS, "held_out": AGENTS}

TABLES: Mapping[str, Mapping[str, Any]] = {
    DIRECTION: {
        "fleet": BOTH_WAYS,
        "policy": gaussian(0.2),
        "algorithm": {**PROMP, **KEPT_BATCHES},
        "server": server(0.008),
    },
    DIRECTION_CEILING: {
        "fleet": BOTH_WAYS,
        "policy": gaussian(0.2, sees=["direction"]),
        "algorithm": ONE_POLICY,
        "server": server(0.008),
    },
    SAMPLED: {
        "fleet": BOTH_WAYS,
        "policy": gaussian(0.2),
        "algorithm": {**PROMP, "local_steps": 3, "epochs": 5, "beta": 0.008, "anneal": SAMPLED_ANNEALING},
        "participation": 0.25,
        "rounds": SAMPLED_ROUNDS,
    },
    VELOCITY: {
        "fleet": VELOCITIES,
        "policy": gaussian(0.1),
        "algorithm": {**PROMP, **KEPT_BATCHES},
        "server": server(0.008),
    },
    CONTEXT: {
        "fleet": VELOCITIES,
        "policy": {**gaussian(0.1), "name": "context-mlp", "context_size": 4, "model_hidden": [32]},
        "algorithm": {
            **{"name": "context", "alpha": 10.0, "m_in": TRAJECTORIES, "m_out": TRAJECTORIES, "stop_divergence": 1.0},
            **KEPT_BATCHES,
        },
        "server": server(0.006),
    },
    FEDPPO: {"fleet": VELOCITIES, "policy": gaussian(0.1), "algorithm": ONE_POLICY, "server": server(0.008)},
    VELOCITY_CEILING: {
        "fleet": VELOCITIES,
        "policy": gaussian(0.1, sees=["velocity"]),
        "algorithm": ONE_POLICY,
        "server": server(0.008),
    },
}


def configs(seeds: int, quick: bool) -> dict[Any, Config]:
    """One config for each row of the tables; quick ones have two agents, short episodes and a few rounds."""
    return {key: config(key, seeds if key == DIRECTION else min(seeds, FEWER_SEEDS), quick) for key in TABLES}


def config(key: str, seeds: int, quick: bool) -> Config:
    """The config of one row."""
    table = {"rounds": ROUNDS, "participation": 1.0, **TABLES[key]}
    table["evaluate_every"] = table["rounds"] // EVALUATIONS
    table["evaluation"] = {"name": "monte-carlo", "trajectories": TRAJECTORIES, "episodes": TRAJECTORIES}
    if quick:
        table |= {"rounds": 2, "evaluate_every": 1, "participation": 1.0}
        table["fleet"] = {**table["fleet"], "agents": 2, "horizon": 2}
        table["fleet"] |= {"held_out": 1} if "held_out" in table["fleet"] else {}
        few = {name: 2 for name in ("m_in", "m_out", "m") if name in table["algorithm"]}
        table["algorithm"] = {**table["algorithm"], **few}
        table["evaluation"] |= {"trajectories": 2, "episodes": 2}
    name = f"{NAME}-{key.replace(', ', '-').replace(' ', '-')}"
    return parse_config({"name": name, "seeds": seeds, "start": "per-seed", "advantage": ADVANTAGE, **table})


def scores(run: Run, when: str) -> Float[np.ndarray, "seed evaluation agent"]:
    """Scores "before" or "after" the step, of unseen agents where the fleet has any."""
    part = "held_out_" if run.config.experiment.fleet.held_out is not None else ""
    return run.history.outcomes[f"{part}{when}.score"]


def decisions(run: Run) -> Float[np.ndarray, " evaluation"]:
    """Decisions of the whole fleet in training up to each evaluation."""
    fleet = run.config.experiment.fleet
    return run.history.trajectories * float(fleet.agents * (fleet.train.horizon + 1))


def claims(runs: Runs) -> list[Claim]:
    """Scores after one step from 20 trajectories at the end of training, mean and worst agent, and the ceilings."""
    where = {DIRECTION: "half-cheetah-dir", VELOCITY: "half-cheetah-vel, unseen agents"}

    def claim(key: str, what: str, when: str, least: float = -np.inf, paper: float = np.nan) -> Claim:
        fleet, asked = where[key.split(", ")[0]], f" (>= {least:g})" if np.isfinite(least) else ""
        values = scores(runs[key], when)[:, -1].mean(axis=-1)
        return single(NAME, f"{fleet}: score {what}{asked}", paper, mean_interval(values), least, np.inf)

    step = f"one step from {TRAJECTORIES} trajectories"
    found = [
        claim(DIRECTION, f"after {step}", "after", 400.0, MAML_SCORE),
        claim(DIRECTION, "before it", "before"),
        claim(SAMPLED, f"after {step}, trained with a quarter of the agents, three local steps", "after", 280.0),
        claim(DIRECTION_CEILING, "of one policy that sees the direction", "before"),
        claim(VELOCITY, f"after {step}", "after", -33.0),
        claim(VELOCITY, "before it", "before"),
        claim(CONTEXT, f"after {step} of a context", "after", -18.0),
        claim(FEDPPO, "of one policy for all (FedPPO)", "before"),
        claim(FEDPPO, f"of FedPPO after {step}", "after"),
        claim(VELOCITY_CEILING, "of one policy that sees the velocity", "before"),
    ]
    for key, what in (
        (DIRECTION, ""),
        (SAMPLED, ", trained with a quarter of the agents, three local steps"),
        (VELOCITY, ""),
        (CONTEXT, " of a context"),
        (FEDPPO, ", by FedPPO"),
    ):
        worst = scores(runs[key], "after")[:, -1].min(axis=-1)
        text = f"{where[key.split(', ')[0]]}: score of the worst agent after {step}{what}"
        found.append(single(NAME, text, np.nan, mean_interval(worst), -np.inf, np.inf))
    return found
