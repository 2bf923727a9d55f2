"""What the papers of other mechanisms claim of them, on exact quantities or held against exact solutions.

FedNPG converges geometrically, FedSARSA comes to rest by heterogeneity and number of agents, Fast-FedPG has no drift,
and control variates give back what client sampling costs. Nothing is trained by a config here: `kept.py` keeps what
was measured.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from perfedrl.algorithms import FastFedPG, FedAvgPG
from perfedrl.envs import gridworld
from perfedrl.experiments.stats import Interval, mean_interval
from perfedrl.studies.base import Claim, Experiment, everywhere, near, single
from perfedrl.studies.measurement_cache import Arrays, Measurement
from perfedrl.studies.mechanisms import shared_policy
from perfedrl.studies.mechanisms.client_sampling import MODES, as_published, sampling
from perfedrl.studies.mechanisms.shared_policy import ENTROPY, SHARES, plateau
from perfedrl.theory.noiseless_limits import CONVERGED, noiseless_limit
from perfedrl.theory.witness import attracting_witness

Evidence = Mapping[str, Arrays]

EXACT, SAMPLED, HETEROGENEITY, AGENTS, RESTS = "exact", "sampled", "heterogeneity", "agents", "rests"
ROUNDING = 1e-10
"""Errors are followed down to here; below, rounding takes over."""
SMOOTH = 20
"""The rounds, the last ones before rounding, over which a rate is fitted."""
DEEPEST = 1e-12

ALPHA, BETA = 0.5, 0.1
"""Of the agents whose local steps drift."""
LOCAL_STEPS = (1, 2, 5, 10, 20, 50, 100)
SHOWN = 20
"""The local steps at which drift is claimed."""

REST, LONG = "at rest", "trained for long"
QUIET = "without noise"
BATCHES = (10, 30, 100, 300)
RESTED, ROUNDS, LONG_ROUNDS = 3000, 80, 800
LAST = 5
"""Evaluations at the end of which the mean is taken."""
TARGET = 0.9
"""The share of the gap that control variates are asked to give back."""


class Rests(NamedTuple):
    """Where noiseless rounds end, by local steps: |grad f|, f, and how far the last two rounds went."""

    gradient: np.ndarray
    value: np.ndarray
    moved: np.ndarray


def rests(local_steps: Sequence[int], alpha: float, beta: float) -> dict[str, Rests]:
    """FedAvg-PG and Fast-FedPG on two bandits with opposed rewards."""
    fleet, policy = attracting_witness()
    found = {}
    for name, kind in (("fedavg-pg", FedAvgPG), ("fast-fedpg", FastFedPG)):
        made = [noiseless_limit(fleet, policy, kind(alpha, beta, local_steps=tau)) for tau in local_steps]
        found[name] = Rests(*(np.asarray([getattr(r, what) for r in made]) for what in ("bias", "value", "moved")))
    return found


def rested(arrays: Arrays, name: str) -> np.ndarray:
    """Where a method came to rest, instead of going back and forth."""
    return arrays[f"{name}.moved"] <= CONVERGED


def rate(errors: Float[np.ndarray, " R"]) -> float:
    """The factor by which a curve shrinks from round to round before rounding, by least squares on logarithms."""
    followed = np.log(errors[: len(errors) if errors[-1] > ROUNDING else int(np.argmax(errors <= ROUNDING))])
    tail = followed[-SMOOTH:]
    return float(np.exp(np.polyfit(np.arange(len(tail)), tail, 1)[0]))


def npg_bound(arrays: Arrays, share: int) -> tuple[np.ndarray, np.ndarray]:
    """Cen et al.'s bounds on the log-policy's and the values' error from the first round on, at a share of SHARES."""
    discount, c = gridworld().train.discount, arrays["settings"][share]
    first = arrays["errors.values"][share, 0] + 2 * ENTROPY * (1 - c) * arrays["errors.policy"][share, 0]
    left = (1 - c * (1 - discount)) ** arrays["rounds"][:-1]
    return 2 * first / ENTROPY * left, discount * first * left


def npg_claims(evidence: Evidence) -> list[Claim]:
    """Geometric convergence, at the rate and within the bound; from trajectories as without noise."""
    exact, sampled = evidence[EXACT], evidence[SAMPLED]
    errors, values = exact["errors.policy"], exact["errors.values"]
    one = lambda what, paper, value, low, high: single("fednpg", what, paper, point(value), low, high)  # noqa: E731
    rates = [
        one(f"factor of the log-policy's error per round, c = {c:g}", 1 - c, rate(errors[i]), 0.995 - c, 1.005 - c)
        for i, c in enumerate(SHARES)
        if c < 1
    ]
    within = [
        found[1:] <= bound + ROUNDING
        for i in range(len(SHARES))
        for found, bound in zip((errors[i], values[i]), npg_bound(exact, i), strict=True)
    ]
    ends = {int(m): x[:, -1] for m, x in zip(sampled["settings"], sampled["errors.policy"], strict=True)}
    many = max(ends)
    said = f"log-policy's error after {sampled['rounds'][-1]} rounds of {many} trajectories, c = 0.1 (<= 1e-3)"
    return [
        one(f"log-policy's error after 5 rounds, c = 1 (<= {DEEPEST:g})", 0.0, errors[0, 5], 0.0, DEEPEST),
        *rates,
        everywhere("fednpg", "errors within the bound of rate 1 - c (1 - gamma)", np.concatenate(within)),
        single("fednpg", said, 0.0, mean_interval(ends[many]), 0.0, 1e-3),
    ]


