"""Estimators of gradients and Hessian-vector products from sampled trajectories."""

from perfedrl.estimators.baselines import BASELINES, Baseline
from perfedrl.estimators.curvature import CURVATURES, UNBIASED, Curvature, FromBatch
from perfedrl.estimators.curvature_control import CONTROLS, CurvatureControl
from perfedrl.estimators.gradient import Credit, log_probs, policy_gradient, reward_to_go
from perfedrl.estimators.meta import StepKeys, adapt, first_order_gradient, meta_gradient
from perfedrl.estimators.objective import (
    BASELINE,
    CURVATURE,
    PAPER,
    Forms,
    Objective,
    PolicyObjective,
    Sampled,
    forms,
)
from perfedrl.types import Trajectory

__all__ = [
    "BASELINE",
    "BASELINES",
    "CONTROLS",
    "CURVATURE",
    "CURVATURES",
    "PAPER",
    "UNBIASED",
    "Baseline",
    "Credit",
    "Curvature",
    "CurvatureControl",
    "Forms",
    "FromBatch",
    "Objective",
    "PolicyObjective",
    "Sampled",
    "StepKeys",
    "Trajectory",
    "adapt",
    "first_order_gradient",
    "forms",
    "log_probs",
    "meta_gradient",
    "policy_gradient",
    "reward_to_go",
]
