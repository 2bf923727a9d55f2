"""The best evaluation of a run, and the fleet's state at it."""

import jax
import numpy as np
from jaxtyping import Float, Int

from perfedrl.simulation.history import History
from perfedrl.simulation.run_state import FleetState


def score(history: History) -> Float[np.ndarray, "seed evaluation"]:
    """The mean return after adaptation: of the held-out agents where there are any, else of the training agents.

    Agents that could not be measured do not count; -inf where there is none left.
    """
    after = history.held_out_after if history.held_out_after.shape[-1] else history.after
    counted = np.isfinite(after)
    total = np.where(counted, after, 0.0).sum(axis=-1)
    return np.where(counted.any(axis=-1), total / np.maximum(counted.sum(axis=-1), 1), -np.inf)


def best_evaluation(history: History) -> Int[np.ndarray, " seed"]:
    """The index of each seed's evaluation with the highest score, the first of equal ones."""
    return np.argmax(score(history), axis=1)


def better(best: FleetState, state: FleetState, history: History) -> FleetState:
    """Each seed's state at its best evaluation: `state` where that is the last of the history, else `best`."""
    newest = best_evaluation(history) == len(history.rounds) - 1

    def choose(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.where(newest.reshape(-1, *[1] * (np.ndim(new) - 1)), new, old)

    return jax.tree.map(choose, best, state)
