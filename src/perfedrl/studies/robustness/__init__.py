"""Robust aggregation against hostile agents."""

from perfedrl.studies.base import Study
from perfedrl.studies.robustness import figures
from perfedrl.studies.robustness.study import robustness, robustness_configs

ROBUSTNESS = Study(
    "robustness", "Hostile agents and robust aggregation", robustness_configs, robustness, figures.robustness
)
