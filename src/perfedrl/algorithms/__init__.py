"""Algorithms: one file each, one registry line each; the line enrols it in every contract test."""

from perfedrl.algorithms.base import Algorithm, ServerState, average, local_steps
from perfedrl.algorithms.fedavg_pg import FedAvgPG
from perfedrl.algorithms.local_pg import LocalPG
from perfedrl.algorithms.per_fedavg_pg import PerFedAvgPG
from perfedrl.algorithms.sg_mrl import SGMRL
from perfedrl.algorithms.storm import StormPG
from perfedrl.registry import registry

ALGORITHMS = registry(
    "algorithm",
    fedavg_pg=FedAvgPG,
    local_pg=LocalPG,
    per_fedavg_pg=PerFedAvgPG,
    sg_mrl=SGMRL,
    per_fedavg_storm=StormPG,
)

__all__ = [
    "ALGORITHMS",
    "SGMRL",
    "Algorithm",
    "FedAvgPG",
    "LocalPG",
    "PerFedAvgPG",
    "ServerState",
    "StormPG",
    "average",
    "local_steps",
]
