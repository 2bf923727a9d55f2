"""The recommended mechanism in words, and the tables of a config that use it."""

from collections.abc import Mapping
from typing import Any

import tomli_w

from perfedrl.studies.diagnosis.diagnosis import Diagnosis
from perfedrl.studies.diagnosis.verdict import CLUSTERS, FINE_TUNING, ONE_STEP, SHARED


def answer(found: Diagnosis) -> str:
    """Whether the fleet needs personalization, in one sentence."""
    verdict = found.verdict
    gain, share = verdict.gain, verdict.gain.mean / verdict.scale if verdict.scale > 0 else 0.0
    of_worth = f"{gain.mean:.3g}, {max(share, 0):.0%} of what learning is worth at all"
    if verdict.needed:
        return f"yes: policies of their own gain the agents {of_worth}"
    if gain.low <= 0 < gain.mean:
        return f"no: a gain by policies of their own is not distinguishable from none ({of_worth})"
    return f"no: one shared policy is as good for all agents as policies of their own ({of_worth})"


def advice(found: Diagnosis) -> str:
    """The mechanism to use, and why, in one sentence."""
    verdict = found.verdict
    budgets = [int(m) for m in verdict.returns.budgets]
    best = max(budgets, key=lambda m: verdict.closed[m])
    groups = len(verdict.groups)
    return {
        SHARED: "train one policy for all agents",
        ONE_STEP: f"train an initialization for one gradient step: from {best} trajectories it gives "
        f"{verdict.closed[best]:.0%} of the possible gain",
        CLUSTERS: f"train {groups} initializations, one for each group of agents: the agents fall into groups within "
        "which a policy serves all",
        FINE_TUNING: "fine-tune a shared policy by several steps, or let agents with enough trajectories learn alone: "
        f"one step from {best} trajectories gains {verdict.step_gains[best].mean:.3g}, ten steps of fine-tuning "
        f"{verdict.tuning_gains[best].mean:.3g}, and {verdict.gain.mean:.3g} is possible",
    }[verdict.recommendation]


def config_tables(found: Diagnosis) -> Mapping[str, Mapping[str, Any]]:
    """The tables [algorithm] and [advantage] of a config for the recommended mechanism, to begin with.

    Agents with exact returns keep the step sizes of their own config.
    """
    groups, recommended = len(found.verdict.groups), found.verdict.recommendation
    if found.step_sizes is not None:
        alpha, beta = found.step_sizes
        names = {SHARED: "fedavg-pg", ONE_STEP: "per-fedavg-pg", FINE_TUNING: "fine-tuned", CLUSTERS: "clustered"}
        more = {"clusters": groups} if recommended == CLUSTERS else {}
        return {"algorithm": {"name": names[recommended], "alpha": alpha, "beta": beta, **more}}
    policy = {"name": "fedppo", "alpha": 1.0, "beta": 0.01, "m": 40}
    algorithms: dict[str, dict[str, Any]] = {
        SHARED: policy,
        ONE_STEP: {"name": "promp", "alpha": 1.0, "beta": 0.01, "learn_alpha": "per-parameter"},
        FINE_TUNING: {**policy, "alpha": 0.3, "fine_tuning_steps": 10},
        CLUSTERS: {"name": "clustered", "alpha": 0.3, "beta": 0.3, "clusters": groups},
    }
    advantage = {"name": "gae", **({"times_variance": True} if found.times_variance else {})}
    return {"algorithm": algorithms[recommended], "advantage": advantage}


def as_toml(found: Diagnosis) -> str:
    """The recommended tables as TOML."""
    return tomli_w.dumps(config_tables(found)).strip()
