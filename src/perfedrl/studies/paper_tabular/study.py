"""Configs and claims of the paper's tabular experiments: E1, E3 and E6."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from perfedrl.estimators import PAPER
from perfedrl.experiments.config import Config, parse_config
from perfedrl.experiments.stats import at_cost
from perfedrl.simulation.history import History
from perfedrl.studies.base import Runs, final
from perfedrl.studies.claims import Claim, everywhere, near

TOLERANCE = 0.03
"""Largest distance of a tabular mean from the paper's number."""

ALPHAS = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0)
UNDER_WAY = 0.1
"""Learning curves are compared after this share of the rounds."""

VARIANTS: Mapping[str, dict] = MappingProxyType(
    {
        "exact": {"name": "per-fedavg-pg", "variant": "exact", "m_in": 10, "m_h": 10, "m_out": 10},
        "first-order": {"name": "per-fedavg-pg", "variant": "first-order", "m_in": 10, "m_h": 10, "m_out": 10},
        "fedavg-pg": {"name": "fedavg-pg", "m": 30},
    }
)

LABELS = {"exact": "exact", "first-order": "first-order", "fedavg-pg": "FedAvg-PG"}

Key = tuple[str, float]
"""(variant, alpha)."""


def configs(alphas: Sequence[float]) -> Callable[[int, bool], dict[Key, Config]]:
    """Return a function that makes the configs of all variants at some alphas; quick ones are the same."""

    def make(seeds: int, _quick: bool) -> dict[Key, Config]:
        return {(v, alpha): tabular(v, alpha, seeds) for v in VARIANTS for alpha in alphas}

    return make


def tabular(variant: str, alpha: float, seeds: int, beta: float = 0.3, label: str = "", **settings) -> Config:
    """The config of a run on the paper's gridworld: K = 80, tau = 5, at most thirty trajectories per local step.

    Beta and estimators are the paper's by default.
    """
    return parse_config(
        {
            "name": f"grid-{variant}{label}-alpha{alpha:g}",
            "seeds": seeds,
            "rounds": 80,
            "evaluate_every": 2,
            "fleet": {"env": "gridworld"},
            "policy": {"name": "table"},
            "algorithm": {**VARIANTS[variant], "alpha": alpha, "beta": beta, "local_steps": 5},
            **PAPER,
            **settings,
        }
    )


def personalization(runs: Runs) -> list[Claim]:
    """E1, Section 6 "Personalization within federation"."""
    history = {variant: runs[variant, 2.0].history for variant in VARIANTS}
    exact = history["exact"]

    def at_8000(h: History) -> np.ndarray:
        return at_cost(h.after.mean(axis=-1), h.trajectories, 8000)

    return [
        near("e1", "F after adaptation, exact", 0.79, final(runs["exact", 2.0]), TOLERANCE),
        near("e1", "F after adaptation, first-order", 0.73, final(runs["first-order", 2.0]), TOLERANCE),
        near("e1", "F after adaptation, FedAvg-PG", 0.68, final(runs["fedavg-pg", 2.0]), TOLERANCE),
        near("e1", "return of the uniform policy", 0.243870, exact.before[:, 0].mean(axis=-1), tolerance=5e-7),
        near("e1", "f before adaptation, exact", 0.51, exact.before[:, -1].mean(axis=-1), TOLERANCE),
        near("e1", "F at 8000 trajectories per agent, first-order", 0.73, at_8000(history["first-order"]), TOLERANCE),
        near("e1", "F at 8000 trajectories per agent, exact", 0.71, at_8000(exact), TOLERANCE),
    ]


def step_size(runs: Runs) -> list[Claim]:
    """E3, Section 6 "The adaptation step size alpha"."""
    ends = {0.0: (0.49, 0.49, 0.48), 3.0: (0.92, 0.87, 0.78)}
    claims = [
        near(
            "e3",
            f"F at alpha = {alpha:g}, {LABELS[variant]}",
            value,
            final(runs[variant, alpha]),
            TOLERANCE,
        )
        for alpha, values in ends.items()
        for variant, value in zip(VARIANTS, values, strict=True)
    ]
    mean = {key: final(run).mean() for key, run in runs.items()}
    spread = np.asarray([mean["exact", alpha] - mean["fedavg-pg", alpha] for alpha in ALPHAS])
    ordered = [mean["exact", a] >= mean["first-order", a] >= mean["fedavg-pg", a] for a in ALPHAS[1:]]
    return [
        *claims,
        everywhere("e3", "steps of alpha at which exact draws further ahead of FedAvg-PG", np.diff(spread) > 0),
        everywhere("e3", "values of alpha > 0 at which exact >= first-order >= FedAvg-PG", np.asarray(ordered)),
    ]


def learning_curves(runs: Runs) -> list[Claim]:
    """E6, Appendix C "Tabular results in full"."""
    rounds = runs["exact", 2.0].history.rounds
    under_way = rounds >= UNDER_WAY * rounds[-1]
    curve = {variant: runs[variant, 2.0].history.after.mean(axis=(0, 2))[under_way] for variant in VARIANTS}
    return [
        everywhere(
            "e6",
            f"rounds from {rounds[under_way][0]} on at which {LABELS[above]} >= {LABELS[below]}",
            curve[above] >= curve[below],
        )
        for above, below in (("exact", "first-order"), ("first-order", "fedavg-pg"))
    ]
