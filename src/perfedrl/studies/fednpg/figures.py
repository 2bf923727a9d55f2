"""Figures of the FedNPG study: errors by round, without noise and from trajectories."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, Axis, Lines, Plot, Series, exact_series
from perfedrl.studies.fednpg.study import EXACT, SAMPLED, Evidence, npg_bound, rate
from perfedrl.studies.measurement_cache import Arrays

COLORS = (GREY, BLUE, ORANGE, GREEN, PINK)
ROUND = Axis("communication round k")
LOG_ERROR = "largest error of a log-probability"


def fednpg(evidence: Evidence) -> list[Plot]:
    """Errors by round without noise for each c, and from trajectories for each batch size."""
    exact, sampled = evidence[EXACT], evidence[SAMPLED]
    rounds, errors = exact["rounds"].astype(float), exact["errors.policy"]
    labels = [f"c = {c:g}" + (f", factor {rate(e):.3f} a round" if c < 1 else "") for c, e in shares(exact)]
    lines = [exact_series(label, rounds, e, color) for label, e, color in zip(labels, errors, COLORS, strict=False)]
    bound = exact_series("bound of rate 1 − c (1 − γ), c = 0.5", rounds[1:], npg_bound(exact, 1)[0], PINK, dashed=True)
    title = "FedNPG without noise to the regularized optimum (gridworld, λ = 0.1)"
    without = Lines("mechanism-fednpg", title, ROUND, LOG_ERROR, (*lines, bound), (), y_scale="log")
    series = [
        Series(f"{m} trajectories a round", sampled["rounds"].astype(float), x, color, centre="median")
        for m, x, color in zip(sampled["settings"], sampled["errors.policy"], (ORANGE, GREEN, BLUE), strict=True)
    ]
    series.append(exact_series("without noise", rounds, errors[-1], GREY, dashed=True))
    title, seeds = "FedNPG from trajectories (gridworld, c = 0.1)", tuple(range(sampled["errors.policy"].shape[1]))
    return [
        without,
        Lines("mechanism-fednpg-sampled", title, ROUND, LOG_ERROR, tuple(series), seeds, y_scale="log"),
    ]


def shares(exact: Arrays) -> list[tuple[float, np.ndarray]]:
    """Each c with its curve of errors."""
    return list(zip(exact["settings"].tolist(), exact["errors.policy"], strict=True))
