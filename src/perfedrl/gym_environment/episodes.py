"""Batches of episodes from a row of open environments, each of which plays one episode after the other.

Every episode has its own seed and uniforms, so it does not matter which environment plays it. An episode that fails is
dropped and drawn again, with a seed and uniforms that change no other episode's.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from perfedrl.errors import DivergenceError, EnvironmentFailureError, UserError
from perfedrl.gym_environment.open_environment import (
    CLOSING_SECONDS,
    LocalEnvironment,
    OpenEnvironment,
    RemoteEnvironment,
    Reply,
)
from perfedrl.gym_environment.recipe import Recipe

Act = Callable[[Any, Any], Any]
"""Observations and uniforms of all slots -> actions."""

Convert = Callable[[np.ndarray], np.ndarray]
"""A batch of a policy's actions -> actions of the environment."""

Report = Callable[[str, bool], None]
"""Takes what went wrong in an episode that is dropped, and whether its environment's process is lost."""

SCRIPT = '; a script that uses processes must do its work under `if __name__ == "__main__":`'


@dataclass(frozen=True)
class PlaySettings:
    """How the episodes of one agent are played, in `parallel` slots; worker processes get it with every batch."""

    recipe: Recipe
    name: str
    parallel: int
    observation_size: int
    convert: Convert
    retries: int
    timeout: float | None = None
    """The seconds that a step may take where every environment has a process of its own; None in this process."""


class Request(NamedTuple):
    """A batch to play: m episodes of at most `longest` decisions, each of which takes `noise` uniforms."""

    act: Act
    entropy: np.ndarray
    """The whole numbers that determine the seeds and uniforms of all episodes."""
    m: int
    longest: int
    noise: int


class PlayedEpisodes(NamedTuple):
    """The arrays of a batch of episodes [m, T, ...], zero after the end of each; `mask` is 1 before it."""

    obs: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    mask: np.ndarray


class Draws:
    """The seeds and uniforms of a batch of episodes."""

    def __init__(self, request: Request):
        self._entropy, size = request.entropy, (request.m, request.longest, request.noise)
        rng = np.random.default_rng(self._entropy)
        self.seeds, self.u = rng.integers(2**31, size=request.m), rng.random(size, np.float32)
        self.failed = np.zeros(request.m, int)

    def again(self, episode: int) -> None:
        """Draw one episode again; the others keep their seeds and uniforms."""
        self.failed[episode] += 1
        number = episode, int(self.failed[episode])
        rng = np.random.default_rng(np.random.SeedSequence(self._entropy.tolist(), spawn_key=number))
        self.seeds[episode] = rng.integers(2**31)
        self.u[episode] = rng.random(self.u.shape[1:], np.float32)


class Slots:
    """An agent's open environments, in this process or each in a process of its own.

    All episodes of a batch are played to their end, so that long episodes count as much as short ones. An episode that
    fails is reported and drawn again, at most `retries` times. With `share` = (i, n) these are the slots i, i + n, ...
    of the agent, which play the episodes i, i + n, ... of every turn of `parallel` episodes.
    """

    def __init__(self, settings: PlaySettings, report: Report, share: tuple[int, int] = (0, 1)):
        self.settings, self.report, self.share = settings, report, share
        self.numbers = np.arange(settings.parallel)[share[0] :: share[1]]
        self._environments: dict[int, OpenEnvironment] = {}

    def play(self, request: Request) -> PlayedEpisodes:
        """Play the episodes of these slots."""
        try:
            return Batch(self, request).play()
        except BaseException:
            self.close(broken=True)
            raise

    def open(self) -> dict[int, OpenEnvironment]:
        """Return the open environments by slot; make them first where they are closed."""
        if not self._environments:
            try:
                if self.settings.timeout is None:
                    self._open_in_this_process()
                else:
                    self._open_in_processes(self.settings.timeout)
            except BaseException as error:
                self.close(broken=True)
                if isinstance(error, RuntimeError | OSError | EOFError):
                    reason = str(error).strip().partition("\n")[0]
                    raise UserError(f"{self.settings.name}: its environments cannot be opened: {reason}") from error
                raise
        return self._environments

    def _open_in_this_process(self) -> None:
        for slot in self.numbers.tolist():
            self._environments[slot] = LocalEnvironment(self.settings.recipe)

    def _open_in_processes(self, timeout: float) -> None:
        started = {}
        for slot in self.numbers.tolist():
            started[slot] = self._environments[slot] = RemoteEnvironment(self.settings.recipe, timeout)
        for said in [env.opened() for env in started.values()]:
            if said.failure is not None:
                raise RuntimeError(f"the environment {said.failure}{SCRIPT}" if said.lost else said.failure)

    def drop(self, failure: str, lost: bool, times: int) -> None:
        """Report a failed episode; raise if it failed more often than it may be drawn again."""
        self.report(failure, lost)
        if times > self.settings.retries:
            often = ":" if times == 1 else f" {times} times in a row, the last time because"
            raise EnvironmentFailureError(f"{self.settings.name}: an episode failed{often} the environment {failure}")

    def close(self, broken: bool = False) -> None:
        """Close the environments; the next batch opens them again. Processes that do not end in time are killed."""
        open_, self._environments = self._environments, {}
        for env in open_.values():
            env.begin_closing()
        limit = time.monotonic() + CLOSING_SECONDS
        for env in open_.values():
            env.close(broken, limit)


