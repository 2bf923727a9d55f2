"""2-D navigation of the meta-RL literature."""

from perfedrl.studies.base import Study
from perfedrl.studies.navigation import figures
from perfedrl.studies.navigation.study import point_claims, point_configs, point_measurements

NAVIGATION = Study(
    "navigation",
    "2-D navigation after one step",
    point_configs,
    point_claims,
    figures.navigation,
    measurements=point_measurements,
)
