"""How far an honest upload can be from the message: Lemma 4, where it applies."""

import dataclasses
import math
from typing import Any

from perfedrl.algorithms import SGMRL, Attacked, FedAvgPG, PerFedAvgPG, Personal, Robust, StormPG
from perfedrl.errors import UserError
from perfedrl.estimators.baselines import LeaveOneOut, Nothing
from perfedrl.estimators.curvature import FromBatch, pairs
from perfedrl.federation.server.upload_checks import ROUNDING
from perfedrl.theory.bounds import drift
from perfedrl.theory.worst_case import constants

ROUNDING_OF_CLIP = 1e-3
"""What single precision may add to a clipped length: the norm is itself a sum of many numbers."""


def hard_bound(config: Any) -> float | None:
    """The farthest that an honest agent's upload can be from the message, surely; None where nothing is proven.

    Lemma 4(i) by its constants, beta tau G_F, and beta tau `clip` where the algorithm clips its steps; the smaller of
    the two. The constants are those of the config's fleet: an agent whose own rewards, discount or horizon are larger
    than what the fleet says is not covered. Noise for privacy has no bound.
    """
    if config.privacy is not None:
        return None
    algorithm = config.parts.algorithm
    while isinstance(algorithm, Robust | Attacked | Personal):  # with these an honest agent sends as much, or less
        algorithm = algorithm.inner
    found = [x for x in (_clipped(algorithm), _drift(config.parts, algorithm)) if x is not None and math.isfinite(x)]
    return min(found, default=None)


def _clipped(algorithm: Any) -> float | None:
    """Beta tau clip, whatever is estimated and however; not where a learned step size moves along."""
    if type(algorithm) not in (PerFedAvgPG, StormPG, SGMRL) or algorithm.clip is None:
        return None
    if algorithm.learns_step_size:
        return None
    return float(algorithm.beta * algorithm.local_steps * algorithm.clip) * (1 + ROUNDING_OF_CLIP)


def _drift(parts: Any, algorithm: Any) -> float | None:
    """Beta tau G_F where every local step is (I + alpha H) g with bounded H and g.

    A first-order step is g alone, G_F at alpha = 0. Where the mean of other trajectories is the baseline, |R^h - b| is
    at most twice the bound on |R^h|, which is as if rewards were twice as large. A causal or lvc pair of decisions has
    the weight of its later decision, and the bounds on weights fall with time: H is no larger than the score form's.
    """
    form, baseline, entropy = parts.agent.forms
    reach = {Nothing: 1, LeaveOneOut: 2}.get(type(baseline))
    fits_values = parts.policy.value_fit is not None
    if type(algorithm) not in (FedAvgPG, PerFedAvgPG) or reach is None or entropy or fits_values:
        return None
    alpha = 0.0
    if type(algorithm) is PerFedAvgPG:
        if algorithm.learn_alpha != "no" or algorithm.control != "none":
            return None
        alpha = float(algorithm.alpha) if algorithm.variant == "exact" else 0.0
        paired = isinstance(form, FromBatch) and form.form in (pairs.score, pairs.causal, pairs.lvc)
        if alpha > 0 and (algorithm.adaptation_steps > 1 or not paired):
            return None
    try:
        c = constants(parts.fleet, parts.policy, alpha)
    except UserError:
        return None
    doubled = dataclasses.replace(c, R_max=reach * c.R_max)
    return drift(doubled, float(algorithm.beta), algorithm.local_steps) * (1 + ROUNDING)
