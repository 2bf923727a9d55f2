"""A run on disk: config.toml, history.npz, params.safetensors and provenance.json in one folder.

Every file is written beside its place and then renamed, and the folder gets its final name last, so what carries a
run's name is complete. Until then a folder `.partial` holds the last checkpoint.
"""

import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from perfedrl.errors import UserError, nearest
from perfedrl.experiments.config import Config, load_config
from perfedrl.history import History
from perfedrl.types import Params

FORMAT = 1
"""Raised when the layout of a run changes; a run of a newer format is refused."""

FILES = ("config.toml", "history.npz", "params.safetensors", "provenance.json")
CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class Run:
    """A finished run: its config, what it measured, the initialization of every seed, and where it came from."""

    folder: Path
    config: Config
    history: History
    params: Params
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """An unfinished run after an evaluation: leaves of the fleet's state with a leading seed axis."""

    round: int
    leaves: tuple[np.ndarray, ...]
    history: History
    seconds: float


def save_run(root: Path, config: Config, history: History, params: Params, provenance: Mapping[str, Any]) -> Path:
    """Write a finished run and remove its checkpoint."""
    folder, partial = root / config.folder, _partial(root, config)
    partial.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **history.arrays())
    write_atomically(partial / "config.toml", config.to_toml().encode())
    write_atomically(partial / "history.npz", buffer.getvalue())
    write_atomically(partial / "params.safetensors", save(_named_leaves(params)))
    write_atomically(partial / "provenance.json", (json.dumps(dict(provenance), indent=2) + "\n").encode())
    (partial / CHECKPOINT).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)
    return folder


def load_run(folder: str | Path) -> Run:
    """Read a finished run; what is missing, damaged or too new is said in one sentence."""
    folder = Path(folder)
    if not folder.is_dir():
        siblings = [path.name for path in folder.parent.glob("*-*") if path.is_dir()] if folder.parent.is_dir() else []
        raise UserError(f"there is no run {folder}{nearest(folder.name, siblings)}")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} is not a complete run: {', '.join(missing)} missing; train its config again")
    provenance = _read_json(folder / "provenance.json")
    if provenance.get("format", 0) > FORMAT:
        raise UserError(
            f"{folder} was written by a newer perfedrl ({provenance.get('perfedrl')}, format {provenance['format']}); "
            f"this one reads formats up to {FORMAT}: upgrade perfedrl"
        )
    config = load_config(folder / "config.toml")
    try:
        with np.load(folder / "history.npz", allow_pickle=False) as arrays:
            history = History(**{name: arrays[name] for name in History.__dataclass_fields__})
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{folder / 'history.npz'} is damaged: {error}; train the config again") from error
    leaves, _ = _read_safetensors(folder / "params.safetensors")
    return Run(folder, config, history, _like(config.build().policy.init(jax.random.key(0)), leaves), provenance)


def has_run(root: Path, config: Config) -> bool:
    """Whether a finished run of this config is there."""
    return all((root / config.folder / name).is_file() for name in FILES)


def list_runs(root: Path) -> list[Path]:
    """The folders of finished runs, oldest first."""
    found = [path.parent for path in root.glob("*/provenance.json") if path.parent.suffix != ".partial"]
    return sorted(found, key=lambda path: (path / "provenance.json").stat().st_mtime)


def save_checkpoint(root: Path, config: Config, checkpoint: Checkpoint) -> None:
    """Write where an unfinished run stands, in one file."""
    tensors = {f"state.{i}": np.ascontiguousarray(leaf) for i, leaf in enumerate(checkpoint.leaves)}
    tensors |= {f"history.{name}": np.ascontiguousarray(x) for name, x in checkpoint.history.arrays().items()}
    about = {"format": str(FORMAT), "round": str(checkpoint.round), "seconds": repr(checkpoint.seconds)}
    folder = _partial(root, config)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / CHECKPOINT, save(tensors, metadata=about))


def load_checkpoint(root: Path, config: Config) -> Checkpoint | None:
    """Read where an unfinished run stands, if there is one."""
    path = _partial(root, config) / CHECKPOINT
    if not path.is_file():
        return None
    tensors, about = _read_safetensors(path)
    if int(about.get("format", 0)) > FORMAT:
        raise UserError(f"{path} was written by a newer perfedrl: upgrade, or remove the folder to start again")
    leaves = [tensors[name] for name in sorted((n for n in tensors if n.startswith("state.")), key=_number)]
    history = History(**{name: tensors[f"history.{name}"] for name in History.__dataclass_fields__})
    return Checkpoint(int(about["round"]), tuple(leaves), history, float(about["seconds"]))


def discard_checkpoint(root: Path, config: Config) -> None:
    """Forget an unfinished run."""
    shutil.rmtree(_partial(root, config), ignore_errors=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _partial(root: Path, config: Config) -> Path:
    return root / f"{config.folder}.partial"


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])


def _named_leaves(tree: Any) -> dict[str, np.ndarray]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".") or "theta"  # noqa: E731
    return {name(path): np.ascontiguousarray(leaf) for path, leaf in paths}


def _like(template: Any, leaves: Mapping[str, np.ndarray]) -> Any:
    names = list(_named_leaves(template))
    if set(names) != set(leaves):
        raise UserError(f"the saved parameters {sorted(leaves)} do not fit the policy, which has {sorted(names)}")
    return jax.tree.unflatten(jax.tree.structure(template), [leaves[name] for name in names])


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it must hold an object")
    return content
