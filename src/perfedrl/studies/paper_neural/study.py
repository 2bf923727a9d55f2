"""Configs and claims of the paper's neural experiments on the arc of goals: E4, E5 and E7."""

import numpy as np

from perfedrl.envs.navigation import first_reach
from perfedrl.estimators import PAPER
from perfedrl.experiments.config import Config, parse_config
from perfedrl.experiments.stats import Interval, share_interval
from perfedrl.studies.base import Runs, final
from perfedrl.studies.claims import Claim, everywhere, fraction, median, near, point, single

RETURN_TOLERANCE, SUCCESS_TOLERANCE = 0.30, 0.08
"""Largest distances of neural means from the paper's numbers."""

CURVATURE_BATCHES, QUICK_BATCHES = (10, 50, 100, 200, 500, 1000), (10, 50, 200)
TRAINS = 1.5
"""A seed counts as trained when its return after adaptation reaches this value."""

BUDGETS = (0, 20, 50, 100, 200, 500)
SCRATCH_STEPS = (1, 5, 10, 25, 100, 200)
HELD_OUT = [-0.4, 0.0, 0.4]
"""Angles of the held-out goals, on which the from-scratch agents train."""

ROLLOUTS, SHOWN_AGENT, SHOWN_BUDGET = 12, 0, 200
"""The rollout figure: episodes per panel, the agent (goal at -0.4 rad) and its personalization budget."""

REFERENCE, META, SCRATCH, SCRATCH_SHOWN = "fedavg-pg", "first-order", "from scratch", "from scratch, shown"


def arc(name: str, seeds: int, algorithm: dict, **settings) -> Config:
    """The config of a run on the paper's arc: K = 150, the 2-32-8 tanh network, the paper's estimators by default."""
    table = {"name": f"arc-{name}", "seeds": seeds, "rounds": 150, "fleet": {"env": "arc"}, "policy": {"name": "mlp"}}
    return parse_config({**table, **PAPER, "algorithm": algorithm, **settings})


def curvature_configs(seeds: int, quick: bool) -> dict[int | str, Config]:
    """The exact variant for each curvature batch, and FedAvg-PG with the smallest budget; tau 5, alpha 1, beta 0.2."""
    shared = {"alpha": 1.0, "beta": 0.2, "local_steps": 5}
    measured = {"evaluate_every": 10, "evaluation": {"name": "monte-carlo"}}
    exact = {"name": "per-fedavg-pg", "variant": "exact", "m_in": 10, "m_out": 10, **shared}
    configs: dict[int | str, Config] = {
        m: arc(f"exact-mh{m}", seeds, {**exact, "m_h": m}, **measured)
        for m in (QUICK_BATCHES if quick else CURVATURE_BATCHES)
    }
    configs[REFERENCE] = arc("fedavg-pg", seeds, {"name": "fedavg-pg", "m": 30, **shared}, **measured)
    return configs


def meta_config(seeds: int) -> Config:
    """First-order meta-training, 15,000 trajectories per agent, then personalization of the held-out agents."""
    evaluation = {"name": "monte-carlo", "few_shot": BUDGETS, "repeats": 10, "rollouts": ROLLOUTS}
    algorithm = {"name": "per-fedavg-pg", "variant": "first-order", "m_in": 10, "m_out": 10}
    algorithm |= {"alpha": 1.0, "beta": 0.2, "local_steps": 5}
    return arc("first-order", seeds, algorithm, evaluate_every=25, evaluation=evaluation)


def scratch_config(name: str, seeds: int, steps: tuple[int, ...], evaluation: dict) -> Config:
    """Each held-out agent alone from its own random start: steps with batches of 20 at beta = 0.2."""
    settings = {
        "rounds": steps[-1],
        "evaluate_every": steps,
        "start": "per-seed",
        "fleet": {"env": "arc", "goals": HELD_OUT, "held_out": 0},
        "evaluation": {"name": "monte-carlo", **evaluation},
    }
    return arc(name, seeds, {"name": "local-pg", "beta": 0.2, "m": 20}, **settings)


def few_shot_configs(seeds: int, _quick: bool) -> dict[str, Config]:
    """Meta-training with few-shot deployment, and training from scratch up to 4000 trajectories."""
    return {META: meta_config(seeds), SCRATCH: scratch_config("scratch", seeds, SCRATCH_STEPS, {})}


def rollout_configs(seeds: int, _quick: bool) -> dict[str, Config]:
    """Meta-training, and training from scratch with 200 trajectories, both with saved episodes."""
    shown = {"few_shot": (0,), "rollouts": ROLLOUTS}
    return {META: meta_config(seeds), SCRATCH_SHOWN: scratch_config("scratch-200", seeds, (1, 5, 10), shown)}


