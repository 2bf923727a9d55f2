"""The seam for watching a run: observers are told what a run has just measured.

Progress bars, checkpoints on disk and the live line of a networked fleet are observers, and so is anything that a user
passes as `observers=[...]`.
"""

from collections.abc import Iterable
from typing import NamedTuple

from perfedrl.simulation.run_state import RunState


class Part(NamedTuple):
    """One of several parts of a longer task, such as one method of a comparison: the `number`-th of `parts`.

    Parts whose results are there already count as done; `waiting` are those that come after this one.
    """

    task: str
    name: str
    number: int
    parts: int
    waiting: int
    unit: str


class Observer:
    """Watches runs; a subclass overrides the events that it needs."""

    def on_start(self, state: RunState) -> None:
        """Called before a run's first round, or before it resumes; nothing is compiled yet."""

    def on_round(self, state: RunState) -> None:
        """Called whenever training pauses: after every evaluation, and after every round of Python environments."""

    def on_evaluation(self, state: RunState) -> None:
        """Called after a run was measured; the last entry of `state.history` is new."""

    def on_part(self, part: Part) -> None:
        """Called before each part of a longer task, such as a method of a comparison, whose runs come next."""


def announce(observers: Iterable[Observer], state: RunState) -> None:
    """Tell observers that training paused, and what was measured there, if anything."""
    for observer in observers:
        observer.on_round(state)
        if state.measured:
            observer.on_evaluation(state)
