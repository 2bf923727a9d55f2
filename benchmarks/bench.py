"""`make bench`: the simulator against plain NumPy, in one process and one run, and how time and memory grow.

Every time is the median of a few repetitions; machines are noisy, so the ratios of one run are more reliable than its
seconds.
"""

import argparse
import itertools
import resource
import statistics
import time
from dataclasses import replace

import bench_neural
import jax
import numpy as np
from numpy_peer import mdp, train
from rich.table import Table
from timing import clock, clock_cold, console, target

import perfedrl as pf
from perfedrl import compilation
from perfedrl.envs import unstack
from perfedrl.simulation.simulator import Simulation
from perfedrl.studies.paper_tabular.study import VARIANTS, tabular

ROUNDS, SEEDS, STEPS_PER_EPISODE = 80, 10, 16


def simulation(variant: str, seeds: int, fleet=None) -> Simulation:
    parts = tabular(variant, 2.0, seeds).experiment
    return Simulation(parts if fleet is None else replace(parts, fleet=fleet), list(range(seeds)))


def numpy_seconds(variant: str, seeds: int) -> float:
    """Seconds of the NumPy peer for ten seeds, scaled up if it runs fewer."""
    agents = [mdp(m.P, m.r, m.mu, m.horizon, m.discount) for m in unstack(pf.gridworld().train)]
    total = 0.0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)

        def draw(*at, rng=rng):
            return rng.random((at[-1], STEPS_PER_EPISODE, 3))

        def run(draw=draw):
            return train(agents, variant, draw, alpha=2.0, beta=0.3, rounds=ROUNDS, local_steps=5, m=10)

        total += clock(run)
    return total * SEEDS / seeds


def against_numpy(peer_seeds: int) -> None:
    """All of E1: three variants, ten seeds, training only."""
    table = Table("variant", "NumPy", "cold", "warm", "cold ratio", "warm ratio", "steps/s", title="E1, ten seeds")
    total = np.zeros(3)
    for variant in VARIANTS:
        peer = numpy_seconds(variant, peer_seeds)
        sim = simulation(variant, SEEDS)
        start = sim.start()

        def train_all(sim=sim, start=start):
            return sim.advance(start, 0, ROUNDS)

        cold = statistics.median(clock_cold(train_all) for _ in range(3))
        warm = statistics.median(clock(train_all) for _ in range(5))
        trajectories = SEEDS * 8 * ROUNDS * sim.algorithms[0].trajectories_per_round
        row = np.asarray([peer, cold, warm])
        total += row
        table.add_row(variant, *timings(row), f"{trajectories * STEPS_PER_EPISODE / warm:.2e}")
    table.add_row("all", *timings(total), "")
    console.print(table)
    target("warm, times faster than NumPy", total[0] / total[2], at_least=30)
    target("cold, times faster than NumPy", total[0] / total[1], at_least=8)


def timings(row: np.ndarray) -> list[str]:
    peer, cold, warm = row
    return [f"{peer:.1f} s", f"{cold:.2f} s", f"{warm:.3f} s", f"{peer / cold:.1f}", f"{peer / warm:.1f}"]


def growth(sizes: list[int], rounds: int = 5) -> None:
    """Time per agent and round as the fleet grows, one seed, exact variant."""
    table = Table("agents", "seconds per round", "microseconds per agent and round", title="growth with the fleet")
    per_agent = []
    for n in sizes:
        sim = simulation("exact", 1, many(n))
        start = sim.start()
        sim.advance(start, 0, 1)
        seconds = statistics.median(clock(lambda: sim.advance(start, 0, rounds)) / rounds for _ in range(5))  # noqa: B023
        per_agent.append(seconds / n)
        table.add_row(str(n), f"{seconds:.4f}", f"{seconds / n * 1e6:.1f}")
    console.print(table)
    target("time per agent in the largest fleet over that in the smallest", per_agent[-1] / per_agent[0], at_most=1)


def many(n: int) -> pf.Fleet:
    """N gridworld agents, with the paper's eight goals repeated."""
    eight = pf.gridworld().train
    return pf.Fleet(jax.tree.map(lambda x: np.resize(x, (n, *x.shape[1:])), eight))


def memory(n: int) -> None:
    """Peak memory of this process while n agents, built one by one, train and are measured."""
    cells = list(itertools.product(range(5), range(5)))
    began = time.perf_counter()
    fleet = pf.gridworld(goals=(cells * (n // len(cells) + 1))[:n])
    built = time.perf_counter() - began
    sim = simulation("exact", 1, fleet)
    seconds = clock(lambda: sim.measure(sim.advance(sim.start(), 0, 2), 2))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console.print(
        f"{n} agents: built in {built:.1f} s; two rounds and a measurement, compiled and run, in {seconds:.1f} s"
    )
    target(f"GiB, peak memory of the whole process with {n} agents", peak, at_most=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-seeds", type=int, default=SEEDS, help="seeds that the NumPy peer runs")
    options = parser.parse_args()
    compilation.use_all_cores()
    console.print(f"{len(jax.devices())} x {jax.devices()[0].device_kind}, JAX {jax.__version__}; compile cache off")
    simulation("exact", 1).start()  # the backend's own start-up is nobody's compilation
    # First what must fit into little memory: a process's peak never falls.
    bench_neural.exact_step()
    bench_neural.meta_training(min(options.peer_seeds, 3))
    against_numpy(options.peer_seeds)
    growth([8, 64, 512, 4096])
    memory(10_000)


if __name__ == "__main__":
    main()
