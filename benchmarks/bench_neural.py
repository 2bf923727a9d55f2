"""The neural half of `make bench`: first-order meta-training of E5, and one local step of the exact variant."""

import resource
import statistics
from collections.abc import Callable

import jax
import numpy as np
from numpy_navigation import Net, local_step
from numpy_navigation import train as train_numpy
from rich.table import Table
from timing import clock, clock_cold, console, target

from perfedrl.simulation.simulator import Simulation
from perfedrl.studies.paper_neural.study import curvature_configs, meta_config

SEEDS, NOISE = 10, 2 + 21
HOW = {"alpha": 1.0, "beta": 0.2, "m_in": 10, "m_out": 10}


def simulation(config) -> Simulation:
    parts = config.experiment
    algorithms = [parts.algorithm] * len(config.seeds)
    return Simulation(config.experiment, list(config.seeds), algorithms)


def start() -> Net:
    parts = meta_config(1).experiment
    first, second = jax.tree.map(lambda x: np.asarray(x, float), parts.policy.init(jax.random.key(0)))
    return Net(first["weight"], first["bias"], second["weight"], second["bias"])


def draw(seed: int) -> Callable[..., np.ndarray]:
    rng = np.random.default_rng(seed)
    return lambda *at: rng.random((at[-1], NOISE))


def meta_training(peer_seeds: int) -> None:
    """E5's first-order training, ten seeds; the peer's time is scaled to ten seeds."""
    goals = list(meta_config(1).experiment.fleet.train.goal)
    net, how = start(), {**HOW, "m_h": 0, "rounds": 150, "local_steps": 5}
    peer = sum(clock(lambda s=s: train_numpy(net, goals, draw(s), **how)) for s in range(peer_seeds))
    peer *= SEEDS / peer_seeds
    sim = simulation(meta_config(SEEDS))
    begin = sim.start()

    def train_all():
        return sim.advance(begin, 0, 150)

    cold = statistics.median(clock_cold(train_all) for _ in range(3))
    warm = statistics.median(clock(train_all) for _ in range(5))
    decisions = SEEDS * 6 * 15_000 * 21
    table = Table(
        "", "NumPy", "cold", "warm", "cold ratio", "warm ratio", "steps/s", title="E5, first-order, ten seeds"
    )
    ratios = f"{peer / cold:.1f}", f"{peer / warm:.1f}"
    table.add_row("training", f"{peer:.1f} s", f"{cold:.2f} s", f"{warm:.2f} s", *ratios, f"{decisions / warm:.1e}")
    console.print(table)
    target("E5 warm, times faster than NumPy", peer / warm, at_least=15)


def exact_step(m_h: int = 1000) -> None:
    """One local step of the exact variant, per agent and seed, in a round of six agents and ten seeds."""
    goals, net = list(meta_config(1).experiment.fleet.train.goal), start()
    uniforms = draw(0)
    peer = statistics.median(
        clock(lambda g=g: local_step(net, g, lambda _, m: uniforms(m), **HOW, m_h=m_h)) for g in goals * 3
    )
    sim = simulation(curvature_configs(SEEDS, False)[m_h])
    begin = sim.start()

    def one_round():
        return sim.advance(begin, 0, 1)

    cold = clock_cold(one_round)
    steps = SEEDS * 6 * 5
    warm = statistics.median(clock(one_round) for _ in range(5)) / steps
    table = Table("", "NumPy", "warm", "ratio", "compilation", title=f"one local step, exact, m_h = {m_h}")
    row = f"{peer * 1e3:.1f} ms", f"{warm * 1e3:.2f} ms", f"{peer / warm:.1f}", f"{cold - warm * steps:.1f} s"
    table.add_row("per agent and seed", *row)
    console.print(table)
    target("one local step, times faster than NumPy", peer / warm, at_least=8)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    target(f"GiB, peak memory of the process with m_h = {m_h}, {SEEDS} seeds, 6 agents", peak, at_most=2)