def power(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def sarsa_claims(evidence: Evidence) -> list[Claim]:
    """Plateaus that grow with heterogeneity, and fall as the root of the number of agents."""
    by_level, by_agents = evidence[HETEROGENEITY], evidence[AGENTS]
    levels, own, mean = by_level["settings"], by_level["errors.own"][:, -1], by_level["errors.mean"][:, -1]
    heights = plateau(by_agents["errors.mean"])
    slopes = np.asarray([power(by_agents["settings"], seed) for seed in heights.T])
    one = lambda what, paper, value, low, high: single("fedsarsa", what, paper, point(value), low, high)  # noqa: E731
    return [
        one("distance left among equal agents, without noise (<= 1e-4)", 0.0, own[0], 0.0, 1e-4),
        everywhere("fedsarsa", "levels of heterogeneity that raise the plateau (own rest points)", np.diff(own) > 0),
        everywhere("fedsarsa", "levels of heterogeneity that raise the plateau (mean MDP's)", np.diff(mean) > 0),
        one("power of heterogeneity in the plateau, own rest points", 1.0, power(levels[1:], own[1:]), 0.9, 1.1),
        one(
            "power of heterogeneity in the plateau, the mean MDP's (>= 1)",
            np.nan,
            power(levels[1:], mean[1:]),
            1.0,
            np.inf,
        ),
        everywhere("fedsarsa", "doublings of the agents that lower the plateau", np.diff(heights.mean(axis=1)) < 0),
        near("fedsarsa", "power of the number of agents in the plateau", -0.5, slopes, 0.05),
    ]


def drift_claims(evidence: Evidence) -> list[Claim]:
    """No gradient is left where Fast-FedPG rests; more and more of it where FedAvg-PG does."""
    found = evidence[RESTS]
    plain, fast = found["fedavg-pg.gradient"], found["fast-fedpg.gradient"]
    at, resting = LOCAL_STEPS.index(SHOWN), rested(found, "fast-fedpg")
    lost = found["fast-fedpg.value"][at] - found["fedavg-pg.value"][at]
    one = lambda what, paper, value, low, high: single("fast-fedpg", what, paper, point(value), low, high)  # noqa: E731
    many = resting & (np.asarray(LOCAL_STEPS) > 1)
    beside = f"local steps from 2 to {max(np.asarray(LOCAL_STEPS)[many])}"
    return [
        one(f"length of grad f at rest, FedAvg-PG, {SHOWN} local steps (>= 0.01)", np.nan, plain[at], 0.01, np.inf),
        one(f"length of grad f at rest, Fast-FedPG, {SHOWN} local steps (<= {DEEPEST:g})", 0.0, fast[at], 0.0, DEEPEST),
        one(f"return that FedAvg-PG's rest lacks, {SHOWN} local steps (> 0)", np.nan, lost, 1e-9, np.inf),
        everywhere(
            "fast-fedpg",
            f"{beside} at which FedAvg-PG rests off the optimum (grad f longer than 1e-3)",
            plain[many] > 1e-3,
        ),
        everywhere("fast-fedpg", f"{beside} at which Fast-FedPG rests on it (shorter than 1e-11)", fast[many] < 1e-11),
        everywhere("fast-fedpg", "more local steps that make FedAvg-PG's rest worse", np.diff(plain) > 0),
    ]


def readings() -> dict[str, dict[str, Any]]:
    """Which studies of client sampling there are: trajectories per batch, none for no noise; rounds of rest; rounds."""
    long = {f"{LONG}, batches of {m}": (m, 0, LONG_ROUNDS) for m in BATCHES[:2]}
    resting = {f"{REST}, batches of {m}": (m, RESTED, ROUNDS) for m in BATCHES}
    found = {**long, **resting, f"{REST}, {QUIET}": (None, RESTED, ROUNDS)}
    return {name: {"m": m, "rested": rest, "rounds": rounds} for name, (m, rest, rounds) in found.items()}


def ends(arrays: Arrays) -> dict[str, np.ndarray]:
    """The return after adaptation at the end, by method and seed."""
    after = {name.removesuffix(".after"): x for name, x in arrays.items() if name.endswith(".after")}
    return {name: x[:, -LAST:].astype(np.float64).mean(axis=1) for name, x in after.items()}


def lead(arrays: Arrays, rounds: int) -> np.ndarray:
    """How far all agents are ahead of a quarter of them after so many rounds, and as many trajectories, by seed."""
    at = int(np.flatnonzero(arrays["full.rounds"] == rounds)[0])
    return (arrays["full.after"] - arrays["plain.after"])[:, at].astype(np.float64)


def given_back(arrays: Arrays, mode: str) -> Interval:
    """The share of the gap between plain sampling and full participation that a control variate closes."""
    level = ends(arrays)
    return ratio_interval(level[mode] - level["plain"], level["full"] - level["plain"])


def ratio_interval(x: Float[np.ndarray, " seed"], y: Float[np.ndarray, " seed"], confidence: float = 0.95) -> Interval:
    """mean(x) / mean(y) and Fieller's interval: the ratios r for which x - r y, seed by seed, may have mean zero."""
    n, ratio = len(x), float(x.mean() / y.mean())
    if n < 2:
        return Interval(ratio, -np.inf, np.inf)
    (xx, xy), (_, yy) = np.cov(x, y) * stdtrit(n - 1, (1 + confidence) / 2) ** 2 / n
    a, b, c = y.mean() ** 2 - yy, x.mean() * y.mean() - xy, x.mean() ** 2 - xx
    if a <= 0:  # the gap itself may be zero
        return Interval(ratio, -np.inf, np.inf)
    root = np.sqrt(max(0.0, b**2 - a * c))
    return Interval(ratio, float((b - root) / a), float((b + root) / a))


def sampling_claims(evidence: Evidence) -> list[Claim]:
    """The share of the gap, in every reading that has one: with more rounds, a quarter is ahead early in training."""
    claims = []
    for reading, arrays in evidence.items():
        if reading.startswith(LONG):
            early = mean_interval(lead(arrays, ROUNDS))
            said = f"F that a quarter costs {reading}, after {ROUNDS} rounds of all agents (> 0)"
            claims.append(single("client-sampling", said, np.nan, early, 1e-9, np.inf))
        level = ends(arrays)
        gap = mean_interval(level["full"] - level["plain"])
        claims.append(single("client-sampling", f"F that a quarter costs {reading} (> 0)", np.nan, gap, 1e-9, np.inf))
        if gap.mean > 0:
            claims += [given_back_claim(arrays, mode, reading) for mode in MODES]
            claims += [given_back_claim(arrays, as_published(mode), reading, ", as published") for mode in MODES]
    return claims


def given_back_claim(arrays: Arrays, name: str, reading: str, how: str = "") -> Claim:
    said = f"share given back by control variates of {name.partition('-')[0]}s{how}, {reading}"
    return single("client-sampling", said, TARGET, given_back(arrays, name), TARGET, np.inf)


def point(value: Any) -> Interval:
    """A number without spread."""
    return Interval(*3 * [float(value)])


def npg_kept(seeds: int) -> list[Measurement]:
    sampled = {"batches": [2, 10, 50], "share": 0.1, "entropy": ENTROPY, "rounds": 120, "every": 4, "seeds": seeds}
    exact = {"shares": list(SHARES), "entropy": ENTROPY, "rounds": 120}
    return [
        Measurement(EXACT, shared_policy.npg_exact, exact),
        Measurement(SAMPLED, shared_policy.npg_sampled, sampled),
    ]


def sarsa_kept(seeds: int) -> list[Measurement]:
    rounds = {"rounds": 400, "every": 10}
    by_level = {"levels": list(shared_policy.LEVELS), "agents": 8, "local_steps": shared_policy.LOCAL_STEPS}
    by_agents = {"agents": list(shared_policy.AGENTS), "m": 1, "beta": shared_policy.BETA, "seeds": seeds}
    return [
        Measurement(HETEROGENEITY, shared_policy.sarsa_heterogeneity, {**by_level, **rounds}),
        Measurement(AGENTS, shared_policy.sarsa_agents, {**by_agents, **rounds}),
    ]


def drift_kept(_seeds: int) -> list[Measurement]:
    return [Measurement(RESTS, rests, {"local_steps": list(LOCAL_STEPS), "alpha": ALPHA, "beta": BETA})]


def sampling_kept(seeds: int) -> list[Measurement]:
    common = {"beta": 0.3, "local_steps": 5, "share": 0.25, "memory": 0.1, "stops": 20, "seeds": list(range(seeds))}
    return [Measurement(reading, sampling, {**common, **how}) for reading, how in readings().items()]


def mechanism(name: str, title: str, claims: Callable[[Any], list[Claim]], kept: Any, seeds: int = 10) -> Experiment:
    return Experiment(name, title, lambda _seeds, _quick: {}, claims, seeds=seeds, kept=kept)


MECHANISMS = (
    mechanism("fednpg", "FedNPG converges geometrically", npg_claims, npg_kept, 4),
    mechanism("fedsarsa", "FedSARSA's error by heterogeneity and agents", sarsa_claims, sarsa_kept, 8),
    mechanism("fast-fedpg", "Fast-FedPG rests without drift", drift_claims, drift_kept),
    mechanism("client-sampling", "Control variates against client sampling", sampling_claims, sampling_kept, 20),
)
