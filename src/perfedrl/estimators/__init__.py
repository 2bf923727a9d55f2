"""Estimators: trajectories in, gradients and curvature products out."""

from perfedrl.estimators.curvature import CURVATURES, score, score_matrix
from perfedrl.estimators.gradient import log_probs, policy_gradient
from perfedrl.estimators.meta import StepKeys, adapt, first_order_gradient, meta_gradient
from perfedrl.estimators.objective import Objective, PolicyObjective, Sampled
from perfedrl.estimators.returns import reward_to_go
from perfedrl.types import Trajectory

__all__ = [
    "CURVATURES",
    "Objective",
    "PolicyObjective",
    "Sampled",
    "StepKeys",
    "Trajectory",
    "adapt",
    "first_order_gradient",
    "log_probs",
    "meta_gradient",
    "policy_gradient",
    "reward_to_go",
    "score",
    "score_matrix",
]
