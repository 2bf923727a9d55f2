"""Files: atomic writes, and reads that report damage as an error of one sentence."""

import io
import os
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from perfedrl.errors import UserError

RETRAIN_HINT = "train its config again with --restart"
DAMAGED = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, MemoryError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError),
)
"""What reading a damaged .npz file may raise."""


def check_folder(path: Path) -> None:
    """Reject a folder that cannot be created or written to, before any work is done."""
    for part in (path, *path.parents):
        if part.exists():
            if not part.is_dir():
                raise UserError(f"{part} is a file; expected a folder")
            if not os.access(part, os.W_OK):
                raise UserError(f"the folder {part} cannot be written to")
            return


def check_file(path: Path) -> None:
    """Reject a file that cannot be written, before any work is done."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; expected a file")
    if path.name == "-":
        raise UserError("- is not the name of a file; standard output has the table, so name a file")
    check_folder(path.parent)


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file so that readers see either the old or the new content, also after a crash or a power cut.

    An error of the system, such as a full disk, names the file.
    """
    try:
        replace_file(path, content, mode)
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None
        raise


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Write a file under a temporary name and rename it."""
    if not path.parent.is_dir():
        make_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        rename_durably(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def rename_durably(old: str | Path, new: Path) -> None:
    """Rename a file or a folder so that the new name outlives a power cut."""
    os.replace(old, new)
    sync_folder(new.parent)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder, and those above it that are missing, so that it outlives a power cut.

    If it is there already, it is written through all the same, since a process may have been killed before it did so.
    """
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=mode, exist_ok=True)
    with suppress(PermissionError):  # somebody else's folder, which is older than this one
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Write the names in a folder through to the disk; an error names the folder."""
    if os.name != "posix":  # Windows cannot open folders
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        with suppress(OSError):
            os.close(folder)
        error.filename = str(path)
        raise


def npz(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Encode arrays as the content of an .npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def read_npz(path: Path, make: Callable[[Mapping[str, np.ndarray]], Any]) -> Any:
    """Read an .npz file and return `make` of its arrays."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return make(dict(arrays))
    except DAMAGED as error:
        raise UserError(f"{path} is damaged; {RETRAIN_HINT}") from error


def named_leaves(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a pytree by their paths, such as "0.weight"; the name of a single array is "theta"."""
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") or "theta": np.asarray(leaf, order="C")
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable safetensors file; {RETRAIN_HINT}") from error
