"""The folder of one networked run on the server's machine, which the supervisor and its jobs share.

`plan.json` holds what is trained, `environment.json` what agents report of environments that only they have,
`fence.json` the generation of jobs that may write, `checkpoint.safetensors` the state after the last round,
`earlier.safetensors` the state before it, which is used if the last one is damaged, `excluded.json` the agents that
take part in no further job, `progress.json` the current status, and `events.jsonl` the log, one event per line.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from perfedrl.errors import UserError
from perfedrl.experiments.files import make_folder, read_safetensors, rename_durably, write_atomically
from perfedrl.federation.frames import digest
from perfedrl.simulation.history import History

LOCK, REPORT, EXCLUDED = "lock", "environment.json", "excluded.json"
PLAN, FENCE, CHECKPOINT, EARLIER, PROGRESS, EVENTS = (
    "plan.json",
    "fence.json",
    "checkpoint.safetensors",
    "earlier.safetensors",
    "progress.json",
    "events.jsonl",
)
CHECKPOINT_FORMAT = "3"
METADATA = ("format", "run", "seed", "round", "gate", "counted", "seconds")
TRAINED = "trained"
"""The phase in which a job ends after the last round, so that the next job takes in newcomers."""


class DamagedCheckpoint(UserError):  # noqa: N818
    """A checkpoint does not have the content that was written."""


class StaleJob(UserError):  # noqa: N818
    """A newer job has replaced this one, which must not write any more."""


@dataclass(frozen=True)
class Terms:
    """An operator's settings for a run, beyond its config.

    A round closes when all expected agents have answered, or at its `deadline` (seconds) if at least `min_agents` have;
    with fewer answers it is repeated for at most `patience` seconds. `factor` and `strikes` are settings of
    `upload_checks.Gate`. At the end every agent personalizes with `personalize` trajectories; 0 skips this step.
    Uploads of asynchronous agents count if they are at most `staleness` rounds old.
    """

    min_agents: int
    deadline: float = 600.0
    patience: float = 600.0
    factor: float = 10.0
    strikes: int = 3
    personalize: int = 200
    staleness: int = 1000

    def __post_init__(self) -> None:
        for name, count in (("min_agents", self.min_agents), ("strikes", self.strikes)):
            if count < 1:
                raise UserError(f"{name} must be at least 1, got {count}")
        for name, value, least in (
            ("deadline", self.deadline, 0.0),
            ("patience", self.patience, 0.0),
            ("factor", self.factor, 1.0),
        ):
            if not least < value < float("inf"):
                raise UserError(f"{name} must be a finite number > {least:g}, got {value}")
        if self.personalize < 0:
            raise UserError(f"personalize must be a number of trajectories, or 0, got {self.personalize}")
        if self.staleness < 0:
            raise UserError(f"staleness must be a number of rounds, or 0, got {self.staleness}")


@dataclass(frozen=True)
class RunSpec:
    """What a networked run trains: the config (TOML), the participating agents in the fleet's order, and the terms."""

    run: str
    config: str
    agents: tuple[str, ...]
    terms: Terms
    runs: str
    """The folder in which the finished run is saved, relative to the folder of the run under way."""
    released: tuple[str, ...] = ()
    """Agents that leave quarantine when the job of generation `since` starts."""
    since: int = 0
    newcomers: tuple[str, ...] = ()
    """Agents that take no part in training and personalize at the end."""
    folders: tuple[str, ...] = ()
    """Folders in which modules that the config names are looked for."""


@dataclass(frozen=True)
class ServerCheckpoint:
    """A run after a round. Agents' keys follow from the seed and the round; agents store their own states.

    `counted` has the last round whose upload is part of `server`, for each agent that has such a round. `arrivals` are
    those of `asynchronous_rounds`, `best` is the message of the best evaluation, if the run keeps it.
    """

    run: str
    seed: int
    round: int
    server: PyTree
    history: History | None
    gate: dict[str, Any]
    seconds: float
    counted: dict[str, int] = field(default_factory=dict)
    arrivals: tuple[tuple[int, int, int], ...] = ()
    best: PyTree | None = None


