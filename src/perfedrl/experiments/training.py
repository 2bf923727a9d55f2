"""Training of configs; those that differ only in seeds and step sizes train in one compiled program."""

import logging
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
from perfedrl.experiments.config import Config, load_config
from perfedrl.experiments.extension import end_of_shorter, state_beside_message
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
    with_earlier_code,
)
from perfedrl.simulation.failures import by_agent
from perfedrl.simulation.history import Deployment, History
from perfedrl.simulation.observers import Observer, announce
from perfedrl.simulation.progress import with_progress
from perfedrl.simulation.run_state import FleetState, RunState
from perfedrl.simulation.simulator import Simulation

log = logging.getLogger("perfedrl")

CHECKPOINT_SECONDS = 2.0
"""The least time between two checkpoints; an interrupt always writes one."""


class Interrupted(KeyboardInterrupt):
    """Raised when the user stops training; the checkpoint of the last pause is on disk."""

    def __init__(self, names: Sequence[str], round_: int, rounds: int):
        super().__init__(f"stopped {', '.join(names)} after round {round_} of {rounds}")


def train(
    config: Config | str | Path | Sequence[Config],
    root: str | Path = "runs",
    *,
    restart: bool = False,
    chunk: int | None = None,
    observers: Iterable[Observer] = (),
    compile_cache: bool = True,
    progress: bool = False,
) -> Any:
    """Train a config or its TOML file, or several configs at once, and return the run or the list of runs.

    Finished runs in `root` are read instead of trained, interrupted ones resume from their checkpoint, and longer ones
    go on from the end of a finished one, unless `restart` is set; `origin` of a run says which. `chunk` limits how many
    agents run at a time. `observers` are told of each run's evaluations, and `progress` shows how far they are.
    Compiled programs are cached on disk unless `compile_cache` is off.
    """
    config = load_config(config) if isinstance(config, str | Path) else config
    configs = [config] if isinstance(config, Config) else list(config)
    root = Path(root)
    check_folder(root)
    if chunk is not None and chunk < 1:
        raise UserError(f"chunk must be at least 1, got {chunk}")
    if compile_cache:
        enable_cache()

    def unfinished(items: Iterable[Config]) -> list[Config]:
        return [item for item in items if restart or has_checkpoint(root, item) or not has_run(root, item)]

    trained: dict[str, Run] = {}
    with ExitStack() as locks:
        missing = unfinished({item.folder: item for item in configs}.values())
        for item in missing:
            if (root / item.folder).is_file():
                raise UserError(f"{root / item.folder} is a file; the run's folder needs its name, so move it away")
            check_code(item)
        for item in missing:
            locks.enter_context(locked(root, item))
        missing = unfinished(missing)  # without those that another process finished before they were locked
        if restart:
            for item in missing:
                discard_checkpoint(root, item)
        watching = locks.enter_context(with_progress(observers, progress))
        for members, checkpoints in _groups(root, missing, extend=not restart):
            group = _Group(root, members, chunk, watching)
            trained |= {run.config.folder: run for run in group.train(checkpoints)}
    runs = [trained[item.folder] if item.folder in trained else load_run(root / item.folder, item) for item in configs]
    return runs[0] if isinstance(config, Config) else runs


def check_code(config: Config) -> None:
    """Reject a saved config whose own code has changed, and tell of code whose changes go unnoticed."""
    if config.changed_code:
        name = config.changed_code[0]
        raise UserError(
            f"{name} has changed since {config.name} was saved with it; to train with {name} as it is now, use the "
            "config that the run was trained from, or a copy of the run's config without its table [code]"
        )
    for name in config.code_without_source:
        log.warning("the source of %s is not found, so its changes go unnoticed; after one, train with --restart", name)


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


def _groups(root: Path, configs: Iterable[Config], extend: bool) -> list[tuple[list[Config], list[Checkpoint]]]:
    """Group configs that share a program and have reached the same round, with their checkpoints, if any.

    With `extend`, the end of a finished run with fewer rounds is a checkpoint too, and a config that has neither since
    its own code has changed is reported.
    """
    groups: dict[tuple[str, int], tuple[list[Config], list[Checkpoint]]] = {}
    for config in configs:
        checkpoint = load_checkpoint(root, config) or (end_of_shorter(root, config) if extend else None)
        if extend and checkpoint is None and (earlier := with_earlier_code(root, config)):
            names = config.name, earlier.name
            log.warning("%s is trained from the first round: its own code has changed since %s", *names)
        key = config.trains_with, checkpoint.round if checkpoint else -1
        members, checkpoints = groups.setdefault(key, ([], []))
        members.append(config)
        if checkpoint:
            checkpoints.append(checkpoint)
    return list(groups.values())


class CheckpointWriter(Observer):
    """Writes a run's checkpoint when training pauses, at most every `CHECKPOINT_SECONDS`."""

    def __init__(self, root: Path, config: Config, seconds: float, extends: str = ""):
        self.root, self.config, self.extends = root, config, extends
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
        leaves, best = (tuple(jax.tree.leaves(x)) for x in (state.fleet_state, state.best))
        assert state.history is not None
        so_far = state.history, self.seconds, state.failures
        checkpoint = Checkpoint(state.round, leaves, *so_far, best, self.extends)
        save_checkpoint(self.root, self.config, checkpoint)
        self._written = time.monotonic()


