"""Runs on disk: one folder with config.toml, history.npz, params.safetensors and provenance.json.

If the config asks for a deployment, the folder also has deployment.npz. Every file is written under a temporary name
and then renamed, and the folder gets its final name last, so that a folder with a run's name is complete. Until then a
folder `.partial` holds the last checkpoint.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from safetensors.numpy import save

from perfedrl.errors import UserError, nearest
from perfedrl.experiments.config import Config, load_config, read_config
from perfedrl.experiments.files import RETRAIN_HINT, named_leaves, npz, read_npz, read_safetensors, write_atomically
from perfedrl.simulation.history import Deployment, History
from perfedrl.types import Params

try:
    import fcntl
except ImportError:  # Windows has no such locks; there a second process is not detected
    fcntl = None  # type: ignore[assignment]

FORMAT = 3
"""The version of the layout of run folders; runs of other versions are rejected."""

FILES = ("config.toml", "history.npz", "params.safetensors", "provenance.json")
DEPLOYMENT = "deployment.npz"
CHECKPOINT, LOCK, FLEET_FILE = "checkpoint.safetensors", "lock", "fleet.npz"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Run:
    """A finished run: its config, its measurements, the last message of every seed, and its provenance."""

    folder: Path
    config: Config
    history: History
    message: PyTree
    provenance: Mapping[str, Any]
    deployment: Deployment | None = None

    @cached_property
    def params(self) -> Params:
        """The shared initialization of every seed."""
        return jax.tree.map(np.asarray, jax.vmap(self.config.experiment.algorithm.shared)(self.message))

    @property
    def deployed(self) -> Deployment:
        """The deployment; raise `UserError` if the run has none."""
        if self.deployment is None:
            raise UserError(f"{self.folder.name} has no deployment; set few_shot under [evaluation] in its config")
        return self.deployment


@dataclass(frozen=True)
class Checkpoint:
    """An unfinished run: the leaves of the fleet's state, with a leading seed axis, and the history so far."""

    round: int
    leaves: tuple[np.ndarray, ...]
    history: History
    seconds: float


def save_run(
    root: Path,
    config: Config,
    history: History,
    deployment: Deployment | None,
    message: PyTree,
    provenance: Mapping[str, Any],
) -> Run:
    """Write a finished run, remove its checkpoint and return the run; the folder is renamed when it is complete."""
    folder, partial = root / config.folder, partial_folder(root, config)
    partial.mkdir(parents=True, exist_ok=True)
    own_file = {}
    if config.fleet.get("file"):
        write_atomically(partial / FLEET_FILE, Path(config.fleet["file"]).read_bytes())
        own_file = {"file": FLEET_FILE}
    write_atomically(partial / "config.toml", config.to_toml(**own_file).encode())
    write_atomically(partial / "history.npz", npz(history.arrays()))
    if deployment is not None:
        write_atomically(partial / DEPLOYMENT, npz(deployment.arrays()))
    write_atomically(partial / "params.safetensors", save(named_leaves(message)))
    write_atomically(partial / "provenance.json", (json.dumps(dict(provenance), indent=2) + "\n").encode())
    for name in (CHECKPOINT, LOCK):
        (partial / name).unlink(missing_ok=True)
    if folder.exists():
        old = Path(tempfile.mkdtemp(dir=root, prefix=".replaced-"))
        os.replace(folder, old / "run")
        os.replace(partial, folder)
        shutil.rmtree(old)
    else:
        os.replace(partial, folder)
    return Run(folder, config, history, message, dict(provenance), deployment)


def load_run(folder: str | Path, config: Config | None = None) -> Run:
    """Read a finished run; a missing or damaged file, or one of another version, is an error of one sentence.

    `config` is the run's config if the caller has it, so that its experiment is not built again.
    """
    folder = Path(folder)
    folder = folder if folder.name else folder.resolve()
    if not folder.is_dir():
        siblings = [path.name for path in folder.parent.glob("*-*") if path.is_dir()] if folder.parent.is_dir() else []
        raise UserError(f"there is no run {folder}{nearest(folder.name, siblings)}")
    if folder.name.endswith(PARTIAL):
        raise UserError(f"{folder} has no trained initialization yet; finish it with `perfedrl train` and its config")
    provenance = read_provenance(folder)
    _check_complete(folder, FILES)
    path = folder / "config.toml"
    on_disk = load_config(path) if config is None else read_config(path)
    if not folder.name.endswith(on_disk.digest):
        raise UserError(f"{path} is not the config of this run, since its digest is {on_disk.digest}; {RETRAIN_HINT}")
    config = on_disk if config is None else config
    history, deployment = read_npz(folder / "history.npz", History.of), None
    if config.experiment.evaluation.few_shot:
        _check_complete(folder, (DEPLOYMENT,))
        deployment = read_npz(folder / DEPLOYMENT, Deployment.of)
    leaves, _ = read_safetensors(folder / "params.safetensors")
    server, _ = config.experiment.algorithm.init(config.experiment.policy.init(jax.random.key(0)))
    message = _unflatten_like(server.message, leaves, len(config.seeds))
    return Run(folder, config, history, message, provenance, deployment)


