"""Estimators of gradients and Hessian-vector products from sampled trajectories."""

from perfedrl.estimators.advantages import ADVANTAGES, Advantage, credit
from perfedrl.estimators.baselines import BASELINES, Baseline
from perfedrl.estimators.batch import SampledBatch
from perfedrl.estimators.curvature import CURVATURES, Curvature, FromBatch
from perfedrl.estimators.curvature_control import CONTROLS, CurvatureControl
from perfedrl.estimators.gradient import UNBIASED, Credit, log_probs, policy_gradient, reward_to_go
from perfedrl.estimators.meta import StepKeys, adapt, first_order_gradient, meta_gradient
from perfedrl.estimators.objective import (
    ADVANTAGE,
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
    "ADVANTAGE",
    "ADVANTAGES",
    "BASELINE",
    "BASELINES",
    "CONTROLS",
    "CURVATURE",
    "CURVATURES",
    "PAPER",
    "UNBIASED",
    "Advantage",
    "Baseline",
    "Credit",
    "Curvature",
    "CurvatureControl",
    "Forms",
    "FromBatch",
    "Objective",
    "PolicyObjective",
    "Sampled",
    "SampledBatch",
    "StepKeys",
    "Trajectory",
    "adapt",
    "credit",
    "first_order_gradient",
    "forms",
    "log_probs",
    "meta_gradient",
    "policy_gradient",
    "reward_to_go",
]
