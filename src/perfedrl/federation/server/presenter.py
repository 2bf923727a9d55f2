"""What a networked run shows while it is trained: its log and its current status, in the run's folder."""

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from perfedrl.errors import UserError
from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.run_folder import RunFolder
from perfedrl.federation.server.run_state_machine import CoordinatorState
from perfedrl.simulation.observers import Observer
from perfedrl.simulation.run_state import RunState

LEAST_INTERVAL = 0.1
"""Seconds between two updates of the status while answers come in."""


class Presenter(Observer):
    """Writes the log and the status of one job; an observer of the run's evaluations."""

    def __init__(self, folder: RunFolder, run: str, generation: int, rounds: int, names: tuple[str, ...]):
        self.folder, self._run, self._generation, self._rounds, self._names = folder, run, generation, rounds, names
        self._objective: float | None = None
        self._median: float | None = None
        self._seconds_per_round: float | None = None
        self._shown = 0.0

    def on_start(self, state: RunState) -> None:
        """Start from the last evaluation of an earlier job, if there was one."""
        if state.history is not None:
            self.on_evaluation(state)

    def on_evaluation(self, state: RunState) -> None:
        """Remember the mean and the median of the agents' returns after adaptation."""
        assert state.history is not None
        known = [x for x in state.history.after[0, -1] if np.isfinite(x)]
        self._objective, self._median = (float(np.mean(known)), float(np.median(known))) if known else (None, None)

    def round_took(self, seconds: float) -> None:
        """Remember how long the last round took."""
        self._seconds_per_round = seconds

    def log(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append an event to the run's log."""
        self.folder.log(event, **fields)

    def waiting(self, state: CoordinatorState | None, answers: Answers) -> None:
        """Show the answers that came in so far, unless the status was written a moment ago."""
        if time.monotonic() - self._shown > LEAST_INTERVAL:
            self.show(state, answers)

    def show(self, state: CoordinatorState | None, answers: Answers | None = None) -> None:
        """Write the status; there is no state yet while agents describe their environments."""
        self._shown = time.monotonic()
        round_, phase, epsilon = (0, "describe", None) if state is None else (state.round, state.phase, state.epsilon)
        status = {"run": self._run, "generation": self._generation, "round": round_, "rounds": self._rounds}
        status |= {"phase": phase, "agents": agents_status(self._names, state, answers)}
        status |= {"objective": self._objective, "median": self._median, "seconds_per_round": self._seconds_per_round}
        self.folder.write_progress({**status, "epsilon": epsilon, "time": time.time(), "pid": os.getpid()})


def agents_status(names: tuple[str, ...], state: CoordinatorState | None, answers: Answers | None) -> dict[str, str]:
    """One word for each agent: quarantined, away, in, failed, lost or waiting."""
    lost, quarantined = (set(), set()) if state is None else (state.lost, state.gate.quarantined)

    def status(name: str) -> str:
        if name in quarantined:
            return "quarantined"
        if answers is None:
            return "lost" if name in lost else "in"
        if name not in answers.asked:
            return "away"
        if name in answers.frames:
            return "in"
        return "failed" if name in answers.failures else "lost" if name in lost else "waiting"

    return {name: status(name) for name in names}


def show_failure(folder: RunFolder, generation: int, error: Exception) -> None:
    """Log and show why a job ended; a UserError is one that the operator can correct."""
    mendable = isinstance(error, UserError)
    reason = str(error) if mendable else f"{type(error).__name__}: {error}"
    status = {"generation": generation, "phase": "failed", "error": reason, "mendable": mendable}
    folder.write_progress({**folder.progress(), **status})
    folder.log("failed", reason=reason)
