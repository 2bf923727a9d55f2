"""Decisions per second of half-cheetahs in each engine, with an untrained policy: Gymnasium, MJX and planar bodies.

An agent samples the same number of episodes with every engine; a program is compiled before it is timed. On a CPU rates
are per second of processor time, so that they hardly depend on other work; on a GPU they are per second. With `--large`
the engines that compile also sample many episodes at once, for GPUs.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from rich.table import Table
from timing import console

from perfedrl.compilation import jit
from perfedrl.envs import ENVS
from perfedrl.policies import POLICIES
from perfedrl.rollout import sampler

DECISIONS = 100
ENGINES = ("gymnasium", "planar", "mjx")
EPISODES, LARGE = 40, (1_600, 6_400, 32_000)


def sample_with(engine: str, m: int) -> Callable[[int], Any]:
    """Return a function of a seed that samples m episodes of one agent."""
    more = {"workers": 1, "parallel": 20} if engine == "gymnasium" else {}
    fleet = ENVS["half-cheetah-dir"](engine=engine, velocity_scale=0.1, horizon=DECISIONS - 1, **more)
    policy = POLICIES["gaussian-mlp"](fleet, hidden=(64, 64))
    params, source = policy.init(jax.random.key(0)), sampler(fleet.task(0), policy)
    if not source.traceable:
        return lambda seed: source.sample(params, jax.random.key(seed), m)
    compiled = jit(lambda key: source.sample(params, key, m))
    return lambda seed: jax.block_until_ready(compiled(jax.random.key(seed)))


def rate(sample: Callable[[int], Any], m: int, repeats: int) -> tuple[float, float]:
    """The seconds of the first call, and the median rate of decisions of the following ones."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    began = time.perf_counter()
    sample(0)
    first, rates = time.perf_counter() - began, []
    for seed in range(1, repeats + 1):
        began = clock()
        sample(seed)
        rates.append(m * DECISIONS / (clock() - began))
    return first, statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="also batches of 1,600, 6,400 and 32,000 episodes")
    given = parser.parse_args()
    unit = "processor second" if jax.default_backend() == "cpu" else "second"
    table = Table("engine", "episodes", "first call, s", f"decisions per {unit}", "of gymnasium", title="half-cheetahs")
    base = None
    for engine in given.engines:
        for m in (EPISODES, *(LARGE if given.large and engine != "gymnasium" else ())):
            first, found = rate(sample_with(engine, m), m, given.repeats)
            base = found if engine == "gymnasium" else base
            share = "" if base is None else f"{found / base:.2f}"
            table.add_row(engine, f"{m:,}", f"{first:.1f}", f"{found:,.0f}", share)
    console.print(table)


if __name__ == "__main__":
    main()
