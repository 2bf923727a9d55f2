"""Where a networked run stands: the server's state, the round, what was measured, and what the gate remembers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from safetensors.numpy import save

from perfedrl.errors import UserError
from perfedrl.experiments.files import read_safetensors, write_atomically
from perfedrl.simulation.history import History

FORMAT = "1"


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round. Agents' keys follow from the seed and the round; their states are their own."""

    run: str
    seed: int
    round: int
    server: PyTree
    history: History | None
    gate: dict[str, Any]
    seconds: float


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint, or leave the last one as it is; a full disk is said plainly."""
    leaves = jax.tree.leaves(checkpoint.server)
    tensors = {f"server.{i}": np.asarray(leaf, order="C") for i, leaf in enumerate(leaves)}
    if checkpoint.history is not None:
        kept = checkpoint.history.arrays().items()
        tensors |= {f"history.{name}": np.ascontiguousarray(x) for name, x in kept}
    about = {
        "format": FORMAT,
        "run": checkpoint.run,
        "seed": str(checkpoint.seed),
        "round": str(checkpoint.round),
        "gate": json.dumps(checkpoint.gate),
        "seconds": repr(checkpoint.seconds),
    }
    try:
        write_atomically(path, save(tensors, metadata=about))
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(
            f"round {checkpoint.round} could not be saved: {why[:1].lower()}{why[1:]}; the last checkpoint is intact"
        ) from error


def read(path: Path, like: PyTree) -> Checkpoint | None:
    """The checkpoint, with a server's state shaped as `like`, if there is one."""
    if not path.is_file():
        return None
    tensors, about = read_safetensors(path)
    try:
        if about["format"] != FORMAT:
            raise UserError(f"{path} was written by another version of perfedrl: start again with --restart")
        leaves = [tensors[f"server.{i}"] for i in range(len(jax.tree.leaves(like)))]
        kept = {name.removeprefix("history."): x for name, x in tensors.items() if name.startswith("history.")}
        gate = json.loads(about["gate"])
        numbers = int(about["seed"]), int(about["round"]), float(about["seconds"])
    except (KeyError, ValueError) as error:
        raise UserError(f"{path} is damaged; start the run again with --restart") from error
    if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in jax.tree.leaves(like)]:
        raise UserError(f"{path} does not fit the config; start the run again with --restart")
    server = jax.tree.unflatten(jax.tree.structure(like), leaves)
    seed, round_, seconds = numbers
    return Checkpoint(about["run"], seed, round_, server, History.of(kept) if kept else None, gate, seconds)
