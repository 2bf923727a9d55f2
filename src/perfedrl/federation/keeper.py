"""A process that must not stay dead: started, watched, and started again."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

BACKOFF = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the process is started again, after so many deaths that came soon."""
SOON = 60.0
GRACE = 10.0
"""Seconds that a process has to end when it is asked to."""


class Keeper:
    """Keeps one process alive, with all that it starts: they are one group, which also ends together."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str], folder: Path):
        self.command, self.log, self.env, self.folder = list(command), log, dict(env), folder
        self.deaths = 0
        self._process: subprocess.Popen | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> "Keeper":
        self._launch()
        self._thread.start()
        return self

    @property
    def pid(self) -> int:
        """The process now; it changes when it is started again."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End the process and all that it started, in good order if it can."""
        self._stopping.set()
        if self._process is not None:
            _signal_group(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
            _signal_group(self._process.pid, signal.SIGKILL)
        if self._thread.is_alive():
            self._thread.join(GRACE)

    def last_words(self, lines: int = 5) -> str:
        """The end of the process's log."""
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _launch(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "perfedrl.federation.tether", *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=self.folder,
                start_new_session=True,
            )
        self._launched = time.monotonic()

    def _watch(self) -> None:
        soon = 0
        while not self._stopping.is_set():
            assert self._process is not None
            self._process.wait()
            if self._stopping.is_set():
                return
            _signal_group(self._process.pid, signal.SIGKILL)  # what it started must not outlive it
            self.deaths += 1
            soon = soon + 1 if time.monotonic() - self._launched < SOON else 1
            if self._stopping.wait(BACKOFF[min(soon, len(BACKOFF)) - 1]):
                return
            self._launch()


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
