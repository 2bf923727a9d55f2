"""A worker process: plays its share of every batch, in environments that it keeps open for each agent."""

import contextlib
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple

from perfedrl.errors import FAILURES, UserError, in_one_line
from perfedrl.gym_environment.episodes import PlayedEpisodes, PlaySettings, Request, Slots


class Job(NamedTuple):
    """A batch of one agent, whose environments are known by the number `agent`."""

    agent: int
    settings: PlaySettings
    request: Request


class Closing(NamedTuple):
    """The message that an agent's environments are to be closed; if `broken`, errors while they close do not count."""

    agent: int
    broken: bool


class Share(NamedTuple):
    """A worker's share of a batch, and the episodes that were dropped meanwhile; or the error that ended it."""

    episodes: PlayedEpisodes | None = None
    dropped: tuple[tuple[str, bool], ...] = ()
    error: Exception | None = None


class Shares:
    """The slots of all agents in this process: with (i, n), of each agent every n-th, from the i-th."""

    def __init__(self, which: tuple[int, int]):
        self._which = which
        self._agents: dict[int, Slots] = {}
        self._dropped: list[tuple[str, bool]] = []

    def play(self, job: Job) -> Share:
        """Play a share of a batch; environments are opened where they are not."""
        self._dropped.clear()
        try:
            if job.agent not in self._agents:
                self._agents[job.agent] = Slots(job.settings, self._drop, self._which)
            return Share(self._agents[job.agent].play(job.request), tuple(self._dropped))
        except UserError as error:
            return Share(dropped=tuple(self._dropped), error=error)
        except FAILURES as error:
            told = RuntimeError(in_one_line(error))
            told.add_note(traceback.format_exc())
            return Share(dropped=tuple(self._dropped), error=told)

    def _drop(self, failure: str, lost: bool) -> None:
        self._dropped.append((failure, lost))

    def close(self, agent: int, broken: bool) -> None:
        """Close the environments of an agent."""
        slots = self._agents.pop(agent, None)
        if slots is not None:
            slots.close(broken)

    def close_all(self) -> None:
        """Close all environments."""
        for agent in list(self._agents):
            self.close(agent, broken=False)


def main() -> None:
    """Play batches until the connection, which is standard input, closes.

    Ctrl-C reaches all processes of a terminal. It was held back from this one, which ends with its connection.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    shares = Shares((int(sys.argv[1]), int(sys.argv[2])))
    with contextlib.suppress(EOFError, OSError):
        try:
            serve_jobs(connection, shares)
        finally:
            shares.close_all()


def serve_jobs(connection: Connection, shares: Shares) -> None:
    """Answer jobs until the message None comes."""
    while True:
        message = connection.recv_bytes()
        try:
            job = ForkingPickler.loads(message)
        except FAILURES as error:
            reason = f"a worker process cannot load what it is to play: {in_one_line(error)}"
            connection.send(Share(error=UserError(f"{reason}; set workers = 1")))
            continue
        if job is None:
            return
        if isinstance(job, Closing):
            shares.close(*job)
        else:
            connection.send(shares.play(job))
