"""The paper's experiments: which configs stand behind a figure, and what the paper claims of it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from perfedrl.experiments.config import Config
from perfedrl.studies.base import Claim, Experiment, Runs
from perfedrl.studies.curvature.study import CURVATURE, FEWSHOT
from perfedrl.studies.gym_fleets.study import GYM_FLEETS
from perfedrl.studies.lqr.study import LQR
from perfedrl.studies.measurement_cache import Kept
from perfedrl.studies.mechanisms.study import MECHANISMS as MECHANISM_STUDIES
from perfedrl.studies.navigation.study import NAVIGATION
from perfedrl.studies.paper_neural.study import E4, E5, E7
from perfedrl.studies.paper_tabular.study import E1, E3, E6
from perfedrl.studies.robustness.study import PRIVACY, ROBUSTNESS
from perfedrl.studies.theory.study import THEORY

QUICK_SEEDS = 4

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {e.name: e for e in (E1, E3, E4, E5, E6, E7, THEORY, CURVATURE, FEWSHOT, ROBUSTNESS, PRIVACY, LQR)}
)

FAMILIES: Mapping[str, Experiment] = MappingProxyType({e.name: e for e in (NAVIGATION, *GYM_FLEETS)})
"""On the field's own families, some of them in Gymnasium, which is an extra: apart from `all`."""

MECHANISMS: Mapping[str, Experiment] = MappingProxyType({e.name: e for e in MECHANISM_STUDIES})
"""What other mechanisms' papers claim of them."""

KNOWN: Mapping[str, Experiment] = MappingProxyType({**EXPERIMENTS, **FAMILIES, **MECHANISMS})


def seeds_of(experiment: Experiment, seeds: int | None = None, quick: bool = False) -> int:
    """How many seeds to repeat an experiment with: the given number, or as many as it is meant for."""
    return seeds or (QUICK_SEEDS if quick else experiment.seeds)


def all_configs(experiments: Sequence[Experiment], seeds: int | None = None, quick: bool = False) -> list[Config]:
    """Every config that some experiments need, once each."""
    made = (config for e in experiments for config in e.configs(seeds_of(e, seeds, quick), quick).values())
    return list({config.folder: config for config in made}.values())


__all__ = [
    "EXPERIMENTS",
    "FAMILIES",
    "KNOWN",
    "MECHANISMS",
    "QUICK_SEEDS",
    "Claim",
    "Experiment",
    "Kept",
    "Runs",
    "all_configs",
    "seeds_of",
]
