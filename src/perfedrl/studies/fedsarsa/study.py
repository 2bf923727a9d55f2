"""Measurements and claims: FedSARSA comes to rest near the fixed point of the mean MDP.

Without noise the distance grows with heterogeneity, with noise it falls with the number of agents. The names and
settings of the measured functions are part of the names of the committed measurement files.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from perfedrl.algorithms import FedSARSA
from perfedrl.envs.random_mdps import random_mdps
from perfedrl.envs.tabular import unstack
from perfedrl.exact.soft import sarsa_q
from perfedrl.studies.claims import Claim, everywhere, near, point, single
from perfedrl.studies.measurement_cache import Arrays, Measurement
from perfedrl.studies.table_policy_curves import Curves, mean_mdp, norms, table_parameters

Evidence = Mapping[str, Arrays]
"""The measured arrays by measurement."""
HETEROGENEITY, EQUAL_AGENTS = "heterogeneity", "agents"
SEEDS = 8
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
AGENTS = (1, 2, 4, 8, 16, 32)
TEMPERATURE, BETA, LOCAL_STEPS = 1.0, 4.0, 5
"""FedSARSA's settings. At half the temperature the policy settles on the first action that rose, while the action
values still grow from 0 to 6."""
TAIL = 0.25
"""The last share of a curve, over which its plateau is the root mean square."""


def sarsa_heterogeneity(
    levels: Sequence[float] = LEVELS,
    agents: int = 8,
    rounds: int = 400,
    every: int = 10,
    local_steps: int = LOCAL_STEPS,
) -> Curves:
    """FedSARSA without noise on random MDPs by heterogeneity: the distance of Q to a fixed point.

    The fixed point is that of the mean MDP ("mean"), or each agent's own, averaged over agents ("own").
    """
    curves: dict[str, list[np.ndarray]] = {"mean": [], "own": []}
    for level in levels:
        fleet = random_mdps(agents, heterogeneity=level)
        when, thetas = table_parameters(fleet, [sarsa(local_steps)], [0], rounds, every, exact=True)
        q = TEMPERATURE * thetas[0]
        own = np.stack([sarsa_q(task, TEMPERATURE) for task in unstack(fleet.train)])
        curves["mean"].append(norms(q - sarsa_q(mean_mdp(fleet), TEMPERATURE)))
        curves["own"].append(norms(q[:, None] - own).mean(axis=1))
    return Curves(np.asarray(levels), when, {name: np.stack(x) for name, x in curves.items()})


def sarsa_agents(
    agents: Sequence[int] = AGENTS, m: int = 1, rounds: int = 400, every: int = 10, seeds: int = 8, beta: float = BETA
) -> Curves:
    """FedSARSA from m trajectories per step by number of equal agents: the distance to their fixed point ("mean")."""
    errors = []
    for n in agents:
        fleet = random_mdps(n, heterogeneity=0.0)
        when, thetas = table_parameters(fleet, [sarsa(LOCAL_STEPS, m, beta)] * seeds, range(seeds), rounds, every)
        errors.append(norms(TEMPERATURE * thetas - sarsa_q(fleet.task(0), TEMPERATURE)))
    return Curves(np.asarray(agents), when, {"mean": np.stack(errors)})


def plateau(errors: Float[np.ndarray, "... R"]) -> Float[np.ndarray, "..."]:
    """The root mean square of the last quarter of a curve."""
    return np.sqrt(np.mean(errors[..., -max(1, round(TAIL * errors.shape[-1])) :] ** 2, axis=-1))


def sarsa(local_steps: int = LOCAL_STEPS, m: int = 1, beta: float = BETA) -> FedSARSA:
    """The study's FedSARSA, which personalizes nothing."""
    return FedSARSA(0.0, beta, local_steps, m, TEMPERATURE)


def power(x: np.ndarray, y: np.ndarray) -> float:
    """The exponent of x in y, by least squares on logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def sarsa_claims(evidence: Evidence) -> list[Claim]:
    """Plateaus grow with heterogeneity and fall as the square root of the number of agents."""
    by_level, by_agents = evidence[HETEROGENEITY], evidence[EQUAL_AGENTS]
    levels, own, mean = by_level["settings"], by_level["errors.own"][:, -1], by_level["errors.mean"][:, -1]
    heights = plateau(by_agents["errors.mean"])
    slopes = np.asarray([power(by_agents["settings"], seed) for seed in heights.T])

    def one(what: str, paper: float, value: float, low: float, high: float) -> Claim:
        return single("fedsarsa", what, paper, point(value), low, high)

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


def measurements(seeds: int) -> list[Measurement]:
    """The curves by heterogeneity, and those by number of agents for a number of seeds."""
    rounds = {"rounds": 400, "every": 10}
    by_level = {"levels": list(LEVELS), "agents": 8, "local_steps": LOCAL_STEPS}
    by_agents = {"agents": list(AGENTS), "m": 1, "beta": BETA, "seeds": seeds}
    return [
        Measurement(HETEROGENEITY, sarsa_heterogeneity, {**by_level, **rounds}),
        Measurement(EQUAL_AGENTS, sarsa_agents, {**by_agents, **rounds}),
    ]
