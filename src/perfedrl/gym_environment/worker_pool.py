"""Worker processes, one for each core, that play the batches of a fleet's agents together.

A batch is split by slots. Which process plays an episode changes none of its bits: its seed and uniforms follow from
the batch's key and its number. So the share of a process that died is played again as it was.
"""

import contextlib
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from perfedrl.errors import EnvironmentFailureError, UserError
from perfedrl.gym_environment.episodes import PlayedEpisodes, PlaySettings, Report, Request, episodes_of
from perfedrl.gym_environment.open_environment import CLOSING_SECONDS, interrupts_held_back
from perfedrl.gym_environment.worker import Closing, Job, Share

log = logging.getLogger("perfedrl")

COMMAND = "from perfedrl.gym_environment.worker import main; main()"
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that keep NumPy in one thread, since every core has a process."""


class UnsendableError(Exception):
    """A policy's decisions cannot be sent to another process."""


class WorkerProcess:
    """One worker process: it is asked to play its share of a batch, and answers."""

    def __init__(self, number: int, count: int):
        self._ours, theirs = multiprocessing.Pipe()
        folders = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        environment = {**os.environ, **dict.fromkeys(ONE_THREAD, "1"), "PYTHONPATH": folders}
        command = [sys.executable, "-P", "-c", COMMAND, str(number), str(count)]
        try:
            with interrupts_held_back():
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)
        except BaseException:
            self._ours.close()
            raise
        finally:
            theirs.close()
        self.playing = False
        """Whether an answer is still to come."""

    def tell(self, message: bytes) -> None:
        """Send a message."""
        self._ours.send_bytes(message)

    def answer(self) -> Share:
        """Wait for the answer to a job."""
        said = self._ours.recv()
        self.playing = False
        return said

    def begin_closing(self) -> None:
        """Let the process close its environments and end, once it has played what it plays."""
        with contextlib.suppress(OSError):
            self._ours.send(None)
        self._ours.close()

    def end(self, limit: float) -> str:
        """Wait for the end of the process until a time of the monotonic clock, kill it then, and say how it ended."""
        try:
            code = self._process.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"


class Workers:
    """The `count` worker processes of a fleet: they start with the first batch and end when no agent is open."""

    def __init__(self, count: int):
        self.count = count
        self._processes: dict[int, WorkerProcess] = {}
        self._agents: set[int] = set()

    def play(
        self,
        agent: int,
        settings: PlaySettings,
        request: Request,
        report: Report,
        report_restart: Callable[[], None],
    ) -> PlayedEpisodes:
        """Play a batch of an agent, which has a number of its own among all agents of these workers.

        The episodes that were dropped are reported once all processes have answered. Raise `UnsendableError` if the
        policy cannot be sent.
        """
        job = packed(agent, settings, request)
        self._agents.add(agent)
        every = {i: episodes_of((i, self.count), settings.parallel, request.m) for i in range(self.count)}
        parts = {i: own for i, own in every.items() if own.size}
        try:
            for i in parts:
                self._ask(i, job)
            shares = {i: self._answer(i, job, settings, report_restart) for i in parts}
        except BaseException:
            self._end([i for i, process in self._processes.items() if process.playing])
            raise
        for share in shares.values():
            for failure, lost in share.dropped:
                report(failure, lost)
        for share in shares.values():
            if share.error is not None:
                raise share.error
        return together([(parts[i], share.episodes) for i, share in shares.items()], request.m)

    def _ask(self, i: int, job: bytes) -> None:
        """Send a job to a process, which is started where there is none."""
        if i not in self._processes:
            self._processes[i] = WorkerProcess(i, self.count)
        self._processes[i].playing = True
        with contextlib.suppress(OSError):  # waiting for the answer notices that the process is gone
            self._processes[i].tell(job)

    def _answer(self, i: int, job: bytes, settings: PlaySettings, report_restart: Callable[[], None]) -> Share:
        """Wait for a share; if its process dies, another one plays it again."""
        for attempt in range(settings.retries + 1):
            if attempt:
                self._ask(i, job)
            try:
                return self._processes[i].answer()
            except (EOFError, OSError):
                (how,) = self._end([i])
            report_restart()
            log.warning("%s: a worker process %s; its episodes are played again", settings.name, how)
        raise EnvironmentFailureError(
            f"{settings.name}: a worker process {how}, {settings.retries + 1} times in a row; with processes = true "
            "only the episode that ends a process is drawn again"
        )

    def close(self, agent: int, broken: bool = False) -> None:
        """Close the environments of an agent; end the processes if no other agent is open."""
        self._agents.discard(agent)
        if not self._agents:
            self._end(list(self._processes))
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                process.tell(bytes(ForkingPickler.dumps(Closing(agent, broken))))

    def _end(self, which: list[int]) -> list[str]:
        """End some processes, those that do not end in time by force; say how each ended."""
        ended = [self._processes.pop(i) for i in which]
        for process in ended:
            process.begin_closing()
        limit = time.monotonic() + CLOSING_SECONDS
        return [process.end(limit) for process in ended]


def packed(agent: int, settings: PlaySettings, request: Request) -> bytes:
    """Return the bytes of a job."""
    try:
        ForkingPickler.dumps(settings)
    except Exception as error:
        raise UserError(
            f"{settings.name}: it cannot be sent to a worker process: {error}; name a factory that stands at the top "
            "of a module, or set workers = 1"
        ) from error
    try:
        return bytes(ForkingPickler.dumps(Job(agent, settings, request)))
    except Exception as error:
        raise UnsendableError(str(error)) from error


def together(parts: list[tuple[np.ndarray, Any]], m: int) -> PlayedEpisodes:
    """Put the shares of all processes into one batch; each comes with the numbers of its episodes."""

    def whole(arrays: list[np.ndarray]) -> np.ndarray:
        x = np.zeros((m, *arrays[0].shape[1:]), arrays[0].dtype)
        for (own, _), array in zip(parts, arrays, strict=True):
            x[own] = array
        return x

    return PlayedEpisodes(*(whole(list(arrays)) for arrays in zip(*(share for _, share in parts), strict=True)))
