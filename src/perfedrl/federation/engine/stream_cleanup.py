"""Forget finished and abandoned streams of messages, with one thread.

NVFlare 2.9 keeps the record of a finished stream for a minute, each with a thread of its own, which in a bridge are
hundreds; and it keeps the pieces of a stream whose beginning never comes for ever.
"""

import heapq
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.stream_types import StreamError

from perfedrl.federation.engine.nvflare_settings import replace_attribute

TICK = 0.5
"""Seconds between two looks at the streams."""
ABANDONED = 60.0
"""Seconds without progress after which an unfinished stream is dropped."""
MOST_OPEN = 16
"""The largest number of unfinished streams of one sender; of more, the oldest are dropped."""


class Cleaner:
    """Calls functions later, and drops abandoned streams."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock, self._count = clock, threading.Lock(), itertools.count()
        self._calls: list[tuple[float, int, Appointment]] = []
        self._progress: dict[Any, tuple[int, float]] = {}

    def later(self, seconds: float, call: Callable[[], None]) -> "Appointment":
        """Call a function after some seconds, unless the appointment is cancelled."""
        appointment = Appointment(call)
        with self._lock:
            heapq.heappush(self._calls, (self._clock() + seconds, next(self._count), appointment))
        return appointment

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="stream_cleanup", daemon=True).start()

    def tick(self) -> None:
        """Call what is due, and drop streams."""
        due = []
        with self._lock:
            while self._calls and self._calls[0][0] <= self._clock():
                due.append(heapq.heappop(self._calls)[2])
        for appointment in due:
            appointment.keep()
        self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        """Drop unfinished streams that make no progress, or of which one sender has too many."""
        with RxTask.map_lock:
            unfinished = {key: task for key, task in RxTask.rx_task_map.items() if not (task.completed or task.failed)}
        now, known = self._clock(), self._progress
        self._progress = {
            key: known[key] if key in known and known[key][0] == task.received_offset else (task.received_offset, now)
            for key, task in unfinished.items()
        }
        of_sender: defaultdict[str, list[Any]] = defaultdict(list)
        for key in sorted(unfinished, key=lambda key: self._progress[key][1], reverse=True):
            of_sender[FQCN.get_root(key[0])].append(key)
        for keys in of_sender.values():
            for place, key in enumerate(keys):
                if place >= MOST_OPEN or now - self._progress[key][1] > ABANDONED:
                    unfinished[key].stop(StreamError("the stream was abandoned"))

    def _run(self) -> None:
        while True:
            time.sleep(TICK)
            self.tick()


class Appointment:
    """A function that is called once, or not at all."""

    def __init__(self, call: Callable[[], None]):
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Do not call the function."""
        self._call = None

    def keep(self) -> None:
        """Call the function unless it was cancelled."""
        call, self._call = self._call, None
        if call is not None:
            call()


CLEANER = Cleaner()


def use_one_thread() -> None:
    """Let NVFlare forget its streams through the cleaner of this process."""
    replace_attribute(RxTask, "_schedule_remove_task", _forget_later)
    CLEANER.start()


def _forget_later(task: Any, ttl: float | None = None) -> None:
    """Forget a finished stream after some seconds; called by NVFlare as a method of the stream's record."""
    with task.stop_lock:
        if not task.cleanup_timer:
            seconds = task.completed_task_ttl if ttl is None else ttl
            task.cleanup_timer = CLEANER.later(seconds, task._remove_task)
