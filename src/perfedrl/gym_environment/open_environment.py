"""One open environment, in this process or in a process of its own; failures are answers, not exceptions.

Both kinds are asked with `ask` and answer with `answer`, so that the processes of several environments work at the same
time. After a failure the environment is made again before its next episode, so that it starts no episode in a state
that depends on earlier ones.
"""

import contextlib
import math
import multiprocessing
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import numpy as np

from perfedrl.errors import FAILURES, UserError, in_one_line
from perfedrl.gym_environment.recipe import Recipe, gymnasium
from perfedrl.gym_environment.returns import ReturnError, parse_reset, parse_reward, parse_step

OPENING_SECONDS = 300.0
"""The time in which a process must have made its environment; many processes that start at once share the cores."""

CLOSING_SECONDS = 5.0
"""The time in which a process that is asked to end must have closed its environment."""

DISCARD = "discard"
"""The message that an environment's answer could not be used."""


class Reply(NamedTuple):
    """What an environment returned: after a reset only the observation counts."""

    obs: Any = None
    reward: float = 0.0
    over: bool = False
    failure: str | None = None
    """What went wrong, as a predicate of "the environment"; the reward is then nan."""
    lost: bool = False
    """Whether the environment's process is gone and must be started again."""


def flattened(env: Any) -> Any:
    """Wrap an environment so that its observations are vectors, by Gymnasium's own flattening."""
    gym = gymnasium()
    plain = isinstance(env.observation_space, gym.spaces.Box) and len(env.observation_space.shape) == 1
    return env if plain else gym.wrappers.FlattenObservation(env)


def failed(failure: str, lost: bool = False) -> Reply:
    """Return the answer of an environment that failed."""
    return Reply(reward=math.nan, failure=failure, lost=lost)


class OpenEnvironment(ABC):
    """An open environment that plays one episode after the other."""

    @abstractmethod
    def ask(self, action: Any, seed: int | None = None) -> None:
        """Begin an episode with `seed`, or take a step with an action where `seed` is None."""

    @abstractmethod
    def answer(self) -> Reply:
        """Return the answer to the last question."""

    @abstractmethod
    def discard(self) -> None:
        """Make the environment again before its next episode, since its answer could not be used."""

    @abstractmethod
    def close(self, broken: bool = False, limit: float | None = None) -> None:
        """Close the environment; if `broken`, errors while it closes do not count.

        `limit` is the time of the monotonic clock until which its process may go on.
        """

    def begin_closing(self) -> None:
        """Begin to close the environment where that happens elsewhere, so that several close at the same time."""
        return


class LocalEnvironment(OpenEnvironment):
    """An environment in this process."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self._env: Any = flattened(recipe())
        self._shape = self._env.observation_space.shape
        self._seed, self._steps, self._answer = 0, 0, Reply()

    def ask(self, action: Any, seed: int | None = None) -> None:
        try:
            self._answer = self._step(action) if seed is None else self._reset(seed)
        except ReturnError as error:
            self._fail(f"breaks Gymnasium's rules: {error}")
        except FAILURES as error:
            self._fail(f"raised {in_one_line(error)}")

    def answer(self) -> Reply:
        return self._answer

    def _reset(self, seed: int) -> Reply:
        self._seed, self._steps = seed, 0
        if self._env is None:
            self._env = flattened(self._recipe())
        return Reply(self._fitting(parse_reset(self._env.reset(seed=seed))))

    def _step(self, action: Any) -> Reply:
        obs, reward, terminated, truncated = parse_step(self._env.step(action))
        self._steps += 1
        return Reply(self._fitting(obs), parse_reward(reward), bool(terminated or truncated))

    def _fitting(self, obs: Any) -> Any:
        """Return an observation after a check of its shape."""
        if (obs.shape if isinstance(obs, np.ndarray) else np.shape(obs)) != self._shape:
            raise ReturnError(f"an observation has the shape {np.shape(obs)}, and {self._shape} is declared")
        return obs

    def _fail(self, failure: str) -> None:
        self.discard()
        self._answer = failed(f"{failure} (step {self._steps} of the episode with seed {self._seed})")

    def discard(self) -> None:
        env, self._env = self._env, None
        with contextlib.suppress(*FAILURES):
            if env is not None:
                env.close()

    def close(self, broken: bool = False, limit: float | None = None) -> None:
        if broken:
            self.discard()
        elif self._env is not None:
            self._recipe.close(self._env)
            self._env = None


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Hold back Ctrl-C from processes that start meanwhile; this process gets it at the end."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(pipe: Any, recipe: Recipe) -> None:
    """Answer questions about an environment until the pipe closes: the work of an environment's process.

    Ctrl-C reaches all processes of a terminal. It was held back from this one, which is told to end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, OSError):
        try:
            env = LocalEnvironment(recipe)
        except FAILURES as error:
            pipe.send(failed(str(error) if isinstance(error, UserError) else in_one_line(error)))
            return
        try:
            pipe.send(Reply())
            while (question := pipe.recv()) is not None:
                if question == DISCARD:
                    env.discard()
                else:
                    env.ask(*question)
                    pipe.send(env.answer())
        finally:
            env.close()


