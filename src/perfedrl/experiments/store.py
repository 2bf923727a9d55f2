"""Runs on disk: one folder with config.toml, history.npz, params.safetensors and provenance.json.

Further files are there where a run has their content: deployment.npz if the config asks for a deployment,
best.safetensors if it keeps the best parameters, start.safetensors if it started from another run's, and
state.safetensors with what training carries from round to round beside the parameters. Every file is written under a
temporary name and then renamed, and the folder gets its final name last, so that a folder with a run's name is
complete. Until then a folder `.partial` holds the last checkpoint.
"""

import glob
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jaxtyping import PyTree
from safetensors.numpy import save

from perfedrl.errors import UserError, nearest
from perfedrl.experiments.config import Config, load_config, read_config
from perfedrl.experiments.files import (
    RETRAIN_HINT,
    make_folder,
    named_leaves,
    npz,
    read_npz,
    read_safetensors,
    rename_durably,
    write_atomically,
)
from perfedrl.experiments.module_folders import as_record
from perfedrl.experiments.settings import read_table
from perfedrl.experiments.start_parameters import StartTable
from perfedrl.experiments.trust import signed
from perfedrl.simulation.best_state import best_evaluation
from perfedrl.simulation.failures import Counts
from perfedrl.simulation.history import Deployment, History
from perfedrl.types import Params

try:
    import fcntl
except ImportError:  # Windows has no such locks; there a second process is not detected
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("perfedrl")

FORMAT = 3
"""The version of the layout of run folders; runs of other versions are rejected."""

FILES = ("config.toml", "history.npz", "params.safetensors", "provenance.json")
DEPLOYMENT, BEST, STATE, START = "deployment.npz", "best.safetensors", "state.safetensors", "start.safetensors"
CHECKPOINT, LOCK, FLEET_FILE = "checkpoint.safetensors", "lock", "fleet.npz"
MORE_FILES = (DEPLOYMENT, BEST, STATE, START, FLEET_FILE)
PARTIAL = ".partial"


@dataclass(frozen=True)
class Run:
    """A finished run: its config, its measurements, the message of every seed, and its provenance.

    `message` is that of the last round or, if the config keeps the best, of each seed's best evaluation; `at_end` is
    the run with the message of the last round.
    """

    folder: Path
    config: Config
    history: History
    message: PyTree
    provenance: Mapping[str, Any]
    deployment: Deployment | None = None
    from_disk: bool = False
    last_message: PyTree | None = None
    """The message of the last round, where `message` is another."""

    def __repr__(self) -> str:
        c = self.config
        seeds = f"{len(c.seeds)} seed{'s' if len(c.seeds) > 1 else ''}"
        what = f"{c.algorithm['name']} on {c.fleet['env']}, {c.rounds} rounds, {seeds}"
        return f"Run({str(self.folder)!r}: {what}, {self.origin};\n    history={self.history!r})"

    @property
    def at_end(self) -> "Run":
        """The same run with the parameters of its last round in use."""
        return self if self.last_message is None else replace(self, message=self.last_message, last_message=None)

    @property
    def kept(self) -> str:
        """A sentence that says which parameters are in use, where a run keeps the best beside the last."""
        if self.config.keep == "last":
            return ""
        if self.last_message is None:
            return f"parameters of the last round, {self.config.rounds}"
        best = self.history.rounds[best_evaluation(self.history)]
        by = "held-out agents" if self.history.held_out_after.shape[-1] else "training agents"
        when = f"round {best[0]}" if len(set(best)) == 1 else f"rounds {min(best)} to {max(best)}, by seed"
        return f"parameters of the best evaluation by the return of {by} after adaptation: {when}"

    @property
    def origin(self) -> str:
        """Whether the run was trained or read from disk, and when it was trained."""
        finished = self.provenance["finished"][:16].replace("T", " ")
        if self.from_disk:
            return f"read from disk (trained on {finished} UTC)"
        extended = self.provenance.get("extends")
        return f"trained on from the end of {extended}" if extended else "trained"

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
    failures: Counts | None = None
    best: tuple[np.ndarray, ...] = ()
    """The leaves of each seed's best state, where the run keeps it."""
    extends: str = ""
    """The finished run with fewer rounds at whose end this is, if it is one."""


