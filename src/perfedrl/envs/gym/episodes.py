"""Batches of episodes from a row of open environments, each of which plays one episode after the other.

Every episode has its own seed and uniforms, so it does not matter which environment plays it. An episode that fails is
dropped and drawn again, with a seed and uniforms that change no other episode's.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from perfedrl.envs.base import EpisodeFailures
from perfedrl.errors import DivergenceError, EnvironmentFailureError, UserError
from perfedrl.gym_environment.open_environment import (
    CLOSING_SECONDS,
    LocalEnvironment,
    OpenEnvironment,
    RemoteEnvironment,
    Reply,
)
from perfedrl.gym_environment.recipe import Recipe
from perfedrl.types import Trajectory

log = logging.getLogger("perfedrl")

Act = Callable[[Any, Any], Any]
"""Observations and uniforms of all slots -> actions."""

Convert = Callable[[np.ndarray], np.ndarray]
"""A batch of a policy's actions -> actions of the environment."""

SCRIPT = '; a script that uses processes must do its work under `if __name__ == "__main__":`'


class Draws:
    """The seeds and uniforms of a batch of episodes."""

    def __init__(self, key: PRNGKeyArray, m: int, longest: int, noise: int):
        self._entropy = np.asarray(jax.random.key_data(key))
        rng = np.random.default_rng(self._entropy)
        self.seeds, self.u = rng.integers(2**31, size=m), rng.random((m, longest, noise), np.float32)
        self.failed = np.zeros(m, int)

    def again(self, episode: int) -> None:
        """Draw one episode again; the others keep their seeds and uniforms."""
        self.failed[episode] += 1
        number = episode, int(self.failed[episode])
        rng = np.random.default_rng(np.random.SeedSequence(self._entropy.tolist(), spawn_key=number))
        self.seeds[episode] = rng.integers(2**31)
        self.u[episode] = rng.random(self.u.shape[1:], np.float32)


