"""Which estimator to use: bias, variance and cost of every form on a config's own fleet, along its own training."""

from perfedrl.experiments.estimators.candidates import CURVATURE, GRADIENT, Estimator
from perfedrl.experiments.estimators.moments import Error, Measured
from perfedrl.experiments.estimators.points import REFERENCE, STAGES
from perfedrl.experiments.estimators.study import AGENTS, REPLICATES, Row, Study, Verdict, measure

__all__ = [
    "AGENTS",
    "CURVATURE",
    "GRADIENT",
    "REFERENCE",
    "REPLICATES",
    "STAGES",
    "Error",
    "Estimator",
    "Measured",
    "Row",
    "Study",
    "Verdict",
    "measure",
]