def save_run(
    root: Path,
    config: Config,
    history: History,
    deployment: Deployment | None,
    message: PyTree,
    provenance: Mapping[str, Any],
    best: PyTree | None = None,
    state: Mapping[str, np.ndarray] | None = None,
) -> Run:
    """Write a finished run, remove its checkpoint and return the run; the folder is renamed when it is complete.

    `best` is the message of each seed's best evaluation. `state` has the leaves of the fleet's state beside the
    message, from which a longer run can go on. Runs that are not extensible have neither it nor an optimizer's state.
    """
    folder, partial = root / config.folder, partial_folder(root, config)
    make_folder(partial)
    own_files: dict[str, Any] = {}
    if config.fleet.get("file"):
        write_atomically(partial / FLEET_FILE, Path(config.fleet["file"]).read_bytes())
        own_files = {"file": FLEET_FILE}
    if isinstance(config.start, StartTable):
        write_atomically(partial / START, config.start.saved.encoded())
        own_files |= {"start_path": START}
    text = config.to_toml(**own_files).encode()
    about = {**provenance, **_code_record(config, text)}
    write_atomically(partial / "config.toml", text)
    write_atomically(partial / "history.npz", npz(history.arrays()))
    if deployment is not None:
        write_atomically(partial / DEPLOYMENT, npz(deployment.arrays()))
    write_atomically(partial / "params.safetensors", save(named_leaves(_saved_part(config, message))))
    if best is not None:
        write_atomically(partial / BEST, save(named_leaves(_saved_part(config, best))))
    if state and config.extensible:
        write_atomically(partial / STATE, save(dict(state)))
    write_atomically(partial / "provenance.json", _json(about))
    for name in (CHECKPOINT, LOCK):
        (partial / name).unlink(missing_ok=True)
    _put_in_place(partial, folder)
    last = None if best is None else message
    used = message if best is None else best
    return Run(folder, config, history, used, about, deployment, last_message=last)


def _saved_part(config: Config, message: PyTree) -> PyTree:
    """The part of a message that a finished run has: all of it, or what is needed without further training."""
    return message if config.extensible else config.experiment.algorithm.without_training_state(message)


def _code_record(config: Config, text: bytes) -> dict[str, Any]:
    """The part of a run's provenance that lets its user open it again, if its config names code; `text` is its file."""
    return signed(as_record(config.module_folders), text) if config.code_names else {}


def _json(content: Mapping[str, Any]) -> bytes:
    """A table as the content of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def _put_in_place(partial: Path, folder: Path) -> None:
    """Give a complete folder its final name; of a folder that it replaces, files that are not a run's are kept."""
    if folder.exists():
        os.replace(folder, Path(tempfile.mkdtemp(dir=folder.parent, prefix=_replaced(folder))) / "run")
    try:
        rename_durably(partial, folder)
    except FileNotFoundError:
        if not folder.exists():  # else another process found it complete, and was first
            raise
    for old in folder.parent.glob(f"{glob.escape(_replaced(folder))}*"):
        if (old / "run").is_dir():
            for path in (old / "run").iterdir():
                if path.name not in (*FILES, *MORE_FILES):
                    os.replace(path, folder / path.name)
        with suppress(OSError):  # the run is in place, and what is left here goes the next time
            shutil.rmtree(old)


def _replaced(folder: Path) -> str:
    """The beginning of the names under which a run's folder is kept while it is replaced."""
    return f".replaced-{folder.name}-"


def _finish_replacement(folder: Path) -> None:
    """Put a complete run in place if its process was killed after it had moved the old folder away."""
    partial = folder.with_name(f"{folder.name}{PARTIAL}")
    if folder.exists() or (partial / CHECKPOINT).exists() or is_locked(partial):
        return
    if all((partial / name).is_file() for name in FILES):
        _put_in_place(partial, folder)


