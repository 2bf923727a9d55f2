"""Compare the estimated memory of training with the compiler's own count, for configs that JAX traces.

Usage: python benchmarks/bench_memory.py [CONFIG ...]; by default all of configs/.
"""

import sys
from pathlib import Path

import jax

from perfedrl.experiments.config import Config, load_config
from perfedrl.key_domains import EVALUATION
from perfedrl.memory import readable
from perfedrl.simulation.compiled import advance_replicas, measure_replicas
from perfedrl.simulation.measurements import before_and_after
from perfedrl.simulation.simulator import Simulation

CONFIGS = Path(__file__).parents[1] / "configs"


def counted(program):
    """A function that compiles a program for some arguments and returns the bytes that it takes."""

    def count(*args, **kwargs) -> int:
        found = program.trace(*args, **kwargs).lower().compile().memory_analysis()
        return found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes

    return count


def compared(config: Config) -> dict[str, tuple[float, int]]:
    """Estimated and counted bytes of a config's rounds and of its evaluation."""
    simulation = Simulation(config.experiment, config.seeds)
    state = simulation.start()
    measured = before_and_after, state, EVALUATION, False
    return {
        "rounds": (
            float(simulation._train(advance_replicas.need, state, 0, 1).bytes),
            int(simulation._train(counted(advance_replicas), state, 0, 1)),
        ),
        "evaluation": (
            float(simulation._measure(measure_replicas.need, *measured).bytes),
            int(simulation._measure(counted(measure_replicas), *measured)),
        ),
    }


def main() -> None:
    """Print one line for each program."""
    for path in map(Path, sys.argv[1:] or sorted(CONFIGS.glob("*.toml"))):
        config = load_config(path)
        if config.experiment.fleet.traceable:
            for what, (estimated, needed) in compared(config).items():
                ratio = estimated / needed
                print(
                    f"{path.stem:20} {what:12} {readable(estimated):>10} estimated, {readable(needed):>10} {ratio:6.2f}"
                )
        else:
            print(f"{path.stem:20} is played in Python")


if __name__ == "__main__":
    print(jax.devices()[0].device_kind)
    main()
