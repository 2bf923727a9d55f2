"""Cliff walking in wind, the second tabular family of the federated-RL literature: agents differ in the wind."""

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from perfedrl.envs.fleet import Fleet, family_fleet
from perfedrl.envs.gridworld import MOVES, grid_moves
from perfedrl.envs.new_agents import Settings
from perfedrl.envs.tabular import TabularMDP, check_table
from perfedrl.errors import UserError

DOWN = MOVES.index((1, 0))


def windy_cliff(
    winds: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
    held_out: Sequence[float] = (),
    width: int = 4,
    horizon: int = 30,
    discount: float = 0.9,
) -> Fleet:
    """Walk along a cliff, from the lower left to the lower right corner of a width x width grid.

    With probability theta (the agent's wind) the wind moves the walker one cell down instead of in the chosen
    direction. The cells between start and goal are the cliff: a fall costs 1 and leads back to the start. Each step
    costs 0.01; every step in the goal, which is never left, earns 1.
    """
    if width < 3:
        raise UserError(f"a windy cliff needs width >= 3; it is {width}")
    check_table(width**2, len(MOVES), f"width ({width})")

    def make(_: Any, settings: Settings) -> TabularMDP:
        wind = settings["wind"]
        if not isinstance(wind, numbers.Real) or not 0 <= float(wind) <= 1:
            raise UserError(f"a wind must lie in [0, 1]; it is {wind}")
        return _mdp(width, float(wind), horizon, discount)

    hints = {"wind": "the probability to be blown down, from 0 to 1"}
    return family_fleet(make, [{"wind": x} for x in winds], [{"wind": x} for x in held_out], hints=hints)


def _mdp(width: int, wind: float, horizon: int, discount: float) -> TabularMDP:
    S = width * width
    start, goal = S - width, S - 1
    cliff = np.zeros(S, dtype=bool)
    cliff[start + 1 : goal] = True
    own = np.eye(S)[grid_moves(width, width)]
    blown = (1 - wind) * own + wind * own[:, [DOWN]]
    falls = blown @ cliff
    P = np.where(cliff, 0.0, blown)
    P[..., start] += falls
    P[goal] = np.eye(S)[goal]
    r = -0.01 - falls
    r[goal] = 1.0
    return TabularMDP(P=P, r=r, mu=np.eye(S)[start], horizon=horizon, discount=discount)
