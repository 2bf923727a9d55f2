"""Measurements and claims: FedNPG converges geometrically to the entropy-regularized optimum of the mean objective.

The names and settings of the measured functions are part of the names of the committed measurement files.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from perfedrl.algorithms import FedNPG
from perfedrl.envs import Fleet, gridworld
from perfedrl.exact.soft import soft_optimum, soft_q
from perfedrl.experiments.stats import mean_interval
from perfedrl.studies.claims import Claim, everywhere, point, single
from perfedrl.studies.measurement_cache import Arrays, Measurement
from perfedrl.studies.table_policy_curves import Curves, largest, log_softmax, mean_mdp, table_parameters

Evidence = Mapping[str, Arrays]
"""The measured arrays by measurement."""
EXACT, SAMPLED = "exact", "sampled"
SEEDS = 4
ENTROPY = 0.1
SHARES = (1.0, 0.5, 0.2, 0.1)
"""FedNPG's c = beta entropy / (1 - gamma): the share of a soft policy iteration that one step makes."""
BATCHES = (2, 10, 50)
ROUNDING = 1e-10
"""Errors are followed down to this value; below it rounding dominates."""
SMOOTH = 20
"""The number of rounds, the last ones above ROUNDING, over which a rate is fitted."""
DEEPEST = 1e-12


def npg_exact(
    shares: Sequence[float] = SHARES, fleet: Fleet | None = None, entropy: float = ENTROPY, rounds: int = 60
) -> Curves:
    """FedNPG without noise: the largest error of the log-policy ("policy") and of the soft action values ("values")."""
    fleet = gridworld() if fleet is None else fleet
    betas = [share * (1 - fleet.train.discount) / entropy for share in shares]
    when, thetas = table_parameters(
        fleet, [FedNPG(0.0, beta, entropy) for beta in betas], [0] * len(betas), rounds, exact=True
    )
    mean = mean_mdp(fleet)
    best = soft_optimum(mean, entropy)
    log_policies = log_softmax(thetas)
    each = [[soft_q(mean, np.exp(x), entropy) for x in seed] for seed in log_policies]
    errors = {"policy": largest(log_policies - best.log_policy), "values": largest(np.asarray(each) - best.q)}
    return Curves(np.asarray(shares), when, errors)


def npg_sampled(
    batches: Sequence[int] = BATCHES,
    fleet: Fleet | None = None,
    share: float = 0.1,
    entropy: float = ENTROPY,
    rounds: int = 120,
    every: int = 4,
    seeds: int = 4,
) -> Curves:
    """FedNPG from m trajectories per round: the largest error of the log-policy ("policy"), by m and seed."""
    fleet = gridworld() if fleet is None else fleet
    best, beta = soft_optimum(mean_mdp(fleet), entropy), share * (1 - fleet.train.discount) / entropy
    found = [
        table_parameters(fleet, [FedNPG(0.0, beta, entropy, m)] * seeds, range(seeds), rounds, every) for m in batches
    ]
    errors = [largest(log_softmax(thetas) - best.log_policy) for _, thetas in found]
    return Curves(np.asarray(batches), found[0][0], {"policy": np.stack(errors)})


def rate(errors: Float[np.ndarray, " R"]) -> float:
    """The factor by which a curve shrinks per round above ROUNDING, by least squares on logarithms."""
    followed = np.log(errors[: len(errors) if errors[-1] > ROUNDING else int(np.argmax(errors <= ROUNDING))])
    tail = followed[-SMOOTH:]
    return float(np.exp(np.polyfit(np.arange(len(tail)), tail, 1)[0]))


def npg_bound(arrays: Arrays, share: int) -> tuple[np.ndarray, np.ndarray]:
    """Cen et al.'s bounds on the errors of log-policy and values from the first round on, at SHARES[share]."""
    discount, c = gridworld().train.discount, arrays["settings"][share]
    first = arrays["errors.values"][share, 0] + 2 * ENTROPY * (1 - c) * arrays["errors.policy"][share, 0]
    left = (1 - c * (1 - discount)) ** arrays["rounds"][:-1]
    return 2 * first / ENTROPY * left, discount * first * left


def npg_claims(evidence: Evidence) -> list[Claim]:
    """Geometric convergence at the claimed rate and within the bound, without noise and from trajectories."""
    exact, sampled = evidence[EXACT], evidence[SAMPLED]
    errors, values = exact["errors.policy"], exact["errors.values"]

    def one(what: str, paper: float, value: float, low: float, high: float) -> Claim:
        return single("fednpg", what, paper, point(value), low, high)

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


def measurements(seeds: int) -> list[Measurement]:
    """The exact curves, and the sampled ones for a number of seeds."""
    sampled = {"batches": list(BATCHES), "share": 0.1, "entropy": ENTROPY, "rounds": 120, "every": 4, "seeds": seeds}
    exact = {"shares": list(SHARES), "entropy": ENTROPY, "rounds": 120}
    return [
        Measurement(EXACT, npg_exact, exact),
        Measurement(SAMPLED, npg_sampled, sampled),
    ]
