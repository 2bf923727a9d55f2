"""An agent's batches of episodes: played in this process or by worker processes; what fails is counted."""

import itertools
import logging
import sys
from typing import Literal

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from perfedrl.compilation import available_cores
from perfedrl.envs.base import EpisodeFailures
from perfedrl.errors import UserError
from perfedrl.gym_environment.episodes import Act, PlayedEpisodes, PlaySettings, Request, Slots
from perfedrl.gym_environment.worker_pool import UnsendableError, Workers
from perfedrl.types import Trajectory

log = logging.getLogger("perfedrl")

MOST_WORKERS = 1024

WorkerCount = int | Literal["auto"]
"""The number of processes that play the episodes of a fleet; "auto" is one for each core."""

AGENTS = itertools.count()
"""Numbers by which worker processes know the agents."""


class EpisodePlayer:
    """Plays the episodes of one agent, with `workers` in processes that it shares with other agents."""

    def __init__(self, settings: PlaySettings, workers: Workers | None = None):
        self.settings, self._workers, self._number = settings, workers, next(AGENTS)
        self.slots = Slots(settings, self._count_failure)
        self.failures, self._told = EpisodeFailures(), False

    def play(self, act: Act, noise: int, key: PRNGKeyArray, m: int, longest: int, sendable: bool) -> Trajectory:
        """Play m episodes of at most `longest` decisions; in this process if `act` is not `sendable`."""
        request = Request(act, np.asarray(jax.random.key_data(key)), m, longest, noise)
        try:
            return Trajectory(*(self._play_by_workers(request) if sendable else self.slots.play(request)))
        except BaseException:
            self.close(broken=True)
            raise

    def _play_by_workers(self, request: Request) -> PlayedEpisodes:
        """Play a batch by the workers, where there are some and the policy can be sent to them."""
        if self._workers is None:
            return self.slots.play(request)
        try:
            return self._workers.play(self._number, self.settings, request, self._count_failure, self._count_restart)
        except UnsendableError as error:
            if not self._told:
                name = self.settings.name
                log.warning("%s: workers cannot get the policy, and this process plays instead: %s", name, error)
            self._told = True
            return self.slots.play(request)

    def _count_failure(self, failure: str, lost: bool) -> None:
        """Count a failed episode, and say so the first time."""
        if self.failures.episodes == 0:
            drawn_again = "; the episode is drawn again, and further failures are counted"
            more = drawn_again if self.settings.retries else ""
            log.warning("%s: the environment %s%s", self.settings.name, failure, more)
        self.failures = EpisodeFailures(self.failures.episodes + 1, self.failures.restarts + lost)

    def _count_restart(self) -> None:
        """Count a worker process that died and was started again."""
        self.failures = self.failures._replace(restarts=self.failures.restarts + 1)

    def close(self, broken: bool = False) -> None:
        """Close the environments; the next batch opens them again. Processes that do not end in time are killed."""
        self.slots.close(broken)
        if self._workers is not None:
            self._workers.close(self._number, broken)


def make_workers(workers: WorkerCount, processes: bool, parallel: int) -> Workers | None:
    """Return the worker processes of a fleet, which start when they are needed; None for this process alone."""
    if workers != "auto" and not 1 <= workers <= MOST_WORKERS:
        raise UserError(f'workers must be "auto" or from 1 to {MOST_WORKERS}; it is {workers}')
    if workers not in ("auto", 1) and processes:
        raise UserError("workers and processes exclude each other: with processes every environment has its own")
    if workers not in ("auto", 1) and sys.platform == "win32":
        raise UserError("workers do not work on Windows; leave it out, or set processes = true")
    if processes or sys.platform == "win32":
        return None
    count = min(available_cores() if workers == "auto" else workers, parallel)
    return Workers(count) if count > 1 else None
