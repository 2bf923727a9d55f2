"""Progress bars of training: one per group of runs that train together."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from perfedrl.simulation.observers import Observer
from perfedrl.simulation.run_state import RunState


class ProgressBars(Observer):
    """Shows the number of rounds that each group of runs has trained."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def on_start(self, state: RunState) -> None:
        self.on_round(state)

    def on_round(self, state: RunState) -> None:
        if state.group not in self._bars:
            self._bars[state.group] = self._progress.add_task(state.group, total=state.rounds)
        self._progress.update(self._bars[state.group], completed=state.round)


@contextmanager
def progress_bars(console: Console) -> Iterator[ProgressBars]:
    """Show progress bars on a console while training runs."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds")
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        yield ProgressBars(progress)