def curvature_bottleneck(runs: Runs) -> list[Claim]:
    """E4, Section 6 "The curvature-estimation bottleneck": medians and shares, since seeds are bimodal."""
    paper = {10: 0.2, 50: 0.2, 100: 0.2, 200: 0.2, 500: 0.39, 1000: 1.51}
    at = {m: final(runs[m]) for m in paper if m in runs}
    middle = {m: float(np.median(values)) for m, values in at.items()}
    bounds = {500: (-np.inf, middle.get(1000, np.inf)), 1000: (max(0.8, middle[200]), 1.9)}
    one_in_ten = max(0.1, 1 / len(runs[REFERENCE].config.seeds))
    few = dict.fromkeys((10, 50, 100, 200), (0.0, one_in_ten)) | {1000: (0.1, 0.8)}
    seeds_that_train = {**dict.fromkeys((10, 50, 100, 200), 0.0), 1000: 0.6}
    claims = []
    for m, values in at.items():
        claims.append(median("e4", f"median return, m_h = {m}", paper[m], values, *bounds.get(m, (-np.inf, 0.6))))
        if m in few:
            share = f"seeds that train (return >= {TRAINS}), m_h = {m}"
            claims.append(fraction("e4", share, seeds_that_train[m], values >= TRAINS, *few[m]))
    reference = final(runs[REFERENCE])
    above = np.asarray([reference.mean() > value for value in middle.values()])
    return [
        *claims,
        near("e4", "mean return of the FedAvg-PG reference", 1.73, reference, RETURN_TOLERANCE),
        everywhere("e4", "curvature batches whose median lies below the reference", above),
    ]


def few_shot(runs: Runs) -> list[Claim]:
    """E5, Section 6 "Few-shot personalization to unseen agents"."""
    deployed, scratch = runs[META].deployed, runs[SCRATCH].history
    after, success = scratch.after.mean(axis=-1), scratch.outcomes["after.success"].mean(axis=-1)
    (at_100,), (specialist,) = (np.flatnonzero(scratch.trajectories == n) for n in (100, 4000))

    zero, hurt = deployed.at("success", 0), deployed.at("success", 20)
    zero_shot = float(deployed.at("return", 0).mean())
    match = matching_budget(scratch.trajectories[1:], after[:, 1:].mean(axis=0), zero_shot)
    about_2000 = "trajectories from scratch that match zero-shot (1000 to 4000)"
    return [
        return_near("zero-shot", 1.53, deployed.at("return", 0)),
        success_near("zero-shot", 0.75, zero),
        return_near("one step from 100 trajectories", 1.52, deployed.at("return", 100)),
        success_near("one step from 100 trajectories", 0.80, deployed.at("success", 100)),
        return_near("one step from 200 trajectories", 1.94, deployed.at("return", 200)),
        success_near("one step from 200 trajectories", 0.86, deployed.at("success", 200)),
        success_near("one step from 20 trajectories", 0.62, hurt),
        everywhere("e5", "a 20-trajectory step hurts success", np.asarray([hurt.mean() < zero.mean()])),
        return_near("random initialization", 0.27, scratch.before[:, 0].mean(axis=-1)),
        return_near("from scratch with 100 trajectories", 0.25, after[:, at_100]),
        success_near("from scratch with 100 trajectories", 0.18, success[:, at_100]),
        success_near("specialist (4000 trajectories)", 0.90, success[:, specialist]),
        single("e5", about_2000, 2000, point(match), 1000, 4000),
    ]


def return_near(what: str, paper: float, values: np.ndarray) -> Claim:
    """A claim of E5 about a return."""
    return near("e5", f"return, {what}", paper, values, RETURN_TOLERANCE)


def success_near(what: str, paper: float, rates: np.ndarray) -> Claim:
    """A claim of E5 about a success rate."""
    return near("e5", f"success, {what}", paper, rates, SUCCESS_TOLERANCE, shares=True)


def matching_budget(budgets: np.ndarray, values: np.ndarray, level: float) -> float:
    """The budget at which a curve first reaches a level, log-interpolated; infinity if it never does."""
    reached = np.flatnonzero(values >= level)
    if not len(reached):
        return float("inf")
    i = int(reached[0])
    if i == 0:
        return float(budgets[0])
    share = (level - values[i - 1]) / (values[i] - values[i - 1])
    return float(np.exp(np.interp(share, (0, 1), np.log(budgets[i - 1 : i + 1]))))


def shown(runs: Runs) -> dict[str, np.ndarray]:
    """The episodes of the rollout figure by panel: positions [episode, T, 2]."""
    meta, scratch = runs[META].deployed, runs[SCRATCH_SHOWN].deployed
    (after,) = np.flatnonzero(meta.budgets == SHOWN_BUDGET)
    return {
        "before adaptation": meta.rollouts[0, 0, SHOWN_AGENT],
        f"after one step from {SHOWN_BUDGET} trajectories": meta.rollouts[0, after, SHOWN_AGENT],
        f"from scratch with {SHOWN_BUDGET} trajectories": scratch.rollouts[0, 0, SHOWN_AGENT],
    }


def rollouts(runs: Runs) -> list[Claim]:
    """E7, Appendix C "Few-shot personalization in full": the number of twelve episodes that reach an unseen goal."""
    task = runs[META].config.experiment.fleet.task(SHOWN_AGENT, held_out=True)
    bounds = ((9, 6, ROLLOUTS), (12, 10, ROLLOUTS), (5, 0, 7))
    claims = []
    for (panel, paths), (paper, low, high) in zip(shown(runs).items(), bounds, strict=True):
        count = int((first_reach(paths, task.goal, task.radius) < paths.shape[1]).sum())
        interval = Interval(*(ROLLOUTS * x for x in share_interval(count, ROLLOUTS)))
        claims.append(single("e7", f"episodes of {ROLLOUTS} that reach the goal, {panel}", paper, interval, low, high))
    return claims
