"""Which estimator to use: bias, variance and cost of every form on a config's own fleet, along its own training."""

from perfedrl.studies.estimators.candidates import CURVATURE, GRADIENT, Estimator
from perfedrl.studies.estimators.comparison import AGENTS, REPLICATES, Row, Study, Verdict, measure
from perfedrl.studies.estimators.moments import Error, Measured
from perfedrl.studies.estimators.points import REFERENCE, STAGES

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
