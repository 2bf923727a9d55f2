"""The figure of the Fast-FedPG study: the gradient at rest by local steps."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, Axis, Lines, Plot, exact_series
from perfedrl.studies.fast_fedpg.study import LOCAL_STEPS, RESTS, Evidence, converged


def fast_fedpg(evidence: Evidence) -> list[Plot]:
    """The norm of the gradient at rest by local steps, without points where rounds oscillate."""
    found, tau = evidence[RESTS], np.asarray(LOCAL_STEPS, float)
    lines = []
    for name, label, color in (("fedavg-pg", "FedAvg-PG", GREEN), ("fast-fedpg", "Fast-FedPG", BLUE)):
        there = converged(found, name)
        without = "" if there.all() else f" (no rest at {', '.join(f'{t:g}' for t in tau[~there])})"
        lines.append(exact_series(label + without, tau[there], found[f"{name}.gradient"][there], color))
    at = Axis("local steps", "log", ticks=tuple(tau.tolist()))
    title, y_label = "Where noiseless rounds rest (two bandits, β = 0.1)", "|∇f| at rest (< 1e-11: zero)"
    return [Lines("mechanism-fast-fedpg", title, at, y_label, tuple(lines), (), y_scale="log")]
