"""Longer runs: training goes on from the end of a finished run that differs in its number of rounds only."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from perfedrl.errors import UserError
from perfedrl.experiments.config import Config, parse_config
from perfedrl.experiments.files import read_safetensors
from perfedrl.experiments.settings import read_table
from perfedrl.experiments.store import STATE, Checkpoint, Run, has_run, load_run, numbered
from perfedrl.simulation.best_state import best_evaluation
from perfedrl.simulation.run_state import RunState

log = logging.getLogger("perfedrl")


def state_beside_message(end: RunState) -> dict[str, np.ndarray]:
    """The arrays of a finished run that a longer one needs beside its parameters and its history."""
    states = {"state": end.fleet_state, "best": end.best}
    arrays = {
        f"{name}.{i}": np.ascontiguousarray(leaf)
        for name, state in states.items()
        if state is not None
        for i, leaf in enumerate(jax.tree.leaves((state.server.private, state.clients)))
    }
    if end.failures is not None and end.failures.any():
        arrays["failures"] = np.ascontiguousarray(end.failures)
    return arrays


def end_of_shorter(root: Path, config: Config) -> Checkpoint | None:
    """The end of the longest finished run in `root` with fewer rounds, as a checkpoint of this config; or None.

    Training from there gives the bits of a run that was trained for all rounds at once. The checkpoint has only those
    evaluations of the shorter run that the config asks for.
    """
    if not config.extensible:
        return None
    found = [shorter for folder in root.glob(f"{config.name}-*") if (shorter := _shorter(config, folder))]
    for shorter in sorted(found, key=lambda item: -item.rounds):
        try:
            checkpoint = _checkpoint(load_run(root / shorter.folder, shorter), config)
        except UserError as error:
            log.warning("%s is not continued: %s", shorter.folder, error)
            continue
        if checkpoint is not None:
            return checkpoint
    return None


def _shorter(config: Config, folder: Path) -> Config | None:
    """The config with the rounds and evaluations of a finished run, if that run differs in nothing else."""
    if len(folder.name) != len(config.folder) or not (folder / "config.toml").is_file():
        return None
    try:
        there = read_table(folder / "config.toml", "config")
        same = parse_config({**config.table, **{key: there[key] for key in ("rounds", "evaluate_every")}})
    except (UserError, KeyError):  # a folder that is not a run, or a damaged one
        return None
    fits = same.folder == folder.name and same.rounds < config.rounds and has_run(folder.parent, same)
    return same if fits else None


def _checkpoint(run: Run, config: Config) -> Checkpoint | None:
    """A finished run as a checkpoint of a longer one; None if it lacks evaluations or parts of its state.

    A run that was trained over a network is rejected, since its agents are not here.
    """
    if run.provenance.get("federation") is not None:
        raise UserError("it was trained over a network, and its agents are not here")
    rounds = [0, *(stop for stop in config.stops if stop <= run.config.rounds)]
    if not set(rounds) <= set(run.history.rounds.tolist()):
        return None
    if config.keep == "best" and not set(run.history.rounds[best_evaluation(run.history)].tolist()) <= set(rounds):
        return None  # the best evaluation is one that the longer run does not have
    rest: Mapping[str, Any] = read_safetensors(run.folder / STATE)[0] if (run.folder / STATE).is_file() else {}
    last, best = jax.tree.leaves(run.at_end.message), ()
    if config.keep == "best":
        best = (*jax.tree.leaves(run.message), *numbered("best", rest))
    leaves = (*last, *numbered("state", rest))
    if len(leaves) != len(jax.tree.leaves(config.experiment.initial_states(0))):
        return None  # it was saved before runs kept their state
    seconds = float(run.provenance["seconds"])
    so_far = run.history.at(rounds), seconds, rest.get("failures")
    return Checkpoint(run.config.rounds, leaves, *so_far, best, run.folder.name)