def _check_complete(folder: Path, files: Sequence[str]) -> None:
    """Reject a run folder in which files are missing."""
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} is not a complete run: {', '.join(missing)} missing; {RETRAIN_HINT}")


def read_provenance(folder: Path) -> dict[str, Any]:
    """Read where a run came from, and check the version of its format."""
    path = folder / "provenance.json"
    _check_complete(folder, (path.name,))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        format_, complete = content["format"], {"seconds", "finished", "device"} <= set(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged; {RETRAIN_HINT}") from error
    if not isinstance(format_, int) or not complete:
        raise UserError(f"{path} is damaged; {RETRAIN_HINT}")
    if format_ < FORMAT:
        raise UserError(f"{folder} was written by an older perfedrl (format {format_}, now {FORMAT}); {RETRAIN_HINT}")
    if format_ > FORMAT:
        raise UserError(
            f"{folder} was written by a newer perfedrl ({content.get('perfedrl')}, format {format_}); "
            f"this version reads format {FORMAT}; upgrade perfedrl"
        )
    return content


def has_run(root: Path, config: Config) -> bool:
    """Whether a finished run of this config exists."""
    return all((root / config.folder / name).is_file() for name in FILES)


def list_runs(root: Path) -> list[Path]:
    """The folders of finished runs, oldest first."""
    found = [path.parent for path in root.glob("*/provenance.json") if path.parent.suffix != PARTIAL]
    return sorted(found, key=lambda path: (path / "provenance.json").stat().st_mtime)


def save_checkpoint(root: Path, config: Config, checkpoint: Checkpoint) -> None:
    """Write the checkpoint of an unfinished run."""
    tensors = {f"state.{i}": np.ascontiguousarray(leaf) for i, leaf in enumerate(checkpoint.leaves)}
    tensors |= {f"history.{name}": np.ascontiguousarray(x) for name, x in checkpoint.history.arrays().items()}
    about = {"format": str(FORMAT), "round": str(checkpoint.round), "seconds": repr(checkpoint.seconds)}
    write_atomically(partial_folder(root, config) / CHECKPOINT, save(tensors, metadata=about))


def load_checkpoint(root: Path, config: Config) -> Checkpoint | None:
    """Read the checkpoint of an unfinished run, if there is one."""
    path = partial_folder(root, config) / CHECKPOINT
    if not path.is_file():
        return None
    tensors, about = read_safetensors(path)
    try:
        if int(about["format"]) != FORMAT:
            raise UserError(f"{path} was written by another version of perfedrl; start again with --restart")
        leaves = [tensors[name] for name in sorted((n for n in tensors if n.startswith("state.")), key=_number)]
        arrays = {name.removeprefix("history."): x for name, x in tensors.items() if name.startswith("history.")}
        return Checkpoint(int(about["round"]), tuple(leaves), History.of(arrays), float(about["seconds"]))
    except KeyError as error:
        raise UserError(f"{path} is damaged; {RETRAIN_HINT}") from error


def has_checkpoint(root: Path, config: Config) -> bool:
    """Whether an unfinished run of this config exists."""
    return (partial_folder(root, config) / CHECKPOINT).is_file()


def discard_checkpoint(root: Path, config: Config) -> None:
    """Delete the checkpoint of an unfinished run."""
    (partial_folder(root, config) / CHECKPOINT).unlink(missing_ok=True)


@contextmanager
def locked(root: Path, config: Config) -> Iterator[None]:
    """Keep other processes from training the same run; the lock is released when its process ends."""
    folder = partial_folder(root, config)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "wb") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(f"another process is training {config.folder}; wait until it has finished") from error
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def partial_folder(root: Path, config: Config) -> Path:
    """The folder of an unfinished run."""
    return root / f"{config.folder}{PARTIAL}"


def _number(name: str) -> int:
    """The number at the end of a tensor's name."""
    return int(name.rpartition(".")[2])


def _unflatten_like(template: Any, leaves: Mapping[str, np.ndarray], seeds: int) -> Any:
    """Put saved leaves into the structure of a template, after a check of their names and shapes."""
    expected = {name: (seeds, *leaf.shape) for name, leaf in named_leaves(template).items()}
    found = {name: leaf.shape for name, leaf in leaves.items()}
    if found != expected:
        raise UserError(f"the saved parameters do not fit the policy: expected {expected}, got {found}")
    return jax.tree.unflatten(jax.tree.structure(template), [leaves[name] for name in expected])
