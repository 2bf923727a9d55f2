"""Lists of the runs in a folder, read without building anything or importing code that a config names."""

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from perfedrl.errors import UserError
from perfedrl.experiments.files import read_npz
from perfedrl.experiments.settings import read_table
from perfedrl.experiments.store import (
    CHECKPOINT,
    FILES,
    PARTIAL,
    check_complete,
    is_locked,
    oldest_first,
    read_provenance,
)
from perfedrl.simulation.history import History


class FinishedRun(NamedTuple):
    """A finished run: its measurements, and where it came from."""

    folder: Path
    history: History
    provenance: dict[str, Any]

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return int(self.history.rounds[-1])

    @property
    def seeds(self) -> list[int]:
        """The seeds."""
        return self.history.seeds.tolist()


class UnfinishedRun(NamedTuple):
    """A run without a final folder: the round of its checkpoint, and whether it is training now."""

    folder: Path
    round: int
    rounds: int
    seeds: list[int]
    training: bool


def list_finished(root: Path) -> list[Path]:
    """The folders of finished runs, oldest first."""
    found = oldest_first(root.glob("*/provenance.json"))
    return [path.parent for path in found if path.parent.suffix != PARTIAL]


def read_finished(folder: Path) -> FinishedRun:
    """Read what a list shows of a finished run."""
    provenance = read_provenance(folder)
    check_complete(folder, FILES)
    return FinishedRun(folder, read_npz(folder / "history.npz", History.of), provenance)


def list_interrupted(root: Path) -> list[UnfinishedRun]:
    """The interrupted runs and those that some process is training, oldest checkpoint first."""
    found = []
    for path in oldest_first(root.glob(f"*{PARTIAL}/{CHECKPOINT}")):
        with suppress(
            UserError, SafetensorError, OSError, KeyError, ValueError, TypeError
        ):  # of an earlier version, or damaged
            with safe_open(path, framework="numpy") as file:
                round_ = int((file.metadata() or {})["round"])
            table = read_table(path.parent / "config.toml", "config")
            rounds, seeds = int(table["rounds"]), [int(seed) for seed in table["seeds"]]
            found.append(UnfinishedRun(path.parent, round_, rounds, seeds, is_locked(path.parent)))
    return found
