"""The witness of Prop. 2: two three-armed bandits at whose first-order fixed point the meta-gradient is not zero."""

from collections.abc import Sequence

import numpy as np

from perfedrl.envs.fleet import Fleet, fleet
from perfedrl.envs.tabular import TabularMDP

WITNESS_FEATURES = ((0.0,), (1.0,), (3.0,))
"""phi of the scalar log-linear policy that the agents share."""


def bandits(rewards: Sequence[Sequence[float]] = ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0))) -> Fleet:
    """Agents with one state and one decision that differ in the arms' rewards; the default is the witness of Prop. 2.

    Train it with the policy `log-linear` and features [[[0], [1], [3]]], the scalar family of the proof.
    """
    return fleet([_bandit(np.asarray(r, dtype=float)) for r in rewards])


def _bandit(r: np.ndarray) -> TabularMDP:
    return TabularMDP(P=np.ones((1, len(r), 1)), r=r[None], mu=[1.0], horizon=0, discount=0.0)
