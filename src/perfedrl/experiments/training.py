"""Training of configs; those that differ only in seeds and step sizes train in one compiled program."""

import time
from collections.abc import Iterable, Sequence
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
from perfedrl.simulation.observers import Observer, announce
from perfedrl.simulation.run_state import RunState
from perfedrl.simulation.simulator import Simulation

CHECKPOINT_SECONDS = 2.0
"""The least time between two checkpoints; an interrupt always writes one."""


class Interrupted(KeyboardInterrupt):
    """Raised when the user stops training; the checkpoint of the last pause is on disk."""

    def __init__(self, names: Sequence[str], round_: int, rounds: int):
        super().__init__(f"stopped {', '.join(names)} after round {round_} of {rounds}")


def train(
    config: Config | Sequence[Config],
    root: str | Path = "runs",
    *,
    restart: bool = False,
    chunk: int | None = None,
    observers: Iterable[Observer] = (),
    compile_cache: bool = True,
) -> Any:
    """Train a config, or several at once, and return the run or the list of runs.

    Finished runs in `root` are read instead of trained, and interrupted ones resume from their checkpoint, unless
    `restart` is set. `chunk` limits how many agents run at a time. `observers` are told of each run's evaluations.
    Compiled programs are cached on disk unless `compile_cache` is off.
    """
    configs = [config] if isinstance(config, Config) else list(config)
    root = Path(root)
    check_folder(root)
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk must be at least 1, got {chunk}")
    if compile_cache:
        enable_cache()
    if restart:
        for item in configs:
            discard_checkpoint(root, item)
    missing = {
        item.folder: item for item in configs if restart or has_checkpoint(root, item) or not has_run(root, item)
    }
    trained: dict[str, Run] = {}
    for members, checkpoints in _groups(root, missing.values()):
        with ExitStack() as locks:
            for item in members:
                locks.enter_context(locked(root, item))
            group = _Group(root, members, chunk, list(observers))
            trained |= {run.config.folder: run for run in group.train(checkpoints)}
    runs = [trained[item.folder] if item.folder in trained else load_run(root / item.folder, item) for item in configs]
    return runs[0] if isinstance(config, Config) else runs


def saved(configs: Sequence[Config], root: str | Path = "runs") -> list[Run]:
    """Load the finished runs of some configs without training; the error names the first that is missing."""
    for item in configs:
        if not has_run(Path(root), item):
            raise UserError(f"{root} has no finished run {item.folder}; train it, or leave out --saved")
    return [load_run(Path(root) / item.folder, item) for item in configs]


def side_by_side(configs: Sequence[Config], chunk: int | None = None) -> Simulation:
    """One simulation whose replicas are the seeds of several configs that can train together."""
    algorithms = [config.experiment.algorithm for config in configs for _ in config.seeds]
    seeds = [seed for config in configs for seed in config.seeds]
    return Simulation(configs[0].experiment, seeds, algorithms, chunk)


def _groups(root: Path, configs: Iterable[Config]) -> list[tuple[list[Config], list[Checkpoint]]]:
    """Group configs that share a program and have reached the same round, with their checkpoints, if any."""
    groups: dict[tuple[str, int], tuple[list[Config], list[Checkpoint]]] = {}
    for config in configs:
        checkpoint = load_checkpoint(root, config)
        key = config.trains_with, checkpoint.round if checkpoint else -1
        members, checkpoints = groups.setdefault(key, ([], []))
        members.append(config)
        if checkpoint:
            checkpoints.append(checkpoint)
    return list(groups.values())


class CheckpointWriter(Observer):
    """Writes a run's checkpoint when training pauses, at most every `CHECKPOINT_SECONDS`."""

    def __init__(self, root: Path, config: Config, seconds: float):
        self.root, self.config = root, config
        self._began = time.monotonic() - seconds
        self._first, self._written = 0, time.monotonic()

    @property
    def seconds(self) -> float:
        """The duration of training so far, including the parts before interrupts."""
        return time.monotonic() - self._began

    def on_start(self, state: RunState) -> None:
        self._first = state.round

    def on_round(self, state: RunState) -> None:
        if state.round > self._first and time.monotonic() - self._written > CHECKPOINT_SECONDS:
            self.write(state)

    def write(self, state: RunState) -> None:
        """Write the checkpoint now."""
        leaves = tuple(jax.tree.leaves(state.fleet_state))
        assert state.history is not None
        save_checkpoint(self.root, self.config, Checkpoint(state.round, leaves, state.history, self.seconds))
        self._written = time.monotonic()


