"""Federated algorithms, one file and one registry line each; the line enrols an algorithm in every contract test.

`base.py` is their contract. Wrappers, whose base is `wrapper.py` and whose order is in `composition.py`: `personal.py`
(parameters that stay with the agents), `private.py` (clipping and noise), `aggregation.py` (robust combination of
uploads), `fedopt.py` (server optimizers), `control_variate.py` (correction of client sampling and drift), `attacks.py`.
"""

from perfedrl.algorithms.afedpg import AFedPG
from perfedrl.algorithms.aggregation import AGGREGATIONS, Aggregation, Robust
from perfedrl.algorithms.attacks import ATTACKS, Attack, Attacked
from perfedrl.algorithms.base import Algorithm, ServerState, average, local_steps, static
from perfedrl.algorithms.clustered import Clustered
from perfedrl.algorithms.context import ContextAdaptation
from perfedrl.algorithms.control_variate import ControlVariate
from perfedrl.algorithms.fast_fedpg import FastFedPG
from perfedrl.algorithms.fedavg_pg import FedAvgPG
from perfedrl.algorithms.fednpg import FedNPG
from perfedrl.algorithms.fedopt import FedOpt
from perfedrl.algorithms.fedppo import FedPPO
from perfedrl.algorithms.fedsarsa import FedSARSA
from perfedrl.algorithms.fine_tuned import FineTuned
from perfedrl.algorithms.from_scratch import FromScratch
from perfedrl.algorithms.local_pg import LocalPG
from perfedrl.algorithms.mixing import Mixing
from perfedrl.algorithms.per_fedavg_pg import PerFedAvgPG
from perfedrl.algorithms.per_fedavg_trpo import PerFedAvgTRPO
from perfedrl.algorithms.personal import Personal
from perfedrl.algorithms.pfedme import PFedMe
from perfedrl.algorithms.pmeta_rl import PMetaRL
from perfedrl.algorithms.private import Private, privatize
from perfedrl.algorithms.promp import ProMP
from perfedrl.algorithms.reptile import Reptile
from perfedrl.algorithms.sg_mrl import SGMRL
from perfedrl.algorithms.shared_representation import SharedRepresentation
from perfedrl.algorithms.softmax_fedpg import SoftmaxFedPG
from perfedrl.algorithms.storm import StormPG
from perfedrl.algorithms.wrapper import Wrapper, unwrapped
from perfedrl.estimators import adapt
from perfedrl.registry import registry

ALGORITHMS = registry(
    "algorithm",
    Algorithm,
    afedpg=AFedPG,
    clustered=Clustered,
    context=ContextAdaptation,
    fedavg_pg=FedAvgPG,
    fednpg=FedNPG,
    fedppo=FedPPO,
    fedsarsa=FedSARSA,
    fast_fedpg=FastFedPG,
    fine_tuned=FineTuned,
    from_scratch=FromScratch,
    reptile=Reptile,
    softmax_fedpg=SoftmaxFedPG,
    local_pg=LocalPG,
    mixing=Mixing,
    pfedme=PFedMe,
    pmeta_rl=PMetaRL,
    promp=ProMP,
    shared_representation=SharedRepresentation,
    per_fedavg_pg=PerFedAvgPG,
    sg_mrl=SGMRL,
    per_fedavg_storm=StormPG,
    per_fedavg_trpo=PerFedAvgTRPO,
)

__all__ = [
    "AGGREGATIONS",
    "ALGORITHMS",
    "ATTACKS",
    "SGMRL",
    "AFedPG",
    "Aggregation",
    "Algorithm",
    "Attack",
    "Attacked",
    "Clustered",
    "ContextAdaptation",
    "ControlVariate",
    "FastFedPG",
    "FedAvgPG",
    "FedNPG",
    "FedOpt",
    "FedPPO",
    "FedSARSA",
    "FineTuned",
    "FromScratch",
    "LocalPG",
    "Mixing",
    "PFedMe",
    "PMetaRL",
    "PerFedAvgPG",
    "PerFedAvgTRPO",
    "Personal",
    "Private",
    "ProMP",
    "Reptile",
    "Robust",
    "ServerState",
    "SharedRepresentation",
    "SoftmaxFedPG",
    "StormPG",
    "Wrapper",
    "adapt",
    "average",
    "local_steps",
    "privatize",
    "static",
    "unwrapped",
]
