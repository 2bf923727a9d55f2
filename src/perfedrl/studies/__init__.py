"""The registry of studies: the paper's experiments, its theory, and studies beyond it.

Each study has a folder with its configs, claims and figures. `perfedrl reproduce` takes names of studies and of groups.
"""

from collections.abc import Mapping
from types import MappingProxyType

from perfedrl.studies.actuators import ACTUATORS
from perfedrl.studies.base import Study
from perfedrl.studies.client_sampling import CLIENT_SAMPLING
from perfedrl.studies.curvature import CURVATURE
from perfedrl.studies.fast_fedpg import FAST_FEDPG
from perfedrl.studies.fednpg import FEDNPG
from perfedrl.studies.fedsarsa import FEDSARSA
from perfedrl.studies.few_shot import FEW_SHOT
from perfedrl.studies.glucose import GLUCOSE
from perfedrl.studies.gym_fleets import CART_POLES, PENDULUMS
from perfedrl.studies.homes import HOMES
from perfedrl.studies.locomotion import LOCOMOTION
from perfedrl.studies.lqr import LQR
from perfedrl.studies.navigation import NAVIGATION
from perfedrl.studies.paper_neural import E4, E5, E7
from perfedrl.studies.paper_tabular import E1, E3, E6
from perfedrl.studies.privacy import PRIVACY
from perfedrl.studies.robustness import COLLUSION, ROBUSTNESS
from perfedrl.studies.theory import THEORY

Studies = Mapping[str, Study]
"""Studies by name."""


def by_name(*studies: Study) -> Studies:
    return MappingProxyType({study.name: study for study in studies})


GROUPS: Mapping[str, Studies] = MappingProxyType(
    {
        "all": by_name(E1, E3, E4, E5, E6, E7, THEORY, CURVATURE, FEW_SHOT, ROBUSTNESS, PRIVACY, LQR),
        "families": by_name(NAVIGATION, CART_POLES, PENDULUMS, ACTUATORS, HOMES, GLUCOSE),
        "mechanisms": by_name(FEDNPG, FEDSARSA, FAST_FEDPG, CLIENT_SAMPLING, COLLUSION),
        "machines": by_name(LOCOMOTION),
    }
)
"""The groups of `perfedrl reproduce`: the paper with what goes beyond it on its own fleets ("all"), fleets of the
meta-RL literature and of people, homes and bodies that differ ("families"), claims of other mechanisms' papers and of
aggregations ("mechanisms"), and fleets that need a GPU to train ("machines")."""

STUDIES: Studies = by_name(*(study for group in GROUPS.values() for study in group.values()))
"""Every study by name."""

__all__ = ["GROUPS", "STUDIES", "Study"]