def load_run(folder: str | Path, config: Config | None = None, *, trust: bool = False) -> Run:
    """Read a finished run; a missing or damaged file, or one of another version, is an error of one sentence.

    `config` is the run's config if the caller has it, so that its experiment is not built again. `trust` lets a run
    that this user did not train on this machine import the code that it names.
    """
    folder = Path(folder)
    folder = folder if folder.name else folder.resolve()
    if folder.name and not folder.name.endswith(PARTIAL):
        _finish_replacement(folder)
    if not folder.is_dir():
        siblings = [path.name for path in folder.parent.glob("*-*") if path.is_dir()] if folder.parent.is_dir() else []
        raise UserError(f"there is no run {folder}{nearest(folder.name, siblings)}")
    if folder.name.endswith(PARTIAL):
        raise UserError(f"{folder} has no trained initialization yet; finish it with `perfedrl train` and its config")
    provenance = read_provenance(folder)
    check_complete(folder, FILES)
    path = folder / "config.toml"
    on_disk = load_config(path, trust=trust) if config is None else read_config(path, known=config.code_names)
    if not folder.name.endswith((on_disk.digest, on_disk.digest_without_code)):
        raise UserError(f"{path} is not the config of this run, since its digest is {on_disk.digest}; {RETRAIN_HINT}")
    if on_disk.changed_code:
        log.warning(
            "%s was trained with another version of %s than the one that is here now",
            folder.name,
            " and ".join(on_disk.changed_code),
        )
    config = on_disk if config is None else config
    history, deployment = read_npz(folder / "history.npz", History.of), None
    if history.seeds.tolist() != list(config.seeds) or history.rounds[-1] != config.rounds:
        raise UserError(f"{folder / 'history.npz'} is of another run than the config; {RETRAIN_HINT}")
    if config.experiment.evaluation.few_shot:
        check_complete(folder, (DEPLOYMENT,))
        deployment = read_npz(folder / DEPLOYMENT, Deployment.of)
    server, _ = config.experiment.algorithm.init(config.experiment.policy.init(jax.random.key(0)))

    def message(name: str) -> PyTree:
        found, seeds = read_safetensors(folder / name)[0], len(config.seeds)
        left_out = named_leaves(server.message).keys() - named_leaves(_saved_part(config, server.message)).keys()
        first = {k: np.stack([x] * seeds) for k, x in named_leaves(server.message).items() if k in left_out}
        return _unflatten_like(server.message, {**first, **found}, seeds)

    used, last = message("params.safetensors"), None
    if config.keep == "best":
        check_complete(folder, (BEST,))
        used, last = message(BEST), used
    return Run(folder, config, history, used, provenance, deployment, from_disk=True, last_message=last)


def made_or_read(what: str, made: int, dates: Sequence[str]) -> str:
    """Count what was trained now and what was read from disk, with the first and the last date of the latter."""
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""
    read = f"{len(dates)} read from disk (trained on {when})" if dates else ""
    return f"{what}: " + ", ".join(filter(None, (f"{made} trained" if made else "", read)))


def check_complete(folder: Path, files: Sequence[str]) -> None:
    """Reject a run folder in which files are missing."""
    missing = [name for name in files if not (folder / name).is_file()]
    if missing and not any((folder / name).is_file() for name in FILES):
        raise UserError(f"{folder} is not the folder of a run")
    if missing:
        raise UserError(f"{folder} is not a complete run: {', '.join(missing)} missing; {RETRAIN_HINT}")


