"""Client drift: absent in Fast-FedPG, present in FedAvg-PG."""

from perfedrl.studies.base import Study, no_configs
from perfedrl.studies.fast_fedpg import figures
from perfedrl.studies.fast_fedpg.study import drift_claims, measurements

FAST_FEDPG = Study(
    "fast-fedpg",
    "Fast-FedPG rests without drift",
    no_configs,
    drift_claims,
    figures.fast_fedpg,
    measurements=measurements,
)
