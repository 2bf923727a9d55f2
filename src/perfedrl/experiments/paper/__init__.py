"""The paper's experiments: which configs stand behind a figure, and what the paper claims of it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from perfedrl.experiments.config import Config
from perfedrl.experiments.paper.claims import Claim, Experiment, Runs
from perfedrl.experiments.paper.neural import E4, E5, E7
from perfedrl.experiments.paper.tabular import E1, E3, E6
from perfedrl.experiments.paper.theory import THEORY

SEEDS, QUICK_SEEDS = 10, 4

EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType({e.name: e for e in (E1, E3, E4, E5, E6, E7, THEORY)})


def all_configs(experiments: Sequence[Experiment], seeds: int, quick: bool = False) -> list[Config]:
    """Every config that some experiments need, once each."""
    unique = {config.folder: config for e in experiments for config in e.configs(seeds, quick).values()}
    return list(unique.values())


__all__ = ["EXPERIMENTS", "QUICK_SEEDS", "SEEDS", "Claim", "Experiment", "Runs", "all_configs"]
