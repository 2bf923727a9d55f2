"""Configs, measurements and claims: the exact variant with small curvature batches, at the paper's budgets."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from perfedrl.estimators import PAPER
from perfedrl.experiments.config import Config
from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.studies.base import Runs, final
from perfedrl.studies.claims import Claim, everywhere, fraction, median, single
from perfedrl.studies.estimators import EstimatorComparison, compare_estimators
from perfedrl.studies.paper_neural.study import TRAINS, arc, meta_config
from perfedrl.studies.paper_tabular.study import VARIANTS, tabular
from perfedrl.types import Progress

SEEDS = 20
REPLICATES = 100
"""Number of estimates of each form in the comparison of variances."""

BATCHES = (10, 100)

LOW_VARIANCE = {"curvature": "causal", "baseline": "leave-one-out"}
RIDGE = {"curvature": "causal", "baseline": "ridge"}
"""Estimators of lower variance than the paper's."""
CURVATURE_SETTINGS: Mapping[str, tuple[dict, dict]] = MappingProxyType(
    {
        "score": ({}, PAPER),
        "causal": ({}, LOW_VARIANCE),
        "causal, ridge": ({}, RIDGE),
        "causal, alpha 0.5": ({"alpha": 0.5}, LOW_VARIANCE),
        "causal, ridge, alpha 0.5": ({"alpha": 0.5}, RIDGE),
        "central differences": ({}, {"curvature": "central-common", "baseline": "leave-one-out"}),
        "limited": ({"control": "limit"}, LOW_VARIANCE),
        "shrunk": ({"control": "shrink"}, LOW_VARIANCE),
    }
)
"""Ways to estimate and control the curvature term by name: settings of the algorithm, and of the config."""

AUTO, FIRST_ORDER = "auto", "first-order"
CLAIMED = (("limited", 10), ("causal, ridge, alpha 0.5", 100))
"""The settings and curvature batches that claims are about; the second is unbiased and, at half
the alpha, half as sensitive to noise."""

TABULAR_BETA = 0.7


def curvature_configs(seeds: int, quick: bool) -> dict[tuple, Config]:
    """The exact variant by curvature setting and batch, otherwise as in the paper; and the gridworld variants."""
    shared = {"name": "per-fedavg-pg", "alpha": 1.0, "beta": 0.2, "local_steps": 5, "m_in": 10, "m_out": 10}
    measured = {"evaluate_every": 50, "evaluation": {"name": "monte-carlo"}}

    def run(setting: str, m: int, algorithm: dict, settings: dict) -> Config:
        name = f"{setting.replace(', ', '-').replace(' ', '-')}-mh{m}"
        return arc(name, seeds, {**shared, "m_h": m, **algorithm}, **measured, **settings)

    configs: dict[tuple, Config] = {
        (setting, m): run(setting, m, *made)
        for setting, made in CURVATURE_SETTINGS.items()
        for m in ((10,) if quick else BATCHES)
    }
    configs[AUTO, 10] = run(AUTO, 10, {"control": "auto"}, LOW_VARIANCE)
    configs[FIRST_ORDER, 0] = run(FIRST_ORDER, 0, {"variant": "first-order"}, LOW_VARIANCE)
    for variant in VARIANTS:
        configs[variant, "grid"] = tabular(variant, 2.0, seeds, TABULAR_BETA, "-quiet", **LOW_VARIANCE)
    return configs


class Evidence(NamedTuple):
    """The runs, and the variances of unbiased curvature forms along the paper's own training."""

    runs: Runs
    comparison: EstimatorComparison


def compare(runs: Runs, progress: Progress) -> Evidence:
    """Compare the causal form with the paper's on all agents, with curvature batches of a hundred."""
    config = meta_config(1)
    comparison = compare_estimators(
        config,
        m=100,
        replicates=REPLICATES,
        agents=config.experiment.fleet.agents,
        forms=("score", "causal"),
        baselines=("leave-one-out", "ridge"),
        progress=progress,
    )
    return Evidence(runs, comparison)


def curvature(evidence: Evidence) -> list[Claim]:
    """Returns of the exact variant with small curvature batches, F on the gridworld at a larger beta, and variances."""
    runs, claims = evidence.runs, []
    for setting, m in CLAIMED:
        if (setting, m) in runs:
            values, what = final(runs[setting, m]), f"exact, {setting}, m_h = {m}"
            claims.append(median("curvature", f"median return (>= 2.2), {what}", 0.2, values, 2.2, np.inf))
            trained = f"seeds that train (return >= {TRAINS}), {what}"
            claims.append(fraction("curvature", trained, 0.0, values >= TRAINS, 1.0, 1.0))
    grid = {variant: final(runs[variant, "grid"]) for variant in VARIANTS}
    ordered = grid["exact"].mean() >= grid["first-order"].mean() >= grid["fedavg-pg"].mean()
    F = mean_interval(grid["exact"])
    return [
        *claims,
        single("curvature", "F on the gridworld (>= 0.90), exact", 0.79, F, 0.9, np.inf),
        everywhere("curvature", "exact >= first-order >= FedAvg-PG on the gridworld", np.asarray([ordered])),
        *least_variances(evidence.comparison),
    ]


def least_variances(comparison: EstimatorComparison) -> list[Claim]:
    """The least variance of an unbiased form relative to the paper's, at each stage; at most 0.1 at the last."""
    claims = []
    for stage in comparison.stages:
        best, last = comparison.recommendation(stage).best, stage == comparison.stages[-1]
        what = f"variance of '{best.estimator.name}' over the paper's, {stage} of training" + last * " (<= 0.1)"
        value, error = best.ratio
        measured = Interval(value, value - 2 * error, value + 2 * error)
        claims.append(single("curvature", what, 1.0, measured, 0.0, 0.1 if last else np.inf))
    return claims
