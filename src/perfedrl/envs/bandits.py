"""The witness of Prop. 2: two three-armed bandits at whose first-order fixed point the meta-gradient is not zero."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from perfedrl.envs.arrays import tabular_fleet
from perfedrl.envs.fleet import Fleet
from perfedrl.envs.new_agents import NewAgents, Settings
from perfedrl.envs.tabular import TabularMDP

WITNESS_FEATURES = ((0.0,), (1.0,), (3.0,))
"""phi of the scalar log-linear policy that the agents share."""

WITNESS_REWARDS = ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0))


def bandits(rewards: Sequence[Sequence[float]] = WITNESS_REWARDS) -> Fleet:
    """Agents with one state and one decision that differ in the rewards of the arms; by default the witness of Prop. 2.

    Train it with the policy `log-linear` and features [[[0], [1], [3]]], the scalar family of the proof.
    """
    arms = len(rewards[0]) if rewards else 0
    P = np.ones((len(rewards), 1, arms, 1))

    def make(_: Any, settings: Settings) -> TabularMDP:
        return TabularMDP(P[0], [settings["rewards"]], [1.0], horizon=0, discount=0.0)

    family = NewAgents(make, [{"rewards": r} for r in rewards], hints={"rewards": f"of the {arms} arms"})
    return tabular_fleet(P, [[r] for r in rewards], np.ones((len(rewards), 1)), horizon=0, discount=0.0, family=family)
