"""Figures of client sampling: long training, and the loss at rest by round and by batch size."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, SKY, Axis, Level, Lines, Plot, Series
from perfedrl.studies.client_sampling.study import BATCHES, LONG, NO_NOISE, REST, TARGET, Evidence, ends
from perfedrl.studies.measurement_cache import Arrays

METHODS = {
    "full": ("all agents", GREEN, True),
    "plain": ("a quarter", GREY, False),
    "slow": ("a quarter, server rate 1/4", SKY, False),
    "round": ("and control variates of rounds", BLUE, False),
    "step": ("and control variates of steps", ORANGE, False),
}
PER_AGENT = Axis("rounds that an agent takes part in, on average")
LESS = "return after adaptation, less that of all agents"


def client_sampling(evidence: Evidence) -> list[Plot]:
    """Long training from the start; and at rest the loss of a quarter of the agents by round and by batch size."""
    quiet = evidence[f"{REST}, {NO_NOISE}"]
    level = ends(quiet)
    gap = float((level["full"] - level["plain"]).mean())
    series = tuple(
        Series(label, rounds_met(quiet, name, share=0.25), quiet[f"{name}.after"] - quiet["full.after"], color)
        for name, (label, color, _) in METHODS.items()
        if name != "full"
    )
    levels = Level("all agents", 0.0, GREEN), Level("90 % of the gap given back", (TARGET - 1) * gap, PINK)
    seeds = tuple(range(len(level["full"])))
    title = "Client sampling at rest, gridworld, no noise"
    resting = Lines("mechanism-sampling", title, PER_AGENT, LESS, series, seeds, levels)
    return [trained_long(evidence, seeds), resting, by_batch(evidence, seeds)]


def by_batch(evidence: Evidence, seeds: tuple[int, ...]) -> Lines:
    """The loss at the end by batch size."""
    found = [ends(evidence[f"{REST}, batches of {m}"]) for m in BATCHES]
    m = np.asarray(BATCHES, float)
    series = tuple(
        Series(label, m, np.stack([x[name] - x["full"] for x in found], axis=1), color)
        for name, (label, color, _) in METHODS.items()
        if name != "full"
    )
    at = Axis("trajectories per batch", "log", ticks=tuple(m.tolist()))
    return Lines(
        "mechanism-sampling-batches",
        "Client sampling at rest, gridworld",
        at,
        LESS,
        series,
        seeds,
        (Level("all agents", 0.0, GREEN),),
    )


def trained_long(evidence: Evidence, seeds: tuple[int, ...]) -> Lines:
    """Return by round from the start with the paper's batches: a quarter of the agents leads early and loses late."""
    m = BATCHES[0]
    found = evidence[f"{LONG}, batches of {m}"]
    series = tuple(
        Series(label, rounds_met(found, name, 1.0 if name == "full" else 0.25), found[f"{name}.after"], color, dashed)
        for name, (label, color, dashed) in METHODS.items()
    )
    y_label, title = "return after adaptation, mean over agents", f"Client sampling, gridworld, batches of {m}"
    return Lines("mechanism-sampling-long", title, PER_AGENT, y_label, series, seeds)


def rounds_met(found: Arrays, name: str, share: float) -> np.ndarray:
    """The mean number of rounds that an agent has taken part in, at each evaluation."""
    return found[f"{name}.rounds"] * share
