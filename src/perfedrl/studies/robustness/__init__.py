"""Robust aggregation against hostile agents."""

from perfedrl.studies.base import Study, no_configs
from perfedrl.studies.robustness import figures
from perfedrl.studies.robustness.collusion import collusion_claims, measurements
from perfedrl.studies.robustness.study import robustness, robustness_configs

ROBUSTNESS = Study(
    "robustness", "Hostile agents and robust aggregation", robustness_configs, robustness, figures.robustness
)
COLLUSION = Study(
    "collusion",
    "Colluding agents and robust aggregation",
    no_configs,
    collusion_claims,
    figures.colluding,
    measurements=measurements,
)
