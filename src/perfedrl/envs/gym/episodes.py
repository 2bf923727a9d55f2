"""Batches of episodes from a vector of open environments, each of which plays one episode after the other."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray, Shaped

from perfedrl.envs.gym.recipe import Recipe, gymnasium
from perfedrl.envs.gym.spaces import flattened, to_actions
from perfedrl.errors import EnvironmentFailureError, UserError
from perfedrl.types import Trajectory

IDLE = "perfedrl.idle"
"""An option of `reset`: the slot has no more episodes to play in this batch."""

WORKERS = ".*(Received the following error|Traceback|Raising the last exception)"
"""Messages that Gymnasium prints when a process fails; the error raised here has the same content."""

Act = Callable[[Any, Any], Any]
"""Observations and uniforms of all slots -> actions."""


class EpisodeError(RuntimeError):
    """An environment's exception, with the step and the seed of its episode; it can be sent between processes."""


def watched(recipe: Recipe) -> Any:
    """Make an environment whose errors name the failed episode, and which does nothing while idle."""
    gym = gymnasium()

    class Watched(gym.Wrapper):
        def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
            self._idle = bool(options and options.get(IDLE))
            if self._idle:
                self._last = np.zeros(self.observation_space.shape, self.observation_space.dtype)
                return self._last, {}
            self._seed, self._steps = seed, 0
            with self._named():
                return self.env.reset(seed=seed)[0], {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            if self._idle:
                return self._last, 0.0, False, False, {}
            try:
                obs, reward, terminated, truncated, _ = self.env.step(action)
            except Exception as error:
                with self._named():
                    raise error
            self._steps += 1
            return obs, reward, terminated, truncated, {}

        @contextmanager
        def _named(self) -> Iterator[None]:
            try:
                yield
            except Exception as error:
                said = f"raised {type(error).__name__}: {error}"
                raise EpisodeError(f"{said} (step {self._steps} of the episode with seed {self._seed})") from error

    return Watched(flattened(recipe()))


class Slots:
    """An agent's `count` open environments, in this process or each in a process of its own.

    Every episode has its own seed and uniforms, so it does not matter which slot plays it. A slot whose episode ended
    takes the next one of the batch. All episodes are played to their end, so that long episodes count as much as short
    ones.
    """

    def __init__(self, recipe: Recipe, name: str, count: int, processes: bool):
        self._recipe, self._name, self._count, self._processes = recipe, name, count, processes
        self._vector: Any = None

    def play(self, act: Act, noise: int, key: PRNGKeyArray, m: int, longest: int) -> Trajectory:
        """Play m episodes of at most `longest` decisions."""
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        seeds, u = rng.integers(2**31, size=m), rng.random((m, longest, noise), np.float32)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", WORKERS)
                return self._play(act, seeds, u)
        except EpisodeError as error:
            self.close(broken=True)
            raise EnvironmentFailureError(f"{self._name}: the environment {error}") from error
        except BaseException:
            self.close(broken=True)
            raise

    def _play(self, act: Act, seeds: Shaped[np.ndarray, " m"], u: Float[np.ndarray, "m T k"]) -> Trajectory:
        vector, (m, T, _) = self._open(), u.shape
        convert = to_actions(vector.single_action_space)
        waiting, lines = min(self._count, m), []
        episode = np.where(np.arange(self._count) < m, np.arange(self._count), -1)
        t = np.zeros(self._count, int)
        obs = self._begin(episode, np.ones(self._count, bool), seeds)
        while (busy := episode >= 0).any():
            obs = np.asarray(obs, np.float32)
            action = np.asarray(act(obs, u[episode, t]))
            after, reward, terminated, truncated, _ = vector.step(convert(action))
            lines.append((obs, action, reward, episode.copy(), t.copy()))
            obs, t = after, t + busy
            over = busy & (terminated | truncated | (t == T))
            if over.any():
                ended = np.flatnonzero(over)
                following = np.arange(waiting, waiting + len(ended))
                episode[ended], t[ended] = np.where(following < m, following, -1), 0
                waiting += len(ended)
                obs = self._begin(episode, over, seeds)
        return self._whole(lines, seeds, (m, T))

    def _begin(self, episode: np.ndarray, fresh: np.ndarray, seeds: np.ndarray) -> Any:
        """Reset the `fresh` slots for their next episodes; return the observations of all slots."""
        obs, own = None, [int(seeds[e]) if e >= 0 else None for e in episode]
        for mask, options in ((fresh & (episode >= 0), {}), (fresh & (episode < 0), {IDLE: True})):
            if mask.any():
                obs, _ = self._vector.reset(seed=own, options={"reset_mask": mask, **options})
        return obs

    def _whole(self, lines: list[tuple], seeds: np.ndarray, shape: tuple[int, int]) -> Trajectory:
        """Sort the steps of all slots into episodes of one length."""
        *seen, episode, t = (np.stack(x) for x in zip(*lines, strict=True))
        played = episode >= 0
        at = episode[played], t[played]

        def placed(x: np.ndarray, dtype: Any) -> np.ndarray:
            whole = np.zeros((*shape, *x.shape[2:]), dtype)
            whole[at] = x[played]
            return whole

        obs, action, reward = seen
        mask = placed(np.ones(reward.shape), np.float32)
        batch = Trajectory(placed(obs, np.float32), placed(action, action.dtype), placed(reward, np.float32), mask)
        for what, x in (("observation", batch.obs), ("reward", batch.reward)):
            if not np.isfinite(x).all():
                i, step = np.argwhere(~np.isfinite(x.reshape(*shape, -1)).all(axis=-1))[0]
                raise EnvironmentFailureError(
                    f"{self._name}: the environment returned a {what} that is not finite "
                    f"(step {step} of the episode with seed {seeds[i]})"
                )
        return batch

    def _open(self) -> Any:
        if self._vector is None:
            vector = gymnasium().vector
            make = [partial(watched, self._recipe)] * self._count
            mode = vector.AutoresetMode.DISABLED
            try:
                if self._processes:
                    # Spawned, since a forked process may hang where JAX runs threads.
                    self._vector = vector.AsyncVectorEnv(make, autoreset_mode=mode, context="spawn")
                else:
                    self._vector = vector.SyncVectorEnv(make, autoreset_mode=mode)
            except (RuntimeError, OSError, EOFError) as error:
                script = '; a script that uses processes must do its work under `if __name__ == "__main__":`'
                reason = str(error).strip().partition("\n")[0] + (script if self._processes else "")
                raise UserError(f"{self._name}: its environments cannot be opened: {reason}") from error
            self._vector.reset(options={IDLE: True})
        return self._vector

    def close(self, broken: bool = False) -> None:
        """Close the environments; the next batch opens them again. Broken processes are terminated."""
        vector, self._vector = self._vector, None
        if vector is not None:
            vector.close(**({"terminate": True} if broken and self._processes else {}))
