"""The figures of what other mechanisms' papers claim: errors by round, where rounds rest, what sampling costs."""

import numpy as np

from perfedrl.report.plots import BLUE, GREEN, GREY, ORANGE, PINK, SKY, Axis, Level, Lines, Plot, Series
from perfedrl.studies.measurement_cache import Arrays
from perfedrl.studies.mechanisms import study as study
from perfedrl.studies.mechanisms.shared_policy import plateau

COLORS = (GREY, BLUE, ORANGE, GREEN, PINK)
ROUND = Axis("communication round k")
LOG_ERROR = "largest error of a log-probability"
METHODS = {
    "full": ("all agents", GREEN, True),
    "plain": ("a quarter", GREY, False),
    "slow": ("a quarter, server rate 1/4", SKY, False),
    "round": ("and control variates of rounds", BLUE, False),
    "step": ("and control variates of steps", ORANGE, False),
}
PER_AGENT = Axis("rounds that an agent takes part in, on average")
LESS = "return after adaptation, less that of all agents"


def fednpg(evidence: study.Evidence) -> list[Plot]:
    """Errors by round without noise, at each c, and from trajectories."""
    exact, sampled = evidence[study.EXACT], evidence[study.SAMPLED]
    rounds, errors = exact["rounds"].astype(float), exact["errors.policy"]
    labels = [f"c = {c:g}" + (f", factor {study.rate(e):.3f} a round" if c < 1 else "") for c, e in shares(exact)]
    lines = [exactly(label, rounds, e, color) for label, e, color in zip(labels, errors, COLORS, strict=False)]
    bound = exactly("bound of rate 1 − c (1 − γ), c = 0.5", rounds[1:], study.npg_bound(exact, 1)[0], PINK, dashed=True)
    title = "FedNPG without noise to the regularized optimum (gridworld, λ = 0.1)"
    without = Lines("mechanism-fednpg", title, ROUND, LOG_ERROR, (*lines, bound), (), y_scale="log")
    series = [
        Series(f"{m} trajectories a round", sampled["rounds"].astype(float), x, color, centre="median")
        for m, x, color in zip(sampled["settings"], sampled["errors.policy"], (ORANGE, GREEN, BLUE), strict=True)
    ]
    series.append(exactly("without noise", rounds, errors[-1], GREY, dashed=True))
    title, seeds = "FedNPG from trajectories (gridworld, c = 0.1)", tuple(range(sampled["errors.policy"].shape[1]))
    return [
        without,
        Lines("mechanism-fednpg-sampled", title, ROUND, LOG_ERROR, tuple(series), seeds, y_scale="log"),
    ]


def shares(exact: Arrays) -> list[tuple[float, np.ndarray]]:
    return list(zip(exact["settings"].tolist(), exact["errors.policy"], strict=True))


