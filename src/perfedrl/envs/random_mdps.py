"""Random MDPs with a chosen level of heterogeneity, as in the federated-RL literature."""

from typing import Any

import numpy as np

from perfedrl.envs.fleet import Fleet, fleet
from perfedrl.envs.new_agents import Settings, drawn_agents, new_agent_seed
from perfedrl.envs.tabular import TabularMDP, check_table
from perfedrl.errors import UserError


def random_mdps(
    agents: int = 8,
    held_out: int = 0,
    states: int = 5,
    actions: int = 5,
    heterogeneity: float = 0.5,
    reward_heterogeneity: float = 0.0,
    horizon: int = 15,
    discount: float = 0.9,
    seed: int = 0,
) -> Fleet:
    """Agents with kernels P_i = (1 - eps) P_0 + eps P_i', eps the heterogeneity, rows uniform on the simplex.

    Rewards r ~ U[0, 1] are common to all agents unless `reward_heterogeneity` mixes in rewards of each agent's own in
    the same way; the start is uniform.
    """
    if min(agents, states, actions) < 1 or min(held_out, seed) < 0:
        raise UserError("random-mdps needs agents, states and actions >= 1, held_out >= 0 and seed >= 0")
    check_table(states, actions, f"states ({states}) or actions ({actions})", agents + held_out)
    rng = np.random.default_rng(seed)

    def kernel():
        return rng.dirichlet(np.ones(states), size=(states, actions))

    def reward():
        return rng.uniform(size=(states, actions))

    P0, r0 = kernel(), reward()
    mdps = [
        TabularMDP(
            P=mix(P0, kernel(), heterogeneity),
            r=mix(r0, reward(), reward_heterogeneity),
            mu=np.full(states, 1 / states),
            horizon=horizon,
            discount=discount,
        )
        for _ in range(agents + held_out)
    ]

    def make(_: Any, settings: Settings) -> TabularMDP:
        own = np.random.default_rng([seed, new_agent_seed(settings)])
        P = mix(P0, own.dirichlet(np.ones(states), size=(states, actions)), settings["heterogeneity"])
        r = mix(r0, own.uniform(size=(states, actions)), settings["reward_heterogeneity"])
        return TabularMDP(P, r, np.full(states, 1 / states), horizon, discount)

    of_all = {"heterogeneity": heterogeneity, "reward_heterogeneity": reward_heterogeneity}
    return fleet(mdps[:agents], mdps[agents:], drawn_agents(make, [of_all] * len(mdps)))


def mix(common: np.ndarray, own: np.ndarray, heterogeneity: float) -> np.ndarray:
    """Return (1 - eps) common + eps own: eps = 0 makes agents equal, eps = 1 unrelated."""
    if not 0 <= heterogeneity <= 1:
        raise UserError(f"heterogeneity must lie in [0, 1]; it is {heterogeneity}")
    return (1 - heterogeneity) * common + heterogeneity * own
