"""Environment steps per second: cart-poles in JAX, in Gymnasium, and in Gymnasium through perfedrl, in one run.

Every rate is the median of a few repetitions without compiling. The rate of perfedrl counts decisions before the end of
an episode; those after it are computed too, and counted separately. Machines are noisy: the ratio of one run is more
reliable than its rates.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import NamedTuple

import gymnasium as gym
import jax
import numpy as np
from rich.table import Table
from timing import clock, console, target

from perfedrl import compilation
from perfedrl.envs import ENVS, gymnasium_fleet
from perfedrl.policies import MLPSoftmax
from perfedrl.rollout import RolloutSampler
from perfedrl.simulation.compiled import over_replicas
from perfedrl.types import Params

POLICY = MLPSoftmax((4, 32, 2))
HORIZON = 199
SLOTS = (16, 64)
FEEDBACK, GAIN = (0.5, 1.0, 5.0, 1.5), 20.0
"""Weights of position, velocity, angle and angular velocity by which the pole is balanced."""


class Rate(NamedTuple):
    """Steps per second: those before the ends of episodes, and all computed ones."""

    who: str
    happened: float
    computed: float


def untrained() -> Params:
    """The untrained network: episodes of some twenty decisions."""
    return POLICY.init(jax.random.key(0))


def balancing() -> Params:
    """The same network with one hidden unit that balances: nearly all episodes last to the end."""
    first, last = jax.tree.map(np.array, untrained())
    first["weight"][:, 0] = FEEDBACK
    last["weight"][0] = [-GAIN, GAIN]
    return first, last


def repeated(play: Callable[[], None], repeats: int) -> float:
    """Median seconds, after one call that compiles and warms up."""
    play()
    return statistics.median(clock(play) for _ in range(repeats))


def ours(params: Params, agents: int, episodes: int, repeats: int) -> Rate:
    """Cart-poles of different lengths, all agents and episodes in one compiled call that uses every core."""
    poles = ENVS["cart-pole"](agents=agents, held_out=0, horizon=HORIZON).train
    cores = len(jax.local_devices())

    def sample(task, key, params):
        return RolloutSampler(task, POLICY).sample(params, key, episodes)

    call = compilation.jit(lambda tasks, keys: over_replicas(sample, (tasks, keys), (params,), cores))
    keys = jax.random.split(jax.random.key(0), agents)
    seconds = repeated(lambda: jax.block_until_ready(call(poles, keys)), repeats)
    happened = float(np.sum(call(poles, keys).mask))
    return Rate(f"JAX, {agents} x {episodes}", happened / seconds, agents * episodes * (HORIZON + 1) / seconds)


def gymnasium(params: Params, parallel: int, steps: int, repeats: int) -> Rate:
    """SyncVectorEnv of CartPole-v1, resetting within the step that ends an episode, and the policy in NumPy."""

    def make():
        return gym.make("CartPole-v1", max_episode_steps=HORIZON + 1)

    envs = gym.vector.SyncVectorEnv([make] * parallel, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    rng, act = np.random.default_rng(0), in_numpy(params)

    def play() -> None:
        obs, _ = envs.reset(seed=0)
        for _ in range(steps):
            obs, *_ = envs.step(act(obs, rng.random(parallel, np.float32)))

    seconds = repeated(play, repeats)
    envs.close()
    return Rate(f"SyncVectorEnv of {parallel}", parallel * steps / seconds, parallel * steps / seconds)


def adapted(params: Params, parallel: int, steps: int, repeats: int) -> Rate:
    """The same environments through perfedrl: whole episodes as an agent samples them, as many slots side by side."""
    fleet = gymnasium_fleet("CartPole-v1", agents=1, horizon=HORIZON, parallel=parallel)
    sampler = fleet.task(0).sampler(POLICY)

    def play(m):
        return sampler.sample(params, jax.random.key(0), m)

    length = float(np.sum(play(parallel).mask)) / parallel
    episodes = max(1, round(steps / length)) * parallel
    seconds = repeated(lambda: play(episodes), repeats)
    happened = float(np.sum(play(episodes).mask))
    fleet.close()
    return Rate(f"through perfedrl, {parallel} slots", happened / seconds, happened / seconds)


def in_numpy(params: Params) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The policy for a batch of observations, by the inverse of the distribution function as in JAX."""
    first, last = jax.tree.map(np.asarray, params)

    def act(obs: np.ndarray, u: np.ndarray) -> np.ndarray:
        logits = np.tanh(obs @ first["weight"] + first["bias"]) @ last["weight"] + last["bias"]
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return (u >= odds[:, 0] / odds.sum(axis=1)).astype(np.int64)

    return act


def compare(what: str, params: Params, rows: list[Callable[[Params], Rate]]) -> list[Rate]:
    """Print the rates of all rows under one policy; `ratio` is how many times faster the first, ours, is."""
    rates = [row(params) for row in rows]
    table = Table("", "steps/s", "computed", "ratio", title=what)
    for rate in rates:
        ratio = rates[0].happened / rate.happened
        table.add_row(rate.who, f"{rate.happened:.2e}", f"{rate.computed:.2e}", f"{ratio:.1f}")
    console.print(table)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500, help="calls of Gymnasium's vectorized step per repetition")
    parser.add_argument("--repeats", type=int, default=5)
    how = parser.parse_args()
    compilation.use_all_cores()
    rows: list[Callable[[Params], Rate]] = [
        lambda params: ours(params, how.agents, how.episodes, how.repeats),
        *(lambda params, n=n: gymnasium(params, n, how.steps * 16 // n, how.repeats) for n in SLOTS),
        *(lambda params, n=n: adapted(params, n, how.steps * 16 // n, how.repeats) for n in SLOTS),
    ]
    compare("an untrained policy", untrained(), rows)
    mine, *others = compare("a policy that balances", balancing(), rows)
    theirs, through = others[: len(SLOTS)], others[len(SLOTS) :]
    best = max(rate.happened for rate in theirs)
    target("times more steps per second than Gymnasium, cart-pole", mine.happened / best, at_least=50)
    for n, bare, ours_ in zip(SLOTS, theirs, through, strict=True):
        what = f"time of sampling through perfedrl over that of the bare vector of {n}"
        target(what, bare.happened / ours_.happened, at_most=1.3)


if __name__ == "__main__":
    main()
