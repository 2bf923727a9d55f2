"""The seam for watching a run: observers are told what a run has just measured.

Progress bars, checkpoints on disk and the live line of a networked fleet are observers, and so is anything that a user
passes as `observers=[...]`.
"""

from collections.abc import Iterable

from perfedrl.simulation.run_state import RunState


class Observer:
    """Watches runs; a subclass overrides the events that it needs."""

    def on_start(self, state: RunState) -> None:
        """Called before a run's first round, or before it resumes; nothing is compiled yet."""

    def on_round(self, state: RunState) -> None:
        """Called whenever training pauses: after every evaluation, and after every round of Python environments."""

    def on_evaluation(self, state: RunState) -> None:
        """Called after a run was measured; the last entry of `state.history` is new."""


def announce(observers: Iterable[Observer], state: RunState) -> None:
    """Tell observers that training paused, and what was measured there, if anything."""
    for observer in observers:
        observer.on_round(state)
        if state.measured:
            observer.on_evaluation(state)