class RunFolder:
    """The files of one run under way."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint's path."""
        return self.path / CHECKPOINT

    def write_spec(self, spec: RunSpec) -> None:
        """Create the folder and write the run's specification."""
        make_folder(self.path)
        _replace(self.path / PLAN, asdict(spec), durable=True)

    def spec(self) -> RunSpec:
        """Read the run's specification."""
        content = _read(self.path / PLAN)
        try:
            lists = {name: tuple(x) for name, x in content.items() if isinstance(x, list)}
            return RunSpec(**{**content, **lists, "terms": Terms(**content["terms"])})
        except (TypeError, KeyError) as error:
            raise UserError(f"{self.path / PLAN} is damaged; start the run again with --restart") from error

    def write_report(self, report: str, generation: int) -> None:
        """Keep the report of the agents' environments, so that later jobs of the run use the same."""
        with self.writing(generation):
            write_atomically(self.path / REPORT, report.encode())

    def forget_report(self) -> None:
        """Ask agents again what their environments are like, when the run starts anew."""
        (self.path / REPORT).unlink(missing_ok=True)

    def report(self) -> str | None:
        """The report of the agents' environments, if there is one."""
        path = self.path / REPORT
        try:
            return path.read_text(encoding="utf-8") if path.exists() else None
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is damaged; start the run again with --restart") from error

    def next_generation(self) -> int:
        """Start a new generation of jobs, which makes all earlier ones stale, and return its number."""
        with self.locked():
            generation = self.generation() + 1
            _replace(self.path / FENCE, {"generation": generation}, durable=True)
        return generation

    def generation(self) -> int:
        """The generation that may write; 0 before the first job."""
        return int(_read(self.path / FENCE).get("generation", 0)) if (self.path / FENCE).exists() else 0

    def clear(self) -> None:
        """Delete the run but keep its generation number, so that a job that still runs stays stale."""
        self.next_generation()
        with self.locked():
            for path in self.path.iterdir():
                if path.name not in (FENCE, LOCK):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def writing(self, generation: int) -> Iterator[None]:
        """Hold the lock for writing; raise StaleJob if a newer generation exists."""
        with self.locked():
            if self.generation() != generation:
                raise StaleJob(f"job {generation} of the run was replaced by job {self.generation()}")
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock."""
        if not self.path.is_dir():
            make_folder(self.path)
        with open(self.path / LOCK, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def save_checkpoint(self, checkpoint: ServerCheckpoint, generation: int) -> None:
        """Replace the checkpoint atomically and keep the last one; a failed write leaves both intact."""
        leaves = jax.tree.leaves(checkpoint.server)
        tensors = {f"server.{i}": np.asarray(leaf, order="C") for i, leaf in enumerate(leaves)}
        if checkpoint.best is not None:
            tensors |= {f"best.{i}": np.asarray(x, order="C") for i, x in enumerate(jax.tree.leaves(checkpoint.best))}
        if checkpoint.arrivals:
            tensors["arrivals"] = np.asarray(checkpoint.arrivals, np.int32)
        if checkpoint.history is not None:
            arrays = checkpoint.history.arrays().items()
            tensors |= {f"history.{name}": np.ascontiguousarray(x) for name, x in arrays}
        texts = (checkpoint.run, *map(json.dumps, (checkpoint.seed, checkpoint.round)))
        values = CHECKPOINT_FORMAT, *texts, *map(json.dumps, (checkpoint.gate, checkpoint.counted, checkpoint.seconds))
        metadata = dict(zip(METADATA, values, strict=True), content=digest(tensors, *values))
        with self.writing(generation):
            try:
                if self.checkpoint_path.is_file():
                    self._copy(CHECKPOINT, EARLIER)
                write_atomically(self.checkpoint_path, save(tensors, metadata=metadata))
            except OSError as error:
                why = error.strerror or str(error)
                raise UserError(
                    f"round {checkpoint.round} could not be saved: {why[:1].lower()}{why[1:]}; "
                    "the last checkpoint is intact"
                ) from error

    def _copy(self, old: str, new: str) -> None:
        """Give a file a second name, under which it stays when the first is replaced."""
        temporary = self.path / f".{new}"
        temporary.unlink(missing_ok=True)
        os.link(self.path / old, temporary)
        rename_durably(temporary, self.path / new)

    def load_checkpoint(self, run: str, like: PyTree) -> ServerCheckpoint | None:
        """Read the checkpoint of a run, if there is one; the server's state must have the structure of `like`.

        If it is damaged, the one before it is used, and the loss is logged; agents can answer its round again.
        """
        if not self.checkpoint_path.is_file():
            return None
        try:
            return self._read_checkpoint(self.checkpoint_path, run, like)
        except DamagedCheckpoint as error:
            if not (self.path / EARLIER).is_file():
                raise
            found = self._read_checkpoint(self.path / EARLIER, run, like)
            self._copy(EARLIER, CHECKPOINT)
            self.log("damaged checkpoint", reason=str(error), round=found.round)
            return found

    @staticmethod
    def _read_checkpoint(path: Path, run: str, like: PyTree) -> ServerCheckpoint:
        """Read a checkpoint and check its content against its digest."""
        try:
            tensors, metadata = read_safetensors(path)
        except UserError as error:
            raise DamagedCheckpoint(f"{path} is damaged; start the run again with --restart") from error
        try:
            content = metadata.pop("content", None)
            if content is None and metadata["format"] < CHECKPOINT_FORMAT:  # of a version without digests
                raise UserError(f"{path} was written by another version of perfedrl; start again with --restart")
            if content != digest(tensors, *(metadata[name] for name in METADATA if name in metadata)):
                raise DamagedCheckpoint(f"{path} is damaged; start the run again with --restart")
            if metadata["format"] != CHECKPOINT_FORMAT:
                raise UserError(f"{path} was written by another version of perfedrl; start again with --restart")
            leaves = [tensors[f"server.{i}"] for i in range(len(jax.tree.leaves(like)))]
            arrays = {name.removeprefix("history."): x for name, x in tensors.items() if name.startswith("history.")}
            arrivals = tuple(map(tuple, tensors.get("arrivals", np.zeros((0, 3), int)).tolist()))
            gate, counted = json.loads(metadata["gate"]), json.loads(metadata["counted"])
            seed, round_, seconds = int(metadata["seed"]), int(metadata["round"]), float(metadata["seconds"])
        except (KeyError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise DamagedCheckpoint(f"{path} is damaged; start the run again with --restart") from error
        if [(x.shape, x.dtype) for x in leaves] != [(x.shape, x.dtype) for x in jax.tree.leaves(like)]:
            raise UserError(f"{path} does not fit the config; start the run again with --restart")
        if metadata["run"] != run:
            raise UserError(f"{path} is of another run, {metadata['run']}; start again with --restart")
        server = jax.tree.unflatten(jax.tree.structure(like), leaves)
        history = History.of(arrays) if arrays else None
        best = None
        if "best.0" in tensors:
            best = jax.tree.map(lambda x: tensors[f"best.{x}"], numbered(server.message))
        return ServerCheckpoint(run, seed, round_, server, history, gate, seconds, counted, arrivals, best)

    def remove_checkpoints(self) -> None:
        """Remove the checkpoints of a finished run."""
        for name in (CHECKPOINT, EARLIER):
            (self.path / name).unlink(missing_ok=True)

    def rounds_done(self) -> int:
        """The number of rounds in the checkpoint; 0 where there is none or it is damaged, which its job reports."""
        known = OSError, SafetensorError, KeyError, ValueError
        with suppress(*known), safe_open(self.checkpoint_path, framework="numpy") as file:
            return int((file.metadata() or {})["round"])
        return 0

    def excluded(self) -> list[str]:
        """The agents that take part in no further job, since their processes ended again and again."""
        path = self.path / EXCLUDED
        return list(_read(path)["agents"]) if path.exists() else []

    def exclude(self, agent: str) -> None:
        """Exclude an agent until it is released."""
        _replace(self.path / EXCLUDED, {"agents": sorted({*self.excluded(), agent})}, durable=True)
        self.log("excluded", agent=agent)

    def release(self, agents: Sequence[str]) -> None:
        """Let excluded agents take part again."""
        if self.excluded():
            _replace(self.path / EXCLUDED, {"agents": sorted(set(self.excluded()) - set(agents))}, durable=True)

    def log(self, event: str, **fields: Any) -> None:
        """Append an event to the log."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n"
        with suppress(OSError), open(self.path / EVENTS, "ab+") as file:  # a full disk must not end the run here
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            torn = end and file.read(1) != b"\n"
            file.write(("\n" if torn else "").encode() + line.encode())

    def events(self) -> list[dict[str, Any]]:
        """All logged events; a line that a crash cut short is left out."""
        return self.events_since(0)[0]

    def events_since(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """The events logged after a byte offset of the log, and the offset for the next call."""
        path = self.path / EVENTS
        if not path.exists():
            return [], 0
        with open(path, "rb") as file:
            file.seek(offset)
            whole, _, _ = file.read().rpartition(b"\n")
        lines = whole.decode(errors="replace").splitlines()
        end = offset + (len(whole) + 1 if whole else 0)
        return [parsed for line in lines if (parsed := _parse(line)) is not None], end

    def write_progress(self, progress: Mapping[str, Any]) -> None:
        """Replace the current status; a disk error is ignored."""
        with suppress(OSError):
            _replace(self.path / PROGRESS, progress)

    def progress(self) -> dict[str, Any]:
        """The current status; empty before the first job."""
        path = self.path / PROGRESS
        return (_parse(path.read_bytes()) or {}) if path.exists() else {}


def numbered(tree: PyTree) -> PyTree:
    """A tree with the numbers of its leaves as leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, range(len(leaves)))


def _replace(path: Path, content: Any, durable: bool = False) -> None:
    """Write JSON atomically; only `durable` files are forced to disk."""
    if durable:
        write_atomically(path, json.dumps(content).encode())
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> Any:
    """Read a JSON object that must exist."""
    try:
        content = _parse(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if content is None:
        raise UserError(f"{path} is damaged; start the run again with --restart")
    return content


def _parse(text: str | bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # of bytes that are not UTF-8 too
        return None
    return content if isinstance(content, dict) else None
