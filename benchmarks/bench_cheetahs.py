"""Decisions per second of half-cheetahs in MuJoCo, learning included: in one process, and with a worker for each core.

Both train the same rounds of `configs/half_cheetah_dir.toml` with fewer agents, in turn, and must have the same bits. A
rate is that of the median round. Beside it are the shares of a round in one process, in processor time: the
environment's steps, the policy in NumPy, what perfedrl adds to these in sampling, and learning. Machines are noisy: the
ratio of one run is more reliable than its rates, and only on a machine that does nothing else.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.table import Table
from timing import clock, console, target

from perfedrl.compilation import available_cores
from perfedrl.experiments.config import Config, load_config, make_config
from perfedrl.simulation.experiment import Experiment
from perfedrl.simulation.simulator import Simulation

CONFIG = Path(__file__).parents[1] / "configs" / "half_cheetah_dir.toml"


def with_workers(agents: int, workers: Any) -> Config:
    """The config with fewer agents and some number of workers."""
    table = load_config(CONFIG).model_dump()
    return make_config({**table, "fleet": {**table["fleet"], "agents": agents, "workers": workers}})


class Training:
    """A run that advances round by round."""

    def __init__(self, config: Config):
        self.experiment = config.experiment
        self.simulation = Simulation(self.experiment, config.seeds)
        self.state, self.round = self.simulation.start(), 0

    def advance(self) -> None:
        """Train one more round."""
        self.state = jax.block_until_ready(self.simulation.advance(self.state, self.round, 1))
        self.round += 1


def parts_of(experiment: Experiment, m: int) -> dict[str, Callable[[], Any]]:
    """The parts of sampling m episodes of one agent: the environment's steps, the policy, and all together."""
    task, policy = experiment.fleet.task(0), experiment.policy
    params = policy.init(jax.random.key(0))
    longest, slots, act = task.horizon + 1, task.parallel, policy.in_numpy(params)
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(slots, task.observation_size)).astype(np.float32)
    u = rng.random((slots, policy.noise), np.float32)
    env = task.recipe()

    def sample() -> Any:
        return task.sampler(policy).sample(params, jax.random.key(0), m)

    actions = task.to_actions(sample().action.reshape(m * longest, -1))

    def step() -> None:
        for i, action in enumerate(actions):
            if i % longest == 0:
                env.reset(seed=i)
            env.step(action)

    def decide() -> None:
        for _ in range(longest * -(-m // slots)):
            act(obs, u)

    return {"steps": step, "policy": decide, "sampling": sample}


def processor_time(work: Callable[[], Any]) -> float:
    """Seconds of this process on its processors."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    how = parser.parse_args()
    one, every = (Training(with_workers(how.agents, workers)) for workers in (1, "auto"))
    fleet, algorithm = one.experiment.fleet, one.experiment.algorithm
    trajectories = how.agents * algorithm.trajectories_per_round
    parts = parts_of(one.experiment, algorithm.trajectories_per_round)
    one.advance(), every.advance()  # which compiles
    alone, shared, used = [], [], []
    for _ in range(how.rounds):
        spent = processor_time(lambda: alone.append(clock(one.advance)))
        used.append({"round": spent, **{what: how.agents * processor_time(work) for what, work in parts.items()}})
        shared.append(clock(every.advance))
    for x, y in zip(jax.tree.leaves(one.state), jax.tree.leaves(every.state), strict=True):
        np.testing.assert_array_equal(x, y)
    for training in (one, every):
        training.experiment.fleet.close()

    decisions = trajectories * (fleet.train.horizon + 1)
    table = Table("", "seconds a round", "decisions/s", title=f"{how.agents} half-cheetahs, {decisions} decisions")
    rows = {"one process": statistics.median(alone), f"workers on {available_cores()} cores": statistics.median(shared)}
    for who, seconds in rows.items():
        table.add_row(who, f"{seconds:.2f}", f"{decisions / seconds:.0f}")
    console.print(table)
    whole, steps, policy, sampling = (
        statistics.median(x[what] for x in used) for what in ("round", "steps", "policy", "sampling")
    )
    shares = {
        "steps of the environments": steps,
        "policy": policy,
        "the rest of sampling": sampling - steps - policy,
        "learning": whole - sampling,
    }
    said = ", ".join(f"{what} {seconds / whole:.0%}" for what, seconds in shares.items())
    console.print(f"processor time of a round in one process: {said}", highlight=False, soft_wrap=True)
    target("times more decisions per second with workers", statistics.median(alone) / statistics.median(shared), 1.5)


if __name__ == "__main__":
    main()