def fedsarsa(evidence: study.Evidence) -> list[Plot]:
    """Distances by round and heterogeneity, and their plateaus by heterogeneity and by the number of agents."""
    found, by_agents = evidence[study.HETEROGENEITY], evidence[study.AGENTS]
    levels, rounds = found["settings"], found["rounds"].astype(float)
    curves = tuple(
        exactly(f"heterogeneity {level:g}", rounds, y, color)
        for level, y, color in zip(levels, found["errors.mean"], COLORS, strict=True)
    )
    where = "distance of Q to its rest point"
    title = "FedSARSA without noise (8 random MDPs, 5 local steps)"
    by_round = Lines("mechanism-fedsarsa", title, ROUND, f"{where}, mean MDP", curves, (), y_scale="log")
    heights = tuple(
        exactly(f"{label}, slope {study.power(levels[1:], y[1:]):.2f}", levels[1:], y[1:], color)
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
    """The plateau by the number of equal agents, beside the root of it."""
    n, heights = found["settings"].astype(float), plateau(found["errors.mean"]).T
    slope = np.mean([study.power(n, seed) for seed in heights])
    series = (
        Series(f"one trajectory a step, slope {slope:.2f}", n, heights, BLUE),
        exactly("slope -0.5", n, heights[:, 0].mean() * n**-0.5, GREY, dashed=True),
    )
    at = Axis("equal agents", "log", ticks=tuple(n.tolist()))
    title, seeds = "FedSARSA's plateau with noise", tuple(range(len(heights)))
    return Lines("mechanism-fedsarsa-agents", title, at, where, series, seeds, y_scale="log")


def fast_fedpg(evidence: study.Evidence) -> list[Plot]:
    """The gradient that is left at rest, by local steps; where rounds go on for ever there is no point."""
    found, tau = evidence[study.RESTS], np.asarray(study.LOCAL_STEPS, float)
    lines = []
    for name, label, color in (("fedavg-pg", "FedAvg-PG", GREEN), ("fast-fedpg", "Fast-FedPG", BLUE)):
        there = study.rested(found, name)
        without = "" if there.all() else f" (no rest at {', '.join(f'{t:g}' for t in tau[~there])})"
        lines.append(exactly(label + without, tau[there], found[f"{name}.gradient"][there], color))
    at = Axis("local steps", "log", ticks=tuple(tau.tolist()))
    title, y_label = "Where noiseless rounds rest (two bandits, β = 0.1)", "|∇f| at rest (< 1e-11: zero)"
    return [Lines("mechanism-fast-fedpg", title, at, y_label, tuple(lines), (), y_scale="log")]


def client_sampling(evidence: study.Evidence) -> list[Plot]:
    """Training for long from the start; what a quarter of the agents lacks by round and by batch, at rest."""
    quiet = evidence[f"{study.REST}, {study.QUIET}"]
    level = study.ends(quiet)
    gap = float((level["full"] - level["plain"]).mean())
    series = tuple(
        Series(label, met(quiet, name, share=0.25), quiet[f"{name}.after"] - quiet["full.after"], color)
        for name, (label, color, _) in METHODS.items()
        if name != "full"
    )
    levels = Level("all agents", 0.0, GREEN), Level("90 % of the gap given back", (study.TARGET - 1) * gap, PINK)
    seeds = tuple(range(len(level["full"])))
    title = "Client sampling at rest, gridworld, no noise"
    resting = Lines("mechanism-sampling", title, PER_AGENT, LESS, series, seeds, levels)
    return [trained_long(evidence, seeds), resting, by_batch(evidence, seeds)]


def by_batch(evidence: study.Evidence, seeds: tuple[int, ...]) -> Lines:
    """What is lacking at the end, by batch size."""
    found = [study.ends(evidence[f"{study.REST}, batches of {m}"]) for m in study.BATCHES]
    m = np.asarray(study.BATCHES, float)
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


def trained_long(evidence: study.Evidence, seeds: tuple[int, ...]) -> Lines:
    """From the start with the paper's batches: ahead with more rounds at first, behind by their noise in the end."""
    m = study.BATCHES[0]
    found = evidence[f"{study.LONG}, batches of {m}"]
    series = tuple(
        Series(label, met(found, name, 1.0 if name == "full" else 0.25), found[f"{name}.after"], color, dashed)
        for name, (label, color, dashed) in METHODS.items()
    )
    y_label, title = "return after adaptation, mean over agents", f"Client sampling, gridworld, batches of {m}"
    return Lines("mechanism-sampling-long", title, PER_AGENT, y_label, series, seeds)


def met(found: Arrays, name: str, share: float) -> np.ndarray:
    """How many rounds an agent has been in at each evaluation."""
    return found[f"{name}.rounds"] * share


def exactly(label: str, x: np.ndarray, y: np.ndarray, color: str, dashed: bool = False) -> Series:
    """A line without seeds."""
    return Series(label, np.asarray(x, float), np.asarray(y)[None], color, dashed)
