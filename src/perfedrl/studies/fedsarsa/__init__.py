"""FedSARSA's error by heterogeneity and by the number of agents."""

from perfedrl.studies.base import Study, no_configs
from perfedrl.studies.fedsarsa import figures
from perfedrl.studies.fedsarsa.study import SEEDS, measurements, sarsa_claims

FEDSARSA = Study(
    "fedsarsa",
    "FedSARSA's error by heterogeneity and agents",
    no_configs,
    sarsa_claims,
    figures.fedsarsa,
    seeds=SEEDS,
    measurements=measurements,
)
