"""The observer that stops training after a signal; apart from `stop_signal.py`, since observers import JAX."""

from perfedrl.cli.stop_signal import STOP
from perfedrl.simulation.observers import Observer
from perfedrl.simulation.run_state import RunState


class StopBetweenRounds(Observer):
    """Stops training before it starts and where it pauses, if a signal came and its exception was lost."""

    def on_start(self, state: RunState) -> None:
        STOP.check()

    def on_round(self, state: RunState) -> None:
        STOP.check()
