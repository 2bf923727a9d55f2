"""Figures of the FedSARSA study: distances by round, and plateaus by heterogeneity and number of agents."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, Axis, Lines, Plot, Series, exact_series
from perfedrl.studies.fedsarsa.study import EQUAL_AGENTS, HETEROGENEITY, Evidence, plateau, power
from perfedrl.studies.measurement_cache import Arrays

COLORS = (GREY, BLUE, ORANGE, GREEN, PINK)
ROUND = Axis("communication round k")


def fedsarsa(evidence: Evidence) -> list[Plot]:
    """Distances by round for each heterogeneity, and plateaus by heterogeneity and by number of agents."""
    found, by_agents = evidence[HETEROGENEITY], evidence[EQUAL_AGENTS]
    levels, rounds = found["settings"], found["rounds"].astype(float)
    curves = tuple(
        exact_series(f"heterogeneity {level:g}", rounds, y, color)
        for level, y, color in zip(levels, found["errors.mean"], COLORS, strict=True)
    )
    where = "distance of Q to its rest point"
    title = "FedSARSA without noise (8 random MDPs, 5 local steps)"
    by_round = Lines("mechanism-fedsarsa", title, ROUND, f"{where}, mean MDP", curves, (), y_scale="log")
    heights = tuple(
        exact_series(f"{label}, slope {power(levels[1:], y[1:]):.2f}", levels[1:], y[1:], color)
        for label, color, y in (
            ("agents' own rest points, mean", BLUE, found["errors.own"][:, -1]),
            ("the mean MDP's", ORANGE, found["errors.mean"][:, -1]),
        )
    )
    at = Axis("heterogeneity", "log", ticks=tuple(levels[1:].tolist()))
    title = "FedSARSA's plateau without noise (8 random MDPs)"
    by_level = Lines("mechanism-fedsarsa-heterogeneity", title, at, where, heights, (), y_scale="log")
    return [by_round, by_level, agents(by_agents, where)]


def agents(found: Arrays, where: str) -> Lines:
    """The plateau by number of equal agents, with a line of slope -1/2."""
    n, heights = found["settings"].astype(float), plateau(found["errors.mean"]).T
    slope = np.mean([power(n, seed) for seed in heights])
    series = (
        Series(f"one trajectory a step, slope {slope:.2f}", n, heights, BLUE),
        exact_series("slope -0.5", n, heights[:, 0].mean() * n**-0.5, GREY, dashed=True),
    )
    at = Axis("equal agents", "log", ticks=tuple(n.tolist()))
    title, seeds = "FedSARSA's plateau with noise", tuple(range(len(heights)))
    return Lines("mechanism-fedsarsa-agents", title, at, where, series, seeds, y_scale="log")