def read_provenance(folder: Path) -> dict[str, Any]:
    """Read where a run came from, and check the version of its format."""
    path = folder / "provenance.json"
    check_complete(folder, (path.name,))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        format_, complete = content["format"], {"seconds", "finished", "device"} <= set(content)
        counts = [n for kinds in content.get("failures", {}).values() for n in kinds.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged; {RETRAIN_HINT}") from error
    if not isinstance(format_, int) or not complete or not all(isinstance(n, int) for n in counts):
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
    """Whether a finished run of this config exists; one that is complete under another name is put in place."""
    _finish_replacement(root / config.folder)
    return all((root / config.folder / name).is_file() for name in FILES)


def with_earlier_code(root: Path, config: Config) -> Path | None:
    """The newest finished or interrupted run of the same config with other code of the user's own."""
    if not config.code:
        return None
    folders = root.glob(f"{config.name}-*")
    files = (folder / (CHECKPOINT if folder.suffix == PARTIAL else "provenance.json") for folder in folders)
    for folder in (path.parent for path in reversed(oldest_first(files))):
        with suppress(UserError):  # somebody else's folder
            if read_table(folder / "config.toml", "config").get("name") != config.name:
                continue  # reading it as a config would import the modules that it names
            earlier = read_config(folder / "config.toml", known=config.code_names)
            if earlier.digest_without_code == config.digest_without_code and earlier.digest != config.digest:
                return folder
    return None


def oldest_first(files: Iterable[Path]) -> list[Path]:
    """Files by the time of their last change, without those that are not there, or no longer."""
    changed: dict[Path, float] = {}
    for path in files:
        with suppress(OSError):
            changed[path] = path.stat().st_mtime
    return sorted(changed, key=changed.__getitem__)


def save_checkpoint(root: Path, config: Config, checkpoint: Checkpoint) -> None:
    """Write the checkpoint of an unfinished run."""
    tensors = {f"state.{i}": np.ascontiguousarray(leaf) for i, leaf in enumerate(checkpoint.leaves)}
    tensors |= {f"best.{i}": np.ascontiguousarray(leaf) for i, leaf in enumerate(checkpoint.best)}
    tensors |= {f"history.{name}": np.ascontiguousarray(x) for name, x in checkpoint.history.arrays().items()}
    if checkpoint.failures is not None and checkpoint.failures.any():
        tensors["failures"] = np.ascontiguousarray(checkpoint.failures)
    about = {"format": str(FORMAT), "round": str(checkpoint.round), "seconds": repr(checkpoint.seconds)}
    about["extends"] = checkpoint.extends
    folder = partial_folder(root, config)
    if not (folder / "config.toml").is_file():
        text = config.to_toml().encode()
        if record := _code_record(config, text):  # so that the config can be read from other folders
            write_atomically(folder / "provenance.json", _json(record))
        write_atomically(folder / "config.toml", text)
    write_atomically(folder / CHECKPOINT, save(tensors, metadata=about))


def load_checkpoint(root: Path, config: Config) -> Checkpoint | None:
    """Read the checkpoint of an unfinished run, if there is one."""
    path = partial_folder(root, config) / CHECKPOINT
    if not path.is_file():
        return None
    tensors, about = read_safetensors(path)
    try:
        if int(about["format"]) != FORMAT:
            raise UserError(f"{path} was written by another version of perfedrl; start again with --restart")
        leaves, best = numbered("state", tensors), numbered("best", tensors)
        arrays = {name.removeprefix("history."): x for name, x in tensors.items() if name.startswith("history.")}
        round_, seconds, failures = int(about["round"]), float(about["seconds"]), tensors.get("failures")
        return Checkpoint(round_, leaves, History.of(arrays), seconds, failures, best, about.get("extends", ""))
    except KeyError as error:
        raise UserError(f"{path} is damaged; {RETRAIN_HINT}") from error


def has_checkpoint(root: Path, config: Config) -> bool:
    """Whether an unfinished run of this config exists."""
    return (partial_folder(root, config) / CHECKPOINT).is_file()


def discard_checkpoint(root: Path, config: Config) -> None:
    """Delete the checkpoint of an unfinished run."""
    for name in (CHECKPOINT, "config.toml", "provenance.json"):
        (partial_folder(root, config) / name).unlink(missing_ok=True)


@contextmanager
def locked(root: Path, config: Config) -> Iterator[None]:
    """Keep other processes from training the same run; the lock is released when its process ends."""
    folder = partial_folder(root, config)
    with _open_lock(folder, config) as file:
        try:
            yield
        finally:
            if _is_at(file, folder / LOCK):  # a finished run has given up its folder, and another process may be there
                (folder / LOCK).unlink()
                with suppress(OSError):  # it holds a checkpoint, or another process's lock
                    folder.rmdir()


def _open_lock(folder: Path, config: Config) -> BinaryIO:
    """Open and lock the lock file; again if its last owner removed it in between."""
    while True:
        make_folder(folder)
        try:
            file = open(folder / LOCK, "wb")  # noqa: SIM115
        except FileNotFoundError:  # the last owner removed the folder
            continue
        if fcntl is None:
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise UserError(f"another process is training {config.folder}; wait until it has finished") from error
        if _is_at(file, folder / LOCK):
            return file
        file.close()


def is_locked(folder: Path) -> bool:
    """Whether a process is training the run of an unfinished folder; False on systems without such locks."""
    try:
        with open(folder / LOCK, "rb") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock file, or the file system has no locks
        return False
    return False


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def partial_folder(root: Path, config: Config) -> Path:
    """The folder of an unfinished run."""
    return root / f"{config.folder}{PARTIAL}"


def numbered(prefix: str, tensors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """The tensors whose names are a prefix and a number, in the order of the numbers."""
    found = {int(name.rpartition(".")[2]): x for name, x in tensors.items() if name.startswith(f"{prefix}.")}
    return tuple(found[i] for i in sorted(found))


def _unflatten_like(template: Any, leaves: Mapping[str, np.ndarray], seeds: int) -> Any:
    """Put saved leaves into the structure of a template, after a check of their names and shapes."""
    expected = {name: (seeds, *leaf.shape) for name, leaf in named_leaves(template).items()}
    found = {name: leaf.shape for name, leaf in leaves.items()}
    if found != expected:
        raise UserError(f"the saved parameters do not fit the policy: expected {expected}, got {found}")
    if not all(np.isfinite(leaf).all() for leaf in leaves.values()):
        raise UserError(f"the saved parameters are damaged: some are not finite; {RETRAIN_HINT}")
    return jax.tree.unflatten(jax.tree.structure(template), [leaves[name] for name in expected])
