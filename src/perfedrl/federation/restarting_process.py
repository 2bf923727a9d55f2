"""A child process that is restarted whenever it ends."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

BACKOFF = (0.1, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before a restart, by the number of quick deaths in a row."""
QUICK_DEATH = 60.0
"""A process that ends earlier, in seconds, died quickly."""
GRACE = 10.0
"""Seconds between the request to end and the kill."""
LARGEST_LOG, LOOK_AT_LOG = 10 * 2**20, 30.0
"""Bytes of a log at which it is moved to a second file, replacing the one before, and seconds between two looks."""


class RestartingProcess:
    """A command that is restarted until `stop`, which also ends all processes that it started."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str], folder: Path):
        self.command, self.log, self.env, self.folder = list(command), log, dict(env), folder
        self.deaths = 0
        self._process: subprocess.Popen | None = None
        self._stopping, self._launching = threading.Event(), threading.Lock()
        self._log_start = self._log_read = log.stat().st_size if log.exists() else 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> "RestartingProcess":
        """Start the process and the thread that watches it."""
        self._launch()
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the process and its descendants: by SIGTERM, then by SIGKILL."""
        with self._launching:
            self._stopping.set()
        if self._process is not None:
            started = _descendants(self._process.pid)
            _signal_group(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
            _signal_group(self._process.pid, signal.SIGKILL)
            for process in started:  # NVFlare's processes have groups of their own
                with suppress(psutil.Error):
                    process.kill()
        if self._thread.is_alive():
            self._thread.join(GRACE)

    def log_tail(self, lines: int = 5) -> str:
        """The last lines of the log since this object was created."""
        with open(self.log, "rb") as file:
            file.seek(self._log_start if self._log_start <= os.fstat(file.fileno()).st_size else 0)
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    def new_lines(self) -> list[str]:
        """The complete lines of the log since the last call; of a log that was replaced or emptied, all lines."""
        try:
            with open(self.log, "rb") as file:
                if self._log_read > os.fstat(file.fileno()).st_size:
                    self._log_read = 0
                file.seek(self._log_read)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:  # somebody moved it; the next start makes it again
            return []
        self._log_read += len(whole) + len(end)
        return whole.decode(errors="replace").splitlines()

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
        """Restart the process whenever it ends."""
        quick = 0
        while not self._stopping.is_set():
            assert self._process is not None
            try:
                self._process.wait(LOOK_AT_LOG)
            except subprocess.TimeoutExpired:
                rotate(self.log)
                continue
            if self._stopping.is_set():
                return
            _signal_group(self._process.pid, signal.SIGKILL)  # its descendants must not outlive it
            self.deaths += 1
            quick = quick + 1 if time.monotonic() - self._launched < QUICK_DEATH else 1
            if self._stopping.wait(BACKOFF[min(quick, len(BACKOFF)) - 1]):
                return
            with self._launching:
                if self._stopping.is_set():
                    return
                self._launch()


def rotate(log: Path) -> None:
    """Move the content of a large log to a second file; processes that have it open go on at its new beginning."""
    with suppress(OSError):
        if log.stat().st_size > LARGEST_LOG:
            shutil.copyfile(log, log.with_name(f"{log.name}.1"))
            os.truncate(log, 0)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