class RemoteEnvironment(OpenEnvironment):
    """An environment in a process of its own, which is started again if it dies or does not answer in time.

    The process starts when the object is made; `opened` waits until it has made its environment.
    """

    def __init__(self, recipe: Recipe, timeout: float):
        self._recipe, self._timeout = recipe, timeout
        self._process: Any = None
        self._where, self._answer = "", Reply()
        self._remade = False
        """Whether the process makes its environment again at the next question."""
        self._start()

    def _start(self) -> None:
        # Spawned, since a forked process may hang where JAX runs threads.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._recipe), daemon=True)
        try:
            if sys.platform != "win32":
                resource_tracker.ensure_running()  # its start would let interrupts through again
            with interrupts_held_back():
                process.start()
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError | RuntimeError) or not isinstance(error, Exception):
                raise
            # The recipe could not be sent to the process.
            raise RuntimeError(f"{error}; name a factory that stands at the top of a module") from error
        finally:
            theirs.close()
        self._pipe, self._process, self._remade = ours, process, False
        self._set_deadline(OPENING_SECONDS)

    def _set_deadline(self, seconds: float) -> None:
        self._deadline, self._limit = time.monotonic() + seconds, seconds

    def opened(self) -> Reply:
        """Wait until the process has made its environment."""
        said = self._receive()
        if said.failure is not None:
            self._stop()
        return said

    def _reopened(self) -> Reply:
        """Start the process again."""
        try:
            self._start()
        except (RuntimeError, OSError) as error:  # the machine has no room for another process
            return failed(f"got no process: {error}")
        return self.opened()

    def discard(self) -> None:
        if self._process is not None:
            self._remade = True
            with contextlib.suppress(OSError):  # the next question notices that the process is gone
                self._pipe.send(DISCARD)

    def ask(self, action: Any, seed: int | None = None) -> None:
        self._where = self._where if seed is None else f"(in the episode with seed {seed})"
        self._answer = Reply()
        if self._process is None:
            said = self._reopened()
            if said.failure is not None:
                self._answer = said._replace(failure=f"could not be made again: {said.failure}")
                return
        self._set_deadline(self._timeout + (OPENING_SECONDS if self._remade else 0.0))
        self._remade = False
        try:
            self._pipe.send((action, seed))
        except OSError:
            self._answer = self._lost(self._end())

    def answer(self) -> Reply:
        return self._receive() if self._answer.failure is None else self._answer

    def _receive(self) -> Reply:
        """Wait for the process until the deadline."""
        try:
            # The longest wait of the operating system is shorter than an unlimited timeout.
            if self._pipe.poll(min(max(0.0, self._deadline - time.monotonic()), 1e6)):
                said = self._pipe.recv()
                self._remade = said.failure is not None
                return said
        except (EOFError, OSError):
            return self._lost(self._end())
        return self._lost(f"did not answer within {self._limit:g} s")

    def _end(self) -> str:
        """Say how the process ended."""
        self._process.join(CLOSING_SECONDS)
        code = self._process.exitcode
        if code is None:
            return "closed its connection"
        return f"ended its process with exit code {code}" if code >= 0 else f"was ended by signal {-code}"

    def _lost(self, failure: str) -> Reply:
        self._stop()
        return failed(f"{failure} {self._where}".rstrip(), lost=True)

    def _stop(self) -> None:
        """Kill the process; the next episode gets a new one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()
            self._pipe.close()

    def begin_closing(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._pipe.send(None)

    def close(self, broken: bool = False, limit: float | None = None) -> None:
        if self._process is not None:
            if limit is None:
                self.begin_closing()
            self._process.join(CLOSING_SECONDS if limit is None else max(0.0, limit - time.monotonic()))
        self._stop()
