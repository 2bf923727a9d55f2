"""The folder by which a supervisor and the job that it submits understand each other, on the server's machine.

`plan.json` says what is trained, `fence.json` which generation of jobs may write, `checkpoint.safetensors` where the
run stands, `progress.json` what happens right now, and `events.jsonl` what happened, one line each.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perfedrl.errors import UserError

LOCK = "lock"
PLAN, FENCE, CHECKPOINT, PROGRESS, EVENTS = (
    "plan.json",
    "fence.json",
    "checkpoint.safetensors",
    "progress.json",
    "events.jsonl",
)


class Stale(UserError):  # noqa: N818
    """A job that another one has replaced: it must not write any more."""


@dataclass(frozen=True)
class Terms:
    """What an operator decides about a run, beyond its config.

    A round closes when all agents that are expected have answered, or at its `deadline` (seconds) if at least
    `min_agents` have; with fewer it is asked again, for at most `patience` seconds. `factor` and `strikes` are those of
    `validation.Gate`. At the end every agent personalizes from `personalize` trajectories, unless that is 0.
    """

    min_agents: int
    deadline: float = 600.0
    patience: float = 600.0
    factor: float = 10.0
    strikes: int = 3
    personalize: int = 200

    def __post_init__(self) -> None:
        for name in ("min_agents", "strikes"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1; it is {getattr(self, name)}")
        for name, least in (("deadline", 0.0), ("patience", 0.0), ("factor", 1.0)):
            if not least < getattr(self, name) < float("inf"):
                raise UserError(f"{name} must be a finite number > {least:g}; it is {getattr(self, name)}")
        if self.personalize < 0:
            raise UserError(f"personalize is a number of trajectories, or 0; it is {self.personalize}")


@dataclass(frozen=True)
class Plan:
    """A run over a network: the config (TOML), the agents that take part, in the fleet's order, and the terms."""

    run: str
    config: str
    agents: tuple[str, ...]
    terms: Terms
    runs: str
    """The folder in which the finished run is saved."""
    released: tuple[str, ...] = ()
    since: int = 0
    """Who is let out of quarantine, by the job of which generation."""


class Control:
    """The folder of one run."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def checkpoint(self) -> Path:
        return self.folder / CHECKPOINT

    def write_plan(self, plan: Plan) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self.folder / PLAN, asdict(plan), durable=True)

    def plan(self) -> Plan:
        content = _read(self.folder / PLAN)
        try:
            lists = {name: tuple(content[name]) for name in ("agents", "released")}
            return Plan(**{**content, **lists, "terms": Terms(**content["terms"])})
        except (TypeError, KeyError) as error:
            raise UserError(f"{self.folder / PLAN} is damaged; start the run again with --restart") from error

    def next_generation(self) -> int:
        """Shut out all jobs so far, and return the number of the next one."""
        with self.locked():
            generation = self.generation() + 1
            _replace(self.folder / FENCE, {"generation": generation}, durable=True)
        return generation

    def generation(self) -> int:
        """The only generation that may write; 0 before there is one."""
        return int(_read(self.folder / FENCE).get("generation", 0)) if (self.folder / FENCE).exists() else 0

    def clear(self) -> None:
        """Forget the run. Its generations are not forgotten: a job of it that still runs stays shut out."""
        self.next_generation()
        with self.locked():
            for path in self.folder.iterdir():
                if path.name not in (FENCE, LOCK):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextmanager
    def writing(self, generation: int) -> Iterator[None]:
        """The right to write a checkpoint, which a job has until it is replaced."""
        with self.locked():
            if self.generation() != generation:
                raise Stale(f"job {generation} of the run was replaced by job {self.generation()}")
            yield

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / LOCK, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def say(self, event: str, **about: Any) -> None:
        """Add a line to what happened."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **about}) + "\n"
        with suppress(OSError), open(self.folder / EVENTS, "ab+") as file:  # a full disk must not end the run here
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            torn = end and file.read(1) != b"\n"
            file.write(("\n" if torn else "").encode() + line.encode())

    def events(self) -> list[dict[str, Any]]:
        """What happened so far; a line that a crash cut short is left out."""
        return self.news(0)[0]

    def news(self, since: int) -> tuple[list[dict[str, Any]], int]:
        """What happened since some byte of the log, and the byte from which to ask the next time."""
        path = self.folder / EVENTS
        if not path.exists():
            return [], 0
        with open(path, "rb") as file:
            file.seek(since)
            whole, _, _ = file.read().rpartition(b"\n")
        lines = whole.decode(errors="replace").splitlines()
        read = since + (len(whole) + 1 if whole else 0)
        return [parsed for line in lines if (parsed := _parse(line)) is not None], read

    def show(self, progress: Mapping[str, Any]) -> None:
        """Replace what happens right now, if that can be written."""
        with suppress(OSError):
            _replace(self.folder / PROGRESS, progress)

    def progress(self) -> dict[str, Any]:
        """What happens right now; empty before anything does."""
        path = self.folder / PROGRESS
        return (_parse(path.read_text(encoding="utf-8")) or {}) if path.exists() else {}


def _replace(path: Path, content: Any, durable: bool = False) -> None:
    """Write JSON so that a reader sees the old or the new; what need not survive a power cut is not forced to disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> Any:
    try:
        content = _parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if content is None:
        raise UserError(f"{path} is damaged; start the run again with --restart")
    return content


def _parse(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
