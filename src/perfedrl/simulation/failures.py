"""Counts of what failed while agents were played in Python: episodes, processes, rounds and measurements."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Int

WORDS = {
    "failed_episodes": ("episode failed and was dropped", "episodes failed and were dropped"),
    "restarted_processes": ("process was restarted", "processes were restarted"),
    "rounds_missed": ("round went on without it", "rounds went on without it"),
    "measurements_missed": ("measurement is missing", "measurements are missing"),
}
"""What is counted, with the words for one and for several."""

KINDS = tuple(WORDS)
"""The axis `kind` of the counts."""

Counts = Int[np.ndarray, "seed agent kind"]


class FailureLog:
    """Counts the failures of all agents of one replica, training agents first."""

    def __init__(self, tasks: Sequence[Any]):
        self._tasks = tasks
        self.counts: Int[np.ndarray, "agent kind"] = np.zeros((len(tasks), len(KINDS)), int)

    @contextmanager
    def of(self, agent: int) -> Iterator[None]:
        """Count the episodes and processes of an agent that fail within this context."""
        before = self._tasks[agent].failures
        try:
            yield
        finally:
            self.counts[agent, :2] += np.subtract(self._tasks[agent].failures, before)

    def missed_round(self, agent: int) -> None:
        """Count a round that went on without an agent."""
        self.counts[agent, KINDS.index("rounds_missed")] += 1

    def missed_measurement(self, agent: int) -> None:
        """Count a measurement that an agent could not make."""
        self.counts[agent, KINDS.index("measurements_missed")] += 1


def by_agent(counts: Counts) -> dict[str, dict[str, int]]:
    """The counts of agents with failures, summed over seeds, by the agent's number and the kind."""
    total = counts.sum(axis=0)
    return {
        str(agent): {kind: int(n) for kind, n in zip(KINDS, total[agent], strict=True)}
        for agent in np.flatnonzero(total.any(axis=-1))
    }


def sentences(failures: Mapping[str, Mapping[str, int]]) -> list[str]:
    """One sentence per agent about its failures, from the result of `by_agent`."""
    said = []
    for agent, counts in failures.items():
        parts = [f"{n} {WORDS[kind][n > 1]}" for kind, n in counts.items() if kind in WORDS and n]
        said.append(f"agent {agent}: {', '.join(parts)}")
    return said