class Batch:
    """A batch of episodes while it is played: which slot plays which episode, and the steps so far.

    Arrays have a row for every slot of the agent, also for those that others play: matrix products round by the number
    of rows, and so decisions have the same bits for any share of the slots.
    """

    def __init__(self, slots: Slots, request: Request):
        self.slots, self.act, self.draws, self.environments = slots, request.act, Draws(request), slots.open()
        count = slots.settings.parallel
        self.own = episodes_of(slots.share, count, request.m)
        self.waiting = deque(self.own.tolist())
        self.episode = np.full(count, -1)
        """The episode that each slot plays; -1 where none is left."""
        self.t = np.zeros(count, int)
        self.obs = np.zeros((count, slots.settings.observation_size), np.float32)
        self.lines: list[tuple] = []

    def play(self) -> PlayedEpisodes:
        """Play all episodes to their end."""
        self._begin(self.slots.numbers)
        T = self.draws.u.shape[1]
        while (busy := np.flatnonzero(self.episode >= 0)).size:
            action = np.asarray(self.act(self.obs, self.draws.u[self.episode, self.t]))
            if action.dtype.kind == "f" and not np.isfinite(action[busy]).all():
                name = self.slots.settings.name
                raise DivergenceError(f"{name}: the policy's actions are not finite; lower alpha or beta")
            environments = [self.environments[slot] for slot in busy.tolist()]
            converted = self.slots.settings.convert(action)[busy]
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
        return self._whole(T)

    def _begin(self, free: np.ndarray) -> None:
        """Begin waiting episodes in free slots, until each has one or none waits."""
        while free.size and self.waiting:
            free = free[: len(self.waiting)]
            for slot in free.tolist():
                self.episode[slot] = self.waiting.popleft()
                self.environments[slot].ask(None, int(self.draws.seeds[self.episode[slot]]))
            answers = [self.environments[slot].answer() for slot in free.tolist()]
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
        self.slots.drop(failure, answer.lost, int(self.draws.failed[episode]))
        self.waiting.appendleft(episode)

    def _whole(self, longest: int) -> PlayedEpisodes:
        """Sort the steps of all slots into episodes of one length, without those of dropped episodes."""
        obs, action, episode, t, attempt, reward = (np.concatenate(x) for x in zip(*self.lines, strict=True))
        kept = attempt == self.draws.failed[episode]
        at = np.searchsorted(self.own, episode[kept]), t[kept]

        def placed(x: np.ndarray, dtype: Any) -> np.ndarray:
            whole = np.zeros((len(self.own), longest, *x.shape[1:]), dtype)
            whole[at] = x[kept]
            return whole

        mask = placed(np.ones(reward.shape), np.float32)
        return PlayedEpisodes(placed(obs, np.float32), placed(action, action.dtype), placed(reward, np.float32), mask)


def episodes_of(share: tuple[int, int], parallel: int, m: int) -> np.ndarray:
    """Return the numbers of the episodes of a batch that a share (i, n) of the slots plays."""
    every, (i, n) = np.arange(m), share
    return every[every % parallel % n == i]


def rewards(answers: Sequence[Reply]) -> np.ndarray:
    """The rewards of some answers in single precision; those that are too large for it are infinite."""
    with np.errstate(over="ignore"):
        return np.array([answer.reward for answer in answers], np.float32)
