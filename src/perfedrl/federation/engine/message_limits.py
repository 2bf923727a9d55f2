"""How much a kit may send to the server: a budget of messages, and a largest message that follows from the run.

A kit that sends more is read from more slowly: flow control then holds back its messages on its own machine, and other
kits do not notice. A message that is too large is dropped.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

RATE, BURST = 300.0, 900.0
"""Messages of a kit in a second, and at once after a silence; a bridge that asks for work sends about 150 a second."""
ENVELOPE = 2**17
"""Bytes of a message beside the frame in it."""
LARGEST = 2**21
"""The largest message in bytes; NVFlare cuts what is larger than a MiB into pieces."""
EXCESS, LARGEST_MESSAGE = "excess.json", "largest_message.json"
"""Files in the server's folder: the kits that sent too much, with the time, and the largest message of the run."""
NOTED = 60.0
"""Seconds between two notes on the same kit."""

log = logging.getLogger(__name__)


class Budget:
    """A token bucket: `RATE` messages in a second, and `BURST` at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._left, self._when = clock, BURST, clock()
        self._lock = threading.Lock()

    def spend(self) -> float:
        """Take one message out of the budget; return the seconds to wait before the next one is read."""
        with self._lock:
            now = self._clock()
            self._left = min(BURST, self._left + RATE * (now - self._when)) - 1
            self._when = now
            return max(0.0, -self._left / RATE)


class MessageLimits:
    """The budgets of all kits, and the largest message; `folder` is the server's."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        self.folder, self._clock = folder, clock
        self._budgets: dict[str, Budget] = {}
        self._noted: dict[str, float] = {}
        self._lock = threading.Lock()
        self._largest, self._read = LARGEST, -float("inf")

    def receive(self, kit: str, frame: bytes, pass_on: Callable[[bytes], None]) -> float:
        """Pass on a message of a kit unless it is too large; return the seconds to wait before its next one is read."""
        if self._fits(kit, len(frame)):
            pass_on(frame)
        return self._pause(kit)

    def _pause(self, kit: str) -> float:
        """Count a message of a kit, on whatever connection; return the seconds to wait."""
        with self._lock:
            budget = self._budgets.setdefault(kit, Budget(self._clock))
        if wait := budget.spend():
            self._note(kit, f"sends more than {RATE:g} messages a second; it is slowed down")
        return wait

    def _fits(self, kit: str, size: int) -> bool:
        """Whether a message of a kit is not too large."""
        if size <= self._largest_message():
            return True
        self._note(kit, f"sent a message of {size} bytes; it is dropped")
        return False

    def _largest_message(self) -> int:
        """The largest message in bytes, which the run's job writes to a file; read at most once a second."""
        if time.monotonic() - self._read > 1.0:
            self._read = time.monotonic()
            with suppress(OSError, ValueError, TypeError, KeyError):
                self._largest = min(LARGEST, int(json.loads((self.folder / LARGEST_MESSAGE).read_text())["bytes"]))
        return self._largest

    def _note(self, kit: str, what: str) -> None:
        """Name a kit that sends too much, in the log and in a file, at most once a minute."""
        now = time.time()
        with self._lock:
            if now - self._noted.get(kit, 0.0) < NOTED:
                return
            self._noted[kit] = now
            log.warning(f"{kit} {what}")
            with suppress(OSError):
                _replace(self.folder / EXCESS, self._noted)


limits_in = cache(MessageLimits)
"""The limits of a server's folder."""


def excess(folder: Path) -> dict[str, float]:
    """The kits that sent more than their share, and when they were noted last, from the server's folder."""
    with suppress(OSError, ValueError):
        return json.loads((folder / EXCESS).read_text(encoding="utf-8"))
    return {}


def write_largest_message(folder: Path, answer: int) -> None:
    """Let the server drop messages that are larger than an agent's largest answer in the run, in its envelope."""
    _replace(folder / LARGEST_MESSAGE, {"bytes": answer + ENVELOPE})


def _replace(path: Path, content: object) -> None:
    """Replace a file; not through `experiments.files`, which would load JAX into NVFlare's server."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)
