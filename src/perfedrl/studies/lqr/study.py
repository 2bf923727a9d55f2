"""Measurements and claims: federated initializations for linear-quadratic regulators (MAML-LQR in the paper's Table 1).

Everything is computed from Lyapunov equations; nothing is sampled. Step sizes and the bounds of the claims were chosen
on other fleets (seeds 0 to 7 and 100 to 105) than the reported ones.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from perfedrl.algorithms import FedAvgPG, PerFedAvgPG
from perfedrl.envs import lqr
from perfedrl.exact import lqr as exact_lqr
from perfedrl.experiments.stats import mean_interval
from perfedrl.policies import LinearGaussian
from perfedrl.studies.claims import Claim, everywhere, point, single
from perfedrl.studies.lqr.training import costs, descend
from perfedrl.types import Progress

STEP: Mapping[float, float] = MappingProxyType({0.0: 0.04, 0.1: 0.04, 0.5: 0.005})
"""The adaptation step size by heterogeneity epsilon. At 0.5 larger ones make some unseen systems unstable."""
BETA, LOCAL_STEPS = 2e-3, 5
WARM, ROUNDS, FROM, EVERY = 100, 300, 40, 10
"""Rounds of FedAvg-PG that both methods begin with, rounds in total, first measured round, and rounds between
measurements.

At the usual start the cost has curvatures of 4,000, near an optimum 8: an adaptation step that is useful near the
optimum would leave the stabilizing gains at the start.
"""
FLEETS, AGENTS, UNSEEN = range(200, 205), 10, 20
"""Seeds of the fleets, and the numbers of training and of unseen systems in each."""
GAIN = 1.62 * np.eye(3)
METHODS = ("meta", "fedavg")
BEFORE, AFTER = "before", "after"
ROUNDING, DIGITS = 1e-10, 6
"""Relative gaps below ROUNDING count as zero; others are rounded to DIGITS, since more differ between processors."""


class RelativeCosts(NamedTuple):
    """Relative costs above the optimum of unseen systems, mean over systems, by (method, before or after one step).

    `average_optimal` are those of the gain with the least mean cost over training systems.
    """

    rounds: np.ndarray
    gaps: dict[tuple[str, str], Float[np.ndarray, "fleet x"]]
    average_optimal: dict[str, Float[np.ndarray, " fleet"]]
    trained: Float[np.ndarray, "fleet 2"]
    """Gaps of training systems after one step from the meta-learned gain and from the average-optimal one."""
    start_radii: np.ndarray
    radii: np.ndarray
    """Spectral radii of all systems at the start, and of unseen ones after one step from the meta-learned gain."""


Outcomes = dict[float, RelativeCosts]
"""Outcomes by heterogeneity."""


def measure(progress: Progress = lambda _: None) -> Outcomes:
    """Measure both methods at every heterogeneity; takes about ten seconds."""
    found = {}
    for epsilon in STEP:
        progress(f"epsilon = {epsilon:g}")
        # Without heterogeneity all fleets are the same.
        found[epsilon] = joined([one_fleet(epsilon, seed) for seed in (FLEETS if epsilon else FLEETS[:1])])
    return found


def one_fleet(epsilon: float, seed: int) -> dict[str, Any]:
    """Both methods and the average-optimal gain on one fleet, measured on unseen systems."""
    fleet, alpha = lqr(AGENTS, UNSEEN, seed, epsilon), STEP[epsilon]
    train, unseen = exact_lqr.systems(fleet), exact_lqr.systems(fleet, held_out=True)
    plain = descend(fleet, LinearGaussian(GAIN), FedAvgPG(alpha, BETA, LOCAL_STEPS), ROUNDS).gains
    meta = PerFedAvgPG(alpha, BETA, LOCAL_STEPS)
    late = descend(fleet, LinearGaussian(plain[WARM]), meta, ROUNDS - WARM).gains
    gains = {"fedavg": plain, "meta": np.concatenate([plain[:WARM], late])}
    average = np.asarray(exact_lqr.average_optimal_gain(train, plain[-1]))

    least = [exact_lqr.cost(task, exact_lqr.optimal_gain(task)) for task in (*train, *unseen)]

    def gaps(gains: np.ndarray, when: str, part: Any = fleet.held_out, best: Any = least[AGENTS:]) -> np.ndarray:
        """Relative costs above each system's optimum, mean over systems; at least ROUNDING."""
        above = costs(part, gains, alpha * (when == AFTER)) / np.asarray(best) - 1
        mean = np.maximum(above, ROUNDING).mean(axis=1)
        return np.asarray([float(f"{x:.{DIGITS}g}") for x in mean])

    own = [exact_lqr.adapted(task, gains["meta"][-1], alpha) for task in unseen]
    return {
        "gaps": {(m, when): gaps(gains[m][FROM::EVERY], when) for m in METHODS for when in (BEFORE, AFTER)},
        "average": {when: float(gaps(average[None], when)[0]) for when in (BEFORE, AFTER)},
        "trained": gaps(np.stack([gains["meta"][-1], average]), AFTER, fleet.train, least[:AGENTS]),
        "start": [exact_lqr.radius(task, GAIN) for task in (*train, *unseen)],
        "radii": [exact_lqr.radius(task, K) for task, K in zip(unseen, own, strict=True)],
    }


def joined(fleets: list[dict[str, Any]]) -> RelativeCosts:
    """The outcome of several fleets, stacked."""
    return RelativeCosts(
        np.arange(FROM, ROUNDS + 1, EVERY),
        {key: np.stack([f["gaps"][key] for f in fleets]) for key in fleets[0]["gaps"]},
        {key: np.asarray([f["average"][key] for f in fleets]) for key in fleets[0]["average"]},
        np.stack([f["trained"] for f in fleets]),
        np.concatenate([f["start"] for f in fleets]),
        np.concatenate([f["radii"] for f in fleets]),
    )


def claims(found: Outcomes) -> list[Claim]:
    """Gaps of unseen systems after one step from the learned initialization, and stability."""
    same = found[0.0]
    largest = max(float(x[:, -1].max()) for x in same.gaps.values())
    made = [
        everywhere(
            "lqr",
            "systems that the gain 1.62 I stabilizes",
            np.concatenate([o.start_radii for o in found.values()]) < 1,
        ),
        everywhere(
            "lqr", "unseen systems that one step leaves stable", np.concatenate([o.radii for o in found.values()]) < 1
        ),
        single("lqr", "relative cost above the optimum (<= 1e-9), epsilon = 0", 0.0, point(largest), 0.0, 1e-9),
    ]
    for epsilon, outcome in found.items():
        if epsilon:
            one_step, level = outcome.gaps["meta", AFTER][:, -1], f"epsilon = {epsilon:g}"
            ratio = mean_interval(outcome.trained[:, 0] / outcome.trained[:, 1])
            what = f"gap of training systems after one step, meta over average-optimal (< 1), {level}"
            made.append(single("lqr", what, np.nan, ratio, 0.0, np.nextafter(1, 0)))
            for when, bound, most in ((BEFORE, "< 1", np.nextafter(1, 0)), (AFTER, "<= 1.1", 1.1)):
                against = "with its own step" if when == AFTER else "without a step"
                what = (
                    f"gap of unseen systems after one step over the average-optimal gain's {against} ({bound}), {level}"
                )
                ratio = mean_interval(one_step / outcome.average_optimal[when])
                made.append(single("lqr", what, np.nan, ratio, 0.0, most))
    return made