class _Group:
    """Configs that train together: one simulation, and one run with its own observers for each config."""

    def __init__(self, root: Path, configs: list[Config], chunk: int | None, observers: list[Observer]):
        self.root, self.configs, self.observers = root, configs, observers
        self.simulation = side_by_side(configs, chunk)
        self.rounds = configs[0].rounds
        self.label = configs[0].name if len(configs) == 1 else f"{configs[0].name} and {len(configs) - 1} more"
        ends = accumulate(len(config.seeds) for config in configs)
        self.replicas = [slice(end - len(config.seeds), end) for config, end in zip(configs, ends, strict=True)]

    def train(self, checkpoints: list[Checkpoint]) -> list[Run]:
        """Train from the checkpoints, or from the start, and return the finished runs."""
        seconds = checkpoints[0].seconds if checkpoints else 0.0
        writers = [CheckpointWriter(self.root, config, seconds) for config in self.configs]
        watching = [[*self.observers, writer] for writer in writers]
        start = RunState(checkpoints[0].round if checkpoints else 0, None, None)
        for state, observers in zip(self._split_by_config(start), watching, strict=True):
            for observer in observers:
                observer.on_start(state)
        state = begun = self._resume(checkpoints)
        try:
            if not checkpoints:
                self._announce(begun, watching)
            for state in self.simulation.run(begun, self.configs[0].stops):
                self._announce(state, watching)
            assert state.fleet_state is not None
            deployment = self.simulation.deploy(state.fleet_state, self.rounds)
            return self._save_runs(state, deployment, writers[0].seconds)
        except UserError:
            if state.round > begun.round:  # keep the progress since the last checkpoint
                self._write(state, writers)
            raise
        except KeyboardInterrupt:
            self._write(state, [w for w in writers if partial_folder(self.root, w.config).exists()])
            raise Interrupted([config.name for config in self.configs], state.round, self.rounds) from None
        finally:
            self.simulation.fleet.close()

    def _resume(self, checkpoints: Sequence[Checkpoint]) -> RunState:
        """The state to train from: that of the checkpoints, or the start."""
        if not checkpoints:
            return self.simulation.begin()
        leaves = [np.concatenate(parts) for parts in zip(*(c.leaves for c in checkpoints), strict=True)]
        start = self.simulation.start()
        if [np.shape(x) for x in jax.tree.leaves(start)] != [x.shape for x in leaves]:
            raise UserError(
                "the checkpoint belongs to another kind of algorithm than the config; train again with --restart"
            )
        state = jax.tree.unflatten(jax.tree.structure(start), leaves)
        return RunState(checkpoints[0].round, state, History.join([c.history for c in checkpoints]))

    def _split_by_config(self, state: RunState) -> list[RunState]:
        """Split the state of the group into the states of the configs' runs."""

        def own(config: Config, replicas: slice) -> RunState:
            fleet_state = jax.tree.map(lambda x: x[replicas], state.fleet_state)
            history = state.history and state.history.select(replicas)
            return RunState(state.round, fleet_state, history, config.name, self.rounds, self.label)

        return [own(config, replicas) for config, replicas in zip(self.configs, self.replicas, strict=True)]

    def _announce(self, state: RunState, watching: Sequence[Sequence[Observer]]) -> None:
        for own, observers in zip(self._split_by_config(state), watching, strict=True):
            announce(observers, own)

    def _write(self, state: RunState, writers: Sequence[CheckpointWriter]) -> None:
        of = dict(zip([config.folder for config in self.configs], self._split_by_config(state), strict=True))
        for writer in writers:
            writer.write(of[writer.config.folder])

    def _save_runs(self, state: RunState, deployment: Deployment | None, seconds: float) -> list[Run]:
        runs = []
        for config, replicas, own in zip(self.configs, self.replicas, self._split_by_config(state), strict=True):
            others = [c.folder for c in self.configs if c is not config]
            about = {**provenance(seconds), "trained_with": others}
            few_shot = deployment and deployment.select(replicas)
            assert own.history is not None
            assert own.fleet_state is not None
            runs.append(save_run(self.root, config, own.history, few_shot, own.fleet_state.server.message, about))
        return runs
