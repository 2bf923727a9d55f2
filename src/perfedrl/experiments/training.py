"""Configs -> runs. Configs that differ only in seeds and step sizes train together in one compiled program."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import jax
import numpy as np

from perfedrl.compilation import enable_cache
from perfedrl.errors import UserError
from perfedrl.experiments.config import Config
from perfedrl.experiments.files import check_folder
from perfedrl.experiments.provenance import provenance
from perfedrl.experiments.store import (
    Checkpoint,
    Run,
    discard_checkpoint,
    has_checkpoint,
    has_run,
    load_checkpoint,
    load_run,
    locked,
    partial_folder,
    save_checkpoint,
    save_run,
)
from perfedrl.simulation.history import Deployment, History
from perfedrl.simulation.simulator import Simulation, Standing

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
    compile_cache: bool = True,
) -> Any:
    """Train a config, or several at once, and return the run or the list of runs.

    What is already in `root` is read instead of trained, and what was interrupted goes on where it stood, unless
    `restart` is set. Compiled programs are kept on disk for the next time unless `compile_cache` is off.
    """
    configs = [config] if isinstance(config, Config) else list(config)
    root = Path(root)
    check_folder(root)
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk must be at least 1; it is {chunk}")
    if compile_cache:
        enable_cache()
    if restart:
        for item in configs:
            discard_checkpoint(root, item)
    unfinished = lambda item: restart or has_checkpoint(root, item) or not has_run(root, item)  # noqa: E731
    missing = {item.folder: item for item in configs if unfinished(item)}
    for members, checkpoints in _groups(root, missing.values()):
        with ExitStack() as locks:
            for item in members:
                locks.enter_context(locked(root, item))
            _train_together(root, members, checkpoints, chunk, progress)
    runs = [load_run(root / item.folder) for item in configs]
    return runs[0] if isinstance(config, Config) else runs


def saved(configs: Sequence[Config], root: str | Path = "runs") -> list[Run]:
    """The finished runs of some configs, none of which is trained; the error names the first that is missing."""
    for item in configs:
        if not has_run(Path(root), item):
            raise UserError(f"{root} has no finished run {item.folder}; train it, or leave out --saved")
    return [load_run(Path(root) / item.folder) for item in configs]


def _groups(root: Path, configs: Iterable[Config]) -> list[tuple[list[Config], list[Checkpoint]]]:
    """Configs that share a program and stand at the same round, with their checkpoints if they have any."""
    groups: dict[tuple[str, int], tuple[list[Config], list[Checkpoint]]] = {}
    for config in configs:
        checkpoint = load_checkpoint(root, config)
        key = config.trains_with, checkpoint.round if checkpoint else -1
        members, checkpoints = groups.setdefault(key, ([], []))
        members.append(config)
        if checkpoint:
            checkpoints.append(checkpoint)
    return list(groups.values())


def _train_together(root: Path, configs: list[Config], checkpoints: list[Checkpoint], chunk, progress) -> None:
    began = time.monotonic() - (checkpoints[0].seconds if checkpoints else 0.0)
    simulation = side_by_side(configs, chunk)
    rounds, label = configs[0].rounds, _label(configs)
    tell = progress or (lambda *_: None)
    tell(label, checkpoints[0].round if checkpoints else 0, rounds)  # before the first compilation
    standing = start = _resume(simulation, checkpoints)
    saved = time.monotonic()
    try:
        for standing in simulation.run(start, configs[0].stops):
            tell(label, standing.round, rounds)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                _save_checkpoints(root, configs, standing, time.monotonic() - began)
                saved = time.monotonic()
        deployment = simulation.deploy(standing.state, rounds)
        _save_runs(root, configs, standing, deployment, time.monotonic() - began)
    except UserError:
        if standing.round > start.round:  # what was learned until then is kept
            _save_checkpoints(root, configs, standing, time.monotonic() - began)
        raise
    except KeyboardInterrupt:
        unfinished = [config for config in configs if partial_folder(root, config).exists()]
        _save_checkpoints(root, configs, standing, time.monotonic() - began, only=unfinished)
        raise Interrupted([config.name for config in configs], standing.round, rounds) from None
    finally:
        simulation.fleet.close()


def _save_runs(
    root: Path, configs: Sequence[Config], standing: Standing, deployment: Deployment | None, seconds: float
) -> None:
    messages = standing.state.server.message
    for config, lanes in _lanes(configs):
        own = jax.tree.map(lambda x, lanes=lanes: x[lanes], messages)
        about = {**provenance(seconds), "trained_with": [c.folder for c in configs if c is not config]}
        few_shot = deployment and deployment.select(lanes)
        save_run(root, config, standing.history.select(lanes), few_shot, own, about)


def _save_checkpoints(
    root: Path, configs: Sequence[Config], standing: Standing, seconds: float, only: Sequence[Config] | None = None
) -> None:
    for config, lanes in _lanes(configs):
        if only is None or config in only:
            leaves = tuple(leaf[lanes] for leaf in jax.tree.leaves(standing.state))
            save_checkpoint(root, config, Checkpoint(standing.round, leaves, standing.history.select(lanes), seconds))


def side_by_side(configs: Sequence[Config], chunk: int | None = None) -> Simulation:
    """Configs that train with each other, as the lanes of one simulation."""
    parts = [config.parts for config in configs]
    algorithms = [p.algorithm for c, p in zip(configs, parts, strict=True) for _ in c.seeds]
    seeds = [seed for config in configs for seed in config.seeds]
    shared = parts[0]
    return Simulation(
        shared.fleet,
        shared.policy,
        algorithms,
        seeds,
        shared.agent,
        chunk,
        shared.evaluation,
        configs[0].start,
        shared.weights,
        configs[0].participation,
    )


def _lanes(configs: Sequence[Config]) -> list[tuple[Config, slice]]:
    """Each config with the lanes that train it."""
    ends = accumulate(len(config.seeds) for config in configs)
    return [(config, slice(end - len(config.seeds), end)) for config, end in zip(configs, ends, strict=True)]


def _resume(simulation: Simulation, checkpoints: Sequence[Checkpoint]) -> Standing:
    if not checkpoints:
        return simulation.begin()
    leaves = [np.concatenate(parts) for parts in zip(*(c.leaves for c in checkpoints), strict=True)]
    start = simulation.start()
    if [np.shape(x) for x in jax.tree.leaves(start)] != [x.shape for x in leaves]:
        raise UserError("the checkpoint is of another kind of algorithm than the config: train again with --restart")
    state = jax.tree.unflatten(jax.tree.structure(start), leaves)
    return Standing(checkpoints[0].round, state, History.join([c.history for c in checkpoints]))


def _label(configs: Sequence[Config]) -> str:
    return configs[0].name if len(configs) == 1 else f"{configs[0].name} and {len(configs) - 1} more"
