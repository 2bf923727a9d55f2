"""FedNPG's geometric convergence to the exact regularized optimum."""

from perfedrl.studies.base import Study, no_configs
from perfedrl.studies.fednpg import figures
from perfedrl.studies.fednpg.study import SEEDS, measurements, npg_claims

FEDNPG = Study(
    "fednpg",
    "FedNPG converges geometrically",
    no_configs,
    npg_claims,
    figures.fednpg,
    seeds=SEEDS,
    measurements=measurements,
)