class _Group:
    """Configs that train together: one simulation, and one run with its own observers for each config."""

    def __init__(self, root: Path, configs: list[Config], chunk: int | None, observers: list[Observer]):
        self.root, self.configs, self.observers = root, configs, observers
        self.simulation = side_by_side(configs, chunk)
        self.rounds, self.keeps_best = configs[0].rounds, configs[0].keep == "best"
        self.label = configs[0].name if len(configs) == 1 else f"{configs[0].name} and {len(configs) - 1} more"
        ends = accumulate(len(config.seeds) for config in configs)
        self.replicas = [slice(end - len(config.seeds), end) for config, end in zip(configs, ends, strict=True)]

    def train(self, checkpoints: list[Checkpoint]) -> list[Run]:
        """Train from the checkpoints, or from the start, and return the finished runs."""
        seconds = checkpoints[0].seconds if checkpoints else 0.0
        extends = [checkpoint.extends for checkpoint in checkpoints] or [""] * len(self.configs)
        writers = [
            CheckpointWriter(self.root, config, seconds, run) for config, run in zip(self.configs, extends, strict=True)
        ]
        watching = [[*self.observers, writer] for writer in writers]
        start = RunState(checkpoints[0].round if checkpoints else 0, None, None)
        for state, observers in zip(self._split_by_config(start), watching, strict=True):
            for observer in observers:
                observer.on_start(state)
        state = begun = start
        try:
            state = begun = self._resume(checkpoints)
            if not checkpoints:
                self._announce(begun, watching)
            for state in self.simulation.run(begun, self.configs[0].stops):
                self._announce(state, watching)
            kept = state.fleet_state if state.best is None else state.best
            assert kept is not None
            deployment = self.simulation.deploy(kept, self.rounds)
            return self._save_runs(state._replace(failures=self.simulation.failures), deployment, writers)
        except UserError:
            if state.round > begun.round:  # keep the progress since the last checkpoint
                self._write(state, writers)
            raise
        except KeyboardInterrupt:
            if state.history is not None:
                self._write(state, writers)
            raise Interrupted([config.name for config in self.configs], state.round, self.rounds) from None
        finally:
            self.simulation.fleet.close()

    def _resume(self, checkpoints: Sequence[Checkpoint]) -> RunState:
        """The state to train from: that of the checkpoints, or the start."""
        if not checkpoints:
            begun = self.simulation.begin()
            return begun._replace(best=begun.fleet_state) if self.keeps_best else begun
        failures = self.simulation.failures
        for replicas, checkpoint in zip(self.replicas, checkpoints, strict=True):
            failures[replicas] = 0 if checkpoint.failures is None else checkpoint.failures
        self.simulation.add_failures(failures)
        start = self.simulation.start()

        def joined(each: Sequence[tuple[np.ndarray, ...]]) -> FleetState:
            leaves = [np.concatenate(parts) for parts in zip(*each, strict=True)]
            if [np.shape(x) for x in jax.tree.leaves(start)] != [x.shape for x in leaves]:
                raise UserError(
                    "the checkpoint belongs to another kind of algorithm than the config; train again with --restart"
                )
            return jax.tree.unflatten(jax.tree.structure(start), leaves)

        state, history = joined([c.leaves for c in checkpoints]), History.join([c.history for c in checkpoints])
        best = joined([c.best for c in checkpoints]) if self.keeps_best else None
        return RunState(checkpoints[0].round, state, history, failures=failures, best=best)

    def _split_by_config(self, state: RunState) -> list[RunState]:
        """Split the state of the group into the states of the configs' runs."""

        def own(config: Config, replicas: slice) -> RunState:
            arrays = state.fleet_state, state.failures, state.best
            fleet_state, failures, best = jax.tree.map(lambda x: x[replicas], arrays)
            history = state.history and state.history.select(replicas)
            about = config.name, self.rounds, self.label
            return RunState(state.round, fleet_state, history, *about, failures, best)

        return [own(config, replicas) for config, replicas in zip(self.configs, self.replicas, strict=True)]

    def _announce(self, state: RunState, watching: Sequence[Sequence[Observer]]) -> None:
        for own, observers in zip(self._split_by_config(state), watching, strict=True):
            announce(observers, own)

    def _write(self, state: RunState, writers: Sequence[CheckpointWriter]) -> None:
        """Write the checkpoints of the runs that are not saved yet; the unfinished folder of a saved one is gone."""
        for writer, own in zip(writers, self._split_by_config(state), strict=True):
            if partial_folder(self.root, writer.config).exists():
                writer.write(own)

    def _save_runs(
        self, state: RunState, deployment: Deployment | None, writers: Sequence[CheckpointWriter]
    ) -> list[Run]:
        runs, seconds = [], writers[0].seconds
        for writer, replicas, own in zip(writers, self.replicas, self._split_by_config(state), strict=True):
            others = [c.folder for c in self.configs if c is not writer.config]
            about = {**provenance(seconds), "trained_with": others}
            if writer.extends:
                about["extends"] = writer.extends
            assert own.history is not None
            assert own.fleet_state is not None
            if own.failures is not None and own.failures.any():
                about["failures"] = by_agent(own.failures)
            runs.append(
                save_run(
                    self.root,
                    writer.config,
                    own.history,
                    deployment and deployment.select(replicas),
                    own.fleet_state.server.message,
                    about,
                    best=own.best and own.best.server.message,
                    state=state_beside_message(own),
                )
            )
        return runs
