"""The pace of counted work: how long the rest takes, and how often to say so."""

import time
from collections.abc import Callable

SECONDS_BETWEEN_LINES = 10.0
"""The least time between two plain lines about the progress of the same work, where there is no terminal."""

Clock = Callable[[], float]


class Pace:
    """Estimates the time left of counted work, from the time that the work done since the start took."""

    def __init__(self, done: int, clock: Clock = time.monotonic):
        self._first, self._clock, self._began = done, clock, clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    def left(self, done: int, remaining: int) -> str:
        """The time left in words; empty before anything is done."""
        finished = done - self._first
        return f"about {duration(self.elapsed / finished * remaining)} left" if finished > 0 else ""


def duration(seconds: float) -> str:
    """A duration in words, in seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
