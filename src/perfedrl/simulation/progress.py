"""Progress of training: bars on a terminal, plain lines elsewhere, both with an estimate of the time left."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from perfedrl.pace import SECONDS_BETWEEN_LINES, Clock, Pace, duration
from perfedrl.simulation.observers import Observer, Part
from perfedrl.simulation.run_state import RunState


class ProgressBars(Observer):
    """Shows on a terminal the rounds that each group of runs has trained, and which part of a longer task runs."""

    def __init__(self, progress: Progress, clock: Clock = time.monotonic):
        self._progress, self._clock = progress, clock
        self._bars: dict[str, tuple[TaskID, Pace]] = {}
        self._tasks: dict[str, tuple[TaskID, Pace]] = {}

    def on_start(self, state: RunState) -> None:
        if state.group not in self._bars:
            bar = self._progress.add_task(state.group, total=state.rounds, unit="rounds", left="")
        else:  # the next run of the same label
            bar = self._bars[state.group][0]
        self._bars[state.group] = bar, Pace(state.round, self._clock)
        self.on_round(state)

    def on_round(self, state: RunState) -> None:
        if state.group not in self._bars:
            self.on_start(state)
        bar, pace = self._bars[state.group]
        left = pace.left(state.round, state.rounds - state.round) if state.round < state.rounds else ""
        self._progress.update(bar, completed=state.round, left=left)

    def on_part(self, part: Part) -> None:
        for bar, _ in self._bars.values():  # those of the part before
            self._progress.remove_task(bar)
        self._bars = {}
        if part.task not in self._tasks:
            bar = self._progress.add_task(part.task, total=part.parts, unit=part.unit, left="")
            self._tasks[part.task] = bar, Pace(part.number, self._clock)
        bar, pace = self._tasks[part.task]
        left = pace.left(part.number, part.waiting + 1)
        self._progress.update(bar, description=f"{part.task}: {part.name}", completed=part.number - 1, left=left)


class ProgressLines(Observer):
    """Prints plain lines where there is no terminal, as in the log of a batch job."""

    def __init__(self, console: Console, clock: Clock = time.monotonic):
        self._console, self._clock = console, clock
        self._paces: dict[str, Pace] = {}
        self._said: dict[str, tuple[int, float]] = {}
        """The round and the time of the last line about each group."""

    def on_start(self, state: RunState) -> None:
        # Runs of one label may follow one another, and those of one group all start at the same round.
        if state.group not in self._paces or state.round < self._said[state.group][0]:
            self._paces[state.group] = Pace(state.round, self._clock)
            self._say(state, "")

    def on_round(self, state: RunState) -> None:
        if state.group not in self._paces:
            self.on_start(state)
        round_, when = self._said[state.group]
        pace, due = self._paces[state.group], self._clock() - when >= SECONDS_BETWEEN_LINES
        if state.round > round_ and state.round == state.rounds:
            self._say(state, f", took {duration(pace.elapsed)}")
        elif state.round > round_ and due:
            self._say(state, f", {pace.left(state.round, state.rounds - state.round)}")

    def on_part(self, part: Part) -> None:
        pace = self._paces.setdefault(f"{part.unit} of {part.task}", Pace(part.number, self._clock))
        left = pace.left(part.number, part.waiting + 1)
        self._print(f"{part.task}: {part.number} of {part.parts} {part.unit}, {part.name}{left and ', '}{left}")

    def _say(self, state: RunState, more: str) -> None:
        self._said[state.group] = state.round, self._clock()
        self._print(f"{state.group}: round {state.round} of {state.rounds}{more}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def show_progress(console: Console) -> Iterator[Observer]:
    """Show the progress of training on a console: bars on a terminal, plain lines elsewhere."""
    if not console.is_terminal:
        yield ProgressLines(console)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[unit]}")
    with Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[left]}"), console=console) as progress:
        yield ProgressBars(progress)


@contextmanager
def with_progress(observers: Iterable[Observer], asked: bool) -> Iterator[list[Observer]]:
    """The observers and, if asked, one more that shows the progress on standard error."""
    if not asked:
        yield list(observers)
        return
    with show_progress(Console(stderr=True)) as shown:
        yield [*observers, shown]
