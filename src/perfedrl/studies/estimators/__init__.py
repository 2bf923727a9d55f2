"""Bias, variance and cost of every estimator on a config's fleet, along its training."""

from perfedrl.studies.estimators.candidates import CURVATURE, GRADIENT, Estimator
from perfedrl.studies.estimators.comparison import (
    AGENTS,
    REPLICATES,
    EstimatorComparison,
    EstimatorRow,
    Recommendation,
    compare_estimators,
)
from perfedrl.studies.estimators.moments import EstimateError, ValueWithError
from perfedrl.studies.estimators.points import REFERENCE, STAGES

__all__ = [
    "AGENTS",
    "CURVATURE",
    "GRADIENT",
    "REFERENCE",
    "REPLICATES",
    "STAGES",
    "EstimateError",
    "Estimator",
    "EstimatorComparison",
    "EstimatorRow",
    "Recommendation",
    "ValueWithError",
    "compare_estimators",
]
