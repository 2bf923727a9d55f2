"""The largest distance between an honest upload and the message: Lemma 4, where it applies."""

import dataclasses
import math
from typing import Any

from perfedrl.algorithms import SGMRL, Attacked, FedAvgPG, PerFedAvgPG, Personal, Robust, StormPG
from perfedrl.errors import UserError
from perfedrl.estimators.advantages import RewardToGo
from perfedrl.estimators.baselines import LeaveOneOut, Nothing
from perfedrl.estimators.curvature import FromBatch, pairs
from perfedrl.experiments.config import Config
from perfedrl.federation.server.upload_checks import ROUNDING
from perfedrl.theory.bounds import drift
from perfedrl.theory.worst_case import constants

ROUNDING_OF_CLIP = 1e-3
"""Relative rounding error of a clipped length in single precision: the norm is itself a sum of many numbers."""


def hard_bound(config: Config) -> float | None:
    """A proven upper bound on the distance between an honest upload and the message; None where none is proven.

    The smaller of Lemma 4(i), beta tau G_F, and beta tau `clip` where the algorithm clips its steps. The constants are
    those of the config's fleet: an agent whose own rewards, discount or horizon are larger is not covered. Noise for
    privacy is unbounded.
    """
    if config.privacy is not None:
        return None
    algorithm = config.experiment.algorithm
    while isinstance(algorithm, Robust | Attacked | Personal):  # with these an honest agent sends as much, or less
        algorithm = algorithm.inner
    bounds = _clipped(algorithm), _drift(config.experiment, algorithm)
    return min((bound for bound in bounds if bound is not None and math.isfinite(bound)), default=None)


def _clipped(algorithm: Any) -> float | None:
    """Beta tau clip, for any estimator; None without a clip, or where a step size is learned or steps are not plain."""
    if type(algorithm) not in (PerFedAvgPG, StormPG, SGMRL) or algorithm.clip is None:
        return None
    if algorithm.learns_step_size or has_optimizer(algorithm):
        return None
    return float(algorithm.beta * algorithm.local_steps * algorithm.clip) * (1 + ROUNDING_OF_CLIP)


def has_optimizer(algorithm: Any) -> bool:
    """Whether an optimizer takes the local steps, whose length is then not that of the gradient."""
    return type(algorithm) is PerFedAvgPG and algorithm.local_optimizer is not None


def _drift(experiment: Any, algorithm: Any) -> float | None:
    """Beta tau G_F, where every local step is (I + alpha H) g with bounded H and g.

    A first-order step is g alone: G_F at alpha = 0. With the mean of other trajectories as the baseline, |R^h - b| is
    at most twice the bound on |R^h|, as if rewards were twice as large. A causal or lvc pair of decisions has the
    weight of its later decision, and the bounds on weights decrease with time: H is at most the score form's.
    """
    form, baseline, entropy, advantage = experiment.agent.forms
    scale = {Nothing: 1, LeaveOneOut: 2}.get(type(baseline)) if type(advantage) is RewardToGo else None
    learned_values = experiment.policy.value_fit is not None
    if type(algorithm) not in (FedAvgPG, PerFedAvgPG) or scale is None or entropy or learned_values:
        return None
    alpha = 0.0
    if type(algorithm) is PerFedAvgPG:
        if algorithm.learn_alpha != "no" or algorithm.control != "none" or has_optimizer(algorithm):
            return None
        alpha = float(algorithm.alpha) if algorithm.variant == "exact" else 0.0
        paired = isinstance(form, FromBatch) and form.form in (pairs.score, pairs.causal, pairs.lvc)
        if alpha > 0 and (algorithm.adaptation_steps > 1 or not paired):
            return None
    try:
        c = constants(experiment.fleet, experiment.policy, alpha)
    except UserError:
        return None
    scaled = dataclasses.replace(c, R_max=scale * c.R_max)
    return drift(scaled, float(algorithm.beta), algorithm.local_steps) * (1 + ROUNDING)
