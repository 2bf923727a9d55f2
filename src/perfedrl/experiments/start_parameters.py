"""Parameters of another run as the start of a new one: read from disk, identified by content, fitted to a policy."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, PrivateAttr
from safetensors.numpy import save

from perfedrl.errors import UserError
from perfedrl.experiments.files import named_leaves, read_safetensors
from perfedrl.policies import Policy
from perfedrl.registry import abbreviated
from perfedrl.simulation.experiment import StartParameters

SUFFIX = ".safetensors"


class SavedParameters(NamedTuple):
    """The shared parameters of each of a run's seeds, by their paths; `seeds` is empty for a single set."""

    seeds: tuple[int, ...]
    named: Mapping[str, np.ndarray]

    @property
    def digest(self) -> str:
        """The sha256 of the seeds and the parameters."""
        whole = hashlib.sha256(json.dumps(self.seeds).encode())
        for name, x in sorted(self.named.items()):
            whole.update(f"{name} {x.dtype} {x.shape}".encode() + np.ascontiguousarray(x).tobytes())
        return whole.hexdigest()

    def encoded(self) -> bytes:
        """The content of a file that `read_parameters` reads."""
        return save(dict(self.named), metadata={"seeds": json.dumps(self.seeds)})


class StartTable(BaseModel):
    """The table [start]: the folder of a run, or a file of parameters, and the digest of the parameters in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    sha256: str
    _saved: SavedParameters | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        """Whether path and digest agree; the parameters follow from them, and may have been read or not."""
        if not isinstance(other, StartTable):
            return NotImplemented
        return (self.path, self.sha256) == (other.path, other.sha256)

    @property
    def saved(self) -> SavedParameters:
        """The parameters, read once, since a run may outlive the one that it starts from."""
        if self._saved is None:
            found = read_parameters(self.path)
            if found.digest != self.sha256:
                raise UserError(f"{self.path} has changed since this config was made: expected sha256 {self.sha256}")
            self._saved = found
        return self._saved


def read_parameters(path: str | Path) -> SavedParameters:
    """Read the shared parameters of a finished run, or those in a safetensors file.

    Of a run that keeps its best parameters, these are meant.
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        from perfedrl.experiments.store import load_run  # the store reads configs, and a config may name a run

        run = load_run(path)
        if not run.config.experiment.algorithm.federated:
            raise UserError(f"{path} trained every agent alone and has no shared parameters to start from")
        return SavedParameters(run.config.seeds, named_leaves(run.params))
    if not path.is_file():
        raise UserError(f"there is no file of parameters {path} to start from")
    named, about = read_safetensors(path)
    try:
        seeds = tuple(int(seed) for seed in json.loads(about.get("seeds", "[]")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: its seeds cannot be read") from error
    if seeds and any(x.shape[:1] != (len(seeds),) for x in named.values()):
        raise UserError(f"{path} is damaged: its arrays do not have one row for each of its {len(seeds)} seeds")
    return SavedParameters(seeds, named)


def complete_start(value: str | dict[str, Any]) -> StartTable:
    """The table [start] of a path or a table, with the digest of the parameters, if it has none yet."""
    table = {"path": value} if isinstance(value, str) else value
    if not isinstance(table.get("path"), str) or not set(table) <= set(StartTable.model_fields):
        raise UserError(f'start must be a number, "per-seed", or the folder of a run, got {abbreviated(value)}')
    if table.get("sha256"):
        return StartTable(path=table["path"], sha256=str(table["sha256"]))
    saved = read_parameters(table["path"])
    made = StartTable(path=table["path"], sha256=saved.digest)
    made._saved = saved
    return made


def start_parameters(table: StartTable, policy: Policy) -> StartParameters:
    """Fit the parameters that a table names to a policy, after a check of their names and shapes."""
    saved = table.saved
    named = saved.named if saved.seeds else {name: x[None] for name, x in saved.named.items()}
    template = policy.init(jax.random.key(0))
    expected = {name: leaf.shape for name, leaf in named_leaves(template).items()}
    found = {name: x.shape[1:] for name, x in named.items()}
    for name in (*expected, *found):
        if expected.get(name) != found.get(name):
            here, there = (f"{shapes[name]}" if name in shapes else "missing" for shapes in (expected, found))
            raise UserError(
                f"the policy cannot start from {table.path}: the shape of {name} is {there} there and {here} here"
            )
    leaves, structure = jax.tree.flatten(template)
    own = [np.asarray(named[name], leaf.dtype) for name, leaf in zip(expected, leaves, strict=True)]
    return StartParameters(table.path, saved.seeds or (0,), jax.tree.unflatten(structure, own))
