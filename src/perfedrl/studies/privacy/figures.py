"""The figure of the privacy study: return by privacy loss."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, Axis, Level, Lines, Plot, Series
from perfedrl.studies.base import Runs, final
from perfedrl.studies.privacy.study import CLIP, CLIPPED, NO_PRIVACY, NOISES, epsilon


def private(runs: Runs) -> list[Plot]:
    """Return after training by the privacy loss of the whole run."""
    plain = runs[NO_PRIVACY]
    noises = [x for x in NOISES if x in runs]
    at = np.asarray([epsilon(x, plain.config.rounds) for x in noises])
    values = np.stack([final(runs[x]) for x in noises], axis=1)
    label = f"clipped to {CLIP:g}, noise " + ", ".join(f"{x:g}" for x in reversed(noises))
    series = Series(label, at[::-1], values[:, ::-1], BLUE)
    levels = (
        Level("no privacy", float(final(plain).mean()), GREEN),
        Level("clipped, no noise", float(final(runs[CLIPPED]).mean()), ORANGE),
        Level("untrained", float(plain.history.after[:, 0].mean()), GREY),
    )
    axis = Axis("privacy loss ε of a whole run, at δ = 1e-5", "log", ticks=(10.0, 100.0, 1e3, 1e4))
    seeds = tuple(plain.config.seeds)
    return [Lines("privacy", "What privacy costs", axis, "return after adaptation", (series,), seeds, levels)]
