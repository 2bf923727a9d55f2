"""The best evaluation of a run, and the fleet's state at it."""

import jax
import numpy as np
from jaxtyping import Float, Int

from perfedrl.simulation.history import History
from perfedrl.simulation.run_state import FleetState


def score(history: History) -> Float[np.ndarray, "seed evaluation"]:
    """The mean return after adaptation: of the held-out agents where any was measured, else of the training agents.

    Agents that were never measured do not count. An evaluation that lacks another one has -inf, since a mean over fewer
    agents cannot be compared.
    """
    held_out, training = (mean_of_measured(x) for x in (history.held_out_after, history.after))
    by_held_out = np.isfinite(history.held_out_after).any(axis=(1, 2))
    return np.where(by_held_out[:, None], held_out, training)


def mean_of_measured(after: Float[np.ndarray, "seed evaluation agent"]) -> Float[np.ndarray, "seed evaluation"]:
    """The mean over the agents that were ever measured; -inf where one of them is missing, or there is none."""
    counted = np.isfinite(after)
    ever = counted.any(axis=1, keepdims=True)
    total = np.where(counted, after, 0.0).sum(axis=-1)
    complete = (counted == ever).all(axis=-1) & ever.any(axis=-1)
    return np.where(complete, total / np.maximum(ever.sum(axis=-1), 1), -np.inf)


def best_evaluation(history: History) -> Int[np.ndarray, " seed"]:
    """The index of each seed's evaluation with the highest score, the first of equal ones; the last without scores."""
    scores = score(history)
    return np.where(np.isfinite(scores).any(axis=1), np.argmax(scores, axis=1), scores.shape[1] - 1)


def better(best: FleetState, state: FleetState, history: History) -> FleetState:
    """Each seed's state at its best evaluation: `state` where that is the last of the history, else `best`."""
    newest = best_evaluation(history) == len(history.rounds) - 1

    def choose(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        return np.where(newest.reshape(-1, *[1] * (np.ndim(new) - 1)), new, old)

    return jax.tree.map(choose, best, state)
