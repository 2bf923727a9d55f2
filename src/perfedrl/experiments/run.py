"""Configs -> runs. Configs that differ only in seeds and step sizes train together in one compiled program."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import jax
import numpy as np

from perfedrl.experiments.config import Config
from perfedrl.experiments.provenance import provenance
from perfedrl.experiments.store import (
    Checkpoint,
    discard_checkpoint,
    has_run,
    load_checkpoint,
    load_run,
    save_checkpoint,
    save_run,
)
from perfedrl.history import History
from perfedrl.simulation import Simulation, Standing

CHECKPOINT_SECONDS = 2.0
"""The least time between two checkpoints; an interrupt writes one in any case."""

Progress = Callable[[str, int, int], None]
"""Called with (what is trained, rounds done, rounds in all)."""


class Interrupted(KeyboardInterrupt):
    """Training was stopped by the user; the last evaluation is on disk."""

    def __init__(self, names: Sequence[str], round_: int, rounds: int):
        super().__init__(f"stopped {', '.join(names)} after round {round_} of {rounds}")


def train(
    config: Config | Sequence[Config],
    root: str | Path = "runs",
    *,
    restart: bool = False,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Any:
    """Train a config, or several at once, and return the run or the list of runs.

    What is already in `root` is read instead of trained, and what was interrupted goes on where it stood, unless
    `restart` is set.
    """
    configs = [config] if isinstance(config, Config) else list(config)
    root = Path(root)
    if restart:
        for item in configs:
            discard_checkpoint(root, item)
    missing = {item.folder: item for item in configs if restart or not has_run(root, item)}
    for group in _groups(root, missing.values()):
        _train_together(root, *group, chunk=chunk, progress=progress)
    runs = [load_run(root / item.folder) for item in configs]
    return runs[0] if isinstance(config, Config) else runs


def _groups(root: Path, configs: Iterable[Config]) -> list[tuple[list[Config], list[Checkpoint]]]:
    """Configs that share a program and stand at the same round, with their checkpoints if they have any."""
    groups: dict[tuple[str, int], tuple[list[Config], list[Checkpoint]]] = {}
    for config in configs:
        checkpoint = load_checkpoint(root, config)
        key = config.compiles_with, checkpoint.round if checkpoint else -1
        members, checkpoints = groups.setdefault(key, ([], []))
        members.append(config)
        if checkpoint:
            checkpoints.append(checkpoint)
    return list(groups.values())


def _train_together(root: Path, configs: list[Config], checkpoints: list[Checkpoint], chunk, progress) -> None:
    began = time.monotonic() - (checkpoints[0].seconds if checkpoints else 0.0)
    simulation = _simulation(configs, chunk)
    standing = start = _resume(simulation, checkpoints)
    rounds, label = configs[0].rounds, _label(configs)
    saved = time.monotonic()
    if progress:
        progress(label, standing.round, rounds)  # before the first compilation, so that the bar is there at once
    try:
        for standing in simulation.run(start, rounds, configs[0].evaluate_every):
            if progress:
                progress(label, standing.round, rounds)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                _save_checkpoints(root, configs, standing, time.monotonic() - began)
                saved = time.monotonic()
    except KeyboardInterrupt:
        _save_checkpoints(root, configs, standing, time.monotonic() - began)
        raise Interrupted([config.name for config in configs], standing.round, rounds) from None
    for config, lanes in _lanes(configs):
        params = jax.tree.map(lambda x, lanes=lanes: x[lanes], standing.state.server.message)
        about = {**provenance(time.monotonic() - began), "trained_with": [c.folder for c in configs if c is not config]}
        save_run(root, config, standing.history.select(lanes), params, about)


def _save_checkpoints(root: Path, configs: Sequence[Config], standing: Standing, seconds: float) -> None:
    for config, lanes in _lanes(configs):
        leaves = tuple(leaf[lanes] for leaf in jax.tree.leaves(standing.state))
        save_checkpoint(root, config, Checkpoint(standing.round, leaves, standing.history.select(lanes), seconds))


def _simulation(configs: Sequence[Config], chunk: int | None) -> Simulation:
    parts = [config.build() for config in configs]
    algorithms = [p.algorithm for c, p in zip(configs, parts, strict=True) for _ in c.seeds]
    seeds = [seed for config in configs for seed in config.seeds]
    return Simulation(parts[0].fleet, parts[0].policy, algorithms, seeds, configs[0].curvature, chunk=chunk)


def _lanes(configs: Sequence[Config]) -> list[tuple[Config, slice]]:
    """Each config with the lanes that train it."""
    ends = accumulate(len(config.seeds) for config in configs)
    return [(config, slice(end - len(config.seeds), end)) for config, end in zip(configs, ends, strict=True)]


def _resume(simulation: Simulation, checkpoints: Sequence[Checkpoint]) -> Standing:
    if not checkpoints:
        return simulation.begin()
    leaves = [np.concatenate(parts) for parts in zip(*(c.leaves for c in checkpoints), strict=True)]
    state = jax.tree.unflatten(jax.tree.structure(simulation.start()), leaves)
    return Standing(checkpoints[0].round, state, History.join([c.history for c in checkpoints]))


def _label(configs: Sequence[Config]) -> str:
    return configs[0].name if len(configs) == 1 else f"{configs[0].name} and {len(configs) - 1} more"
