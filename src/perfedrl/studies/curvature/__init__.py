"""The curvature bottleneck, broken: the exact variant trained with small curvature batches."""

from perfedrl.studies.base import Study
from perfedrl.studies.curvature import figures
from perfedrl.studies.curvature.study import SEEDS, compare, curvature, curvature_configs

CURVATURE = Study(
    "curvature",
    "The curvature bottleneck, broken",
    curvature_configs,
    curvature,
    figures.curvature,
    measure=compare,
    seeds=SEEDS,
)