class Slots:
    """An agent's `count` open environments, in this process or each in a process of its own.

    All episodes of a batch are played to their end, so that long episodes count as much as short ones. An episode that
    fails is drawn again, at most `retries` times.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        count: int,
        observation_size: int,
        convert: Convert,
        retries: int,
        timeout: float | None = None,
    ):
        self._recipe, self.name, self._count, self._retries, self._timeout = recipe, name, count, retries, timeout
        self.observation_size, self.convert = observation_size, convert
        self._environments: list[OpenEnvironment] = []
        self.failures = EpisodeFailures()

    def play(self, act: Act, noise: int, key: PRNGKeyArray, m: int, longest: int) -> Trajectory:
        """Play m episodes of at most `longest` decisions."""
        try:
            return Batch(self, act, Draws(key, m, longest, noise)).play()
        except BaseException:
            self.close(broken=True)
            raise

    def open(self) -> list[OpenEnvironment]:
        """Return the open environments; make them first where they are closed."""
        if not self._environments:
            try:
                if self._timeout is None:
                    self._open_in_this_process()
                else:
                    self._open_in_processes(self._timeout)
            except BaseException as error:
                self.close(broken=True)
                if isinstance(error, RuntimeError | OSError | EOFError):
                    reason = str(error).strip().partition("\n")[0]
                    raise UserError(f"{self.name}: its environments cannot be opened: {reason}") from error
                raise
        return self._environments

    def _open_in_this_process(self) -> None:
        for _ in range(self._count):
            self._environments.append(LocalEnvironment(self._recipe))

    def _open_in_processes(self, timeout: float) -> None:
        started = []
        for _ in range(self._count):
            started.append(RemoteEnvironment(self._recipe, timeout))
            self._environments.append(started[-1])
        for said in [env.opened() for env in started]:
            if said.failure is not None:
                raise RuntimeError(f"the environment {said.failure}{SCRIPT}" if said.lost else said.failure)

    def count_failure(self, failure: str, lost: bool, times: int) -> None:
        """Count a failed episode; raise if it failed more often than it may be drawn again."""
        if self.failures.episodes == 0:
            more = "" if self._retries == 0 else "; the episode is drawn again, and further failures are counted"
            log.warning("%s: the environment %s%s", self.name, failure, more)
        episodes, restarts = self.failures
        self.failures = EpisodeFailures(episodes + 1, restarts + lost)
        if times > self._retries:
            often = ":" if times == 1 else f" {times} times in a row, the last time because"
            raise EnvironmentFailureError(f"{self.name}: an episode failed{often} the environment {failure}")

    def close(self, broken: bool = False) -> None:
        """Close the environments; the next batch opens them again. Processes that do not end in time are killed."""
        open_, self._environments = self._environments, []
        for env in open_:
            env.begin_closing()
        limit = time.monotonic() + CLOSING_SECONDS
        for env in open_:
            env.close(broken, limit)


class Batch:
    """A batch of episodes while it is played: which slot plays which episode, and the steps so far."""

    def __init__(self, slots: Slots, act: Act, draws: Draws):
        self.slots, self.act, self.draws, self.environments = slots, act, draws, slots.open()
        count = len(self.environments)
        self.waiting = deque(range(len(draws.seeds)))
        self.episode = np.full(count, -1)
        """The episode that each slot plays; -1 where none is left."""
        self.t = np.zeros(count, int)
        self.obs = np.zeros((count, slots.observation_size), np.float32)
        self.lines: list[tuple] = []

    def play(self) -> Trajectory:
        """Play all episodes to their end."""
        self._begin(np.arange(len(self.environments)))
        m, T, _ = self.draws.u.shape
        while (busy := np.flatnonzero(self.episode >= 0)).size:
            action = np.asarray(self.act(self.obs, self.draws.u[self.episode, self.t]))
            if action.dtype.kind == "f" and not np.isfinite(action[busy]).all():
                raise DivergenceError(f"{self.slots.name}: the policy's actions are not finite; lower alpha or beta")
            environments = [self.environments[slot] for slot in busy.tolist()]
            converted = self.slots.convert(action)[busy]
            for env, own in zip(environments, converted, strict=True):
                env.ask(own)
            answers = [env.answer() for env in environments]
            episode, t = self.episode[busy], self.t[busy]
            reward = rewards(answers)
            self.lines.append((self.obs[busy], action[busy], episode, t, self.draws.failed[episode], reward))
            self.t[busy] = t + 1
            over = np.array([answer.over for answer in answers]) | (t == T - 1)
            failed = self._take_in(busy, answers, reward, over)
            if (ended := busy[over | failed]).size:
                self.episode[ended], self.t[ended] = -1, 0
                self._begin(ended)
        return self._whole(m, T)

    def _begin(self, free: np.ndarray) -> None:
        """Begin waiting episodes in free slots, until each has one or none waits."""
        while free.size and self.waiting:
            free = free[: len(self.waiting)]
            for slot in free:
                self.episode[slot] = self.waiting.popleft()
                self.environments[slot].ask(None, int(self.draws.seeds[self.episode[slot]]))
            answers = [self.environments[slot].answer() for slot in free]
            reward = rewards(answers)
            free = free[self._take_in(free, answers, reward, np.zeros(len(free), bool))]
            self.episode[free] = -1

    def _take_in(self, slots: np.ndarray, answers: Sequence[Reply], reward: np.ndarray, over: np.ndarray) -> np.ndarray:
        """Keep the observations of the slots for their next decisions; return in which slots the episode failed."""
        failed = ~np.isfinite(reward)
        going_on = np.flatnonzero(~(over | failed))
        if going_on.size:
            obs = np.array([answers[i].obs for i in going_on.tolist()], np.float32)
            self.obs[slots[going_on]] = obs
            failed[going_on] = ~np.isfinite(obs).all(axis=1)
        for i in np.flatnonzero(failed).tolist():
            self._fail(int(slots[i]), answers[i])
        return failed

    def _fail(self, slot: int, answer: Reply) -> None:
        """Drop the episode of a slot, and draw it again."""
        episode, t = int(self.episode[slot]), self.t[slot]
        failure = answer.failure
        if failure is None:
            what, step = ("an observation", t) if np.isfinite(rewards([answer])).all() else ("a reward", t - 1)
            where = f"(step {step} of the episode with seed {self.draws.seeds[episode]})"
            failure = f"returned {what} that is not finite in single precision {where}"
            self.environments[slot].discard()
        self.draws.again(episode)
        self.slots.count_failure(failure, answer.lost, int(self.draws.failed[episode]))
        self.waiting.appendleft(episode)

    def _whole(self, m: int, longest: int) -> Trajectory:
        """Sort the steps of all slots into episodes of one length, without those of dropped episodes."""
        obs, action, episode, t, attempt, reward = (np.concatenate(x) for x in zip(*self.lines, strict=True))
        kept = attempt == self.draws.failed[episode]
        at = episode[kept], t[kept]

        def placed(x: np.ndarray, dtype: Any) -> np.ndarray:
            whole = np.zeros((m, longest, *x.shape[1:]), dtype)
            whole[at] = x[kept]
            return whole

        mask = placed(np.ones(reward.shape), np.float32)
        return Trajectory(placed(obs, np.float32), placed(action, action.dtype), placed(reward, np.float32), mask)


def rewards(answers: Sequence[Reply]) -> np.ndarray:
    """The rewards of some answers in single precision; those that are too large for it are infinite."""
    with np.errstate(over="ignore"):
        return np.array([answer.reward for answer in answers], np.float32)
