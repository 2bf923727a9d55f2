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

import psutil

BACKOFF = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before the process is started again, after so many deaths that came soon."""
SOON = 60.0
GRACE = 10.0
"""Seconds that a process has to end when it is asked to."""


class Keeper:
    """Keeps one process alive; when it is stopped, all that it started ends with it."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str], folder: Path):
        self.command, self.log, self.env, self.folder = list(command), log, dict(env), folder
        self.deaths = 0
        self._process: subprocess.Popen | None = None
        self._stopping, self._launching = threading.Event(), threading.Lock()
        self._log_start = log.stat().st_size if log.exists() else 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> "Keeper":
        self._launch()
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the process and all that it started, in good order if it can."""
        with self._launching:
            self._stopping.set()
        if self._process is not None:
            started = _descendants(self._process.pid)
            _signal_group(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
            _signal_group(self._process.pid, signal.SIGKILL)
            for process in started:  # the engine's have groups of their own
                with suppress(psutil.Error):
                    process.kill()
        if self._thread.is_alive():
            self._thread.join(GRACE)

    def last_words(self, lines: int = 5) -> str:
        """The end of the log since this keeper began."""
        with open(self.log, "rb") as file:
            file.seek(self._log_start)
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    def _launch(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "perfedrl.federation.die_with_parent", str(os.getpid()), *self.command],
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
            with self._launching:
                if self._stopping.is_set():
                    return
                self._launch()


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
