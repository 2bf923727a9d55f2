"""An agent's store on disk: for each run the last answer, and the agent's personal state before and after it.

A question that is repeated after an interruption gets the same answer without new trajectories, and a restarted agent
continues from its last answer.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from perfedrl.errors import UserError
from perfedrl.experiments.files import write_atomically
from perfedrl.federation.frames import LIMIT, BadFrame, Frame, decode, encode
from perfedrl.registry import abbreviated

FORMAT = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NEVER = -1
"""The last answered round of a run before the first answer."""
PARTS, COUNTS = ("upload", "before", "after"), ("number", "generation", "round", "releases")
KIND, MOST_BYTES = "memory", 4 * LIMIT
MOST_ROUNDS = 2**30
"""Rounds are smaller, and so differ from the other numbers that are folded into an agent's key."""

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class StoredAnswer:
    """The last answer in a run, and the agent's state before and after it."""

    number: int
    generation: int
    round: int
    digest: str
    releases: int
    upload: Tensors
    before: Tensors
    after: Tensors


@dataclass(frozen=True)
class Answer:
    """An upload, whether it is newly computed, and the number of noised uploads so far."""

    upload: Tensors
    fresh: bool
    releases: int


class AnswerStore:
    """An agent's folder: one file per run, readable by the agent's user only."""

    def __init__(self, folder: str | Path, number: int):
        self.folder, self.number = Path(folder), number
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be used as the agent's folder: {reason_of(error)}") from error

    def answer(
        self,
        run: str,
        generation: int,
        round_: int,
        digest: str,
        start: Tensors,
        compute: Callable[[Tensors], tuple[Tensors, Tensors]],
        private: bool = False,
    ) -> Answer:
        """Return the stored upload for a round, or compute it from the agent's state and store it first.

        The same round with the same message (the same digest) has the same upload; with another message it is computed
        again from the state before that round.
        """
        record = self.record_for(run, generation, start)
        check_round(run, round_, record)
        if round_ == record.round and digest == record.digest:
            self.join(run, generation, start)
            return Answer(record.upload, False, record.releases)
        before = record.before if round_ == record.round else record.after
        upload, after = compute(before)
        releases = record.releases + private
        self._save(run, StoredAnswer(self.number, generation, round_, digest, releases, upload, before, after))
        return Answer(upload, True, releases)

    def state(self, run: str, generation: int, round_: int, start: Tensors) -> Tensors:
        """The agent's state after `round_` rounds."""
        record = self.record_for(run, generation, start)
        check_round(run, round_, record)
        return record.before if round_ == record.round else record.after

    def join(self, run: str, generation: int, start: Tensors) -> None:
        """Store a run's generation; jobs of earlier generations are stale from then on."""
        stored = self.stored(run)
        if stored is None or stored.generation != generation:
            self._save(run, self.record_for(run, generation, start))

    def record_for(self, run: str, generation: int, start: Tensors) -> StoredAnswer:
        """The record of a run with this generation, new or stored; an error if the generation is stale."""
        if generation < 0 or generation >= 2**63:
            raise UserError(f"generation must be a whole number >= 0, got {generation}")
        stored = self.stored(run)
        if stored is None:
            return StoredAnswer(self.number, generation, NEVER, "", 0, {}, start, start)
        if generation < stored.generation:
            raise UserError(
                f"this is a stale job: generation {generation} of {run}, and the agent works for {stored.generation}"
            )
        return replace(stored, generation=generation)

    def stored(self, run: str) -> StoredAnswer | None:
        """The stored record of a run, if there is one."""
        path = self.path(run)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {reason_of(error)}") from error
        record = parsed(data, path)
        if record.number != self.number:
            raise UserError(f"{path} belongs to agent number {record.number}; this is agent number {self.number}")
        return record

    def path(self, run: str, what: str = "run") -> Path:
        """The file of a run; its name contains the run's id, which is checked."""
        if not NAME.fullmatch(run):
            raise UserError(f"a run's id has 1 to 100 letters, digits, '.', '_' and '-', got {abbreviated(run)}")
        return self.folder / f"{what}-{run}.safetensors"

    def write(self, path: Path, content: bytes) -> None:
        """Write a file atomically and durably, readable by the agent's user only."""
        try:
            write_atomically(path, content)
            path.chmod(0o600)
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {reason_of(error)}") from error

    def _save(self, run: str, record: StoredAnswer) -> None:
        tensors = {f"{part}.{name}": np.asarray(x) for part in PARTS for name, x in getattr(record, part).items()}
        fields = {name: str(getattr(record, name)) for name in ("digest", *COUNTS)}
        fields |= {"format": str(FORMAT), "content": digest(tensors, *fields.values())}
        self.write(self.path(run), encode(Frame(KIND, fields, tensors)))


def parsed(data: bytes, path: Path) -> StoredAnswer:
    """Parse the content of a run's file."""
    damaged = f"{path} is damaged: restore it, or remove it, after which the agent starts the run anew"
    try:
        frame = decode(data, MOST_BYTES)
        fields = dict(frame.fields)
        whole = frame.kind == KIND and fields.pop("content") == digest(
            frame.tensors, *(fields[name] for name in ("digest", *COUNTS))
        )
        counts: dict[str, Any] = {name: int(fields[name]) for name in COUNTS}
        format_ = int(fields["format"])
    except (BadFrame, KeyError, ValueError) as error:
        raise UserError(damaged) from error
    if not whole:
        raise UserError(damaged)
    if format_ != FORMAT:
        raise UserError(f"{path} was written by another version of perfedrl (format {format_}, here {FORMAT})")
    parts: dict[str, Any] = {part: {} for part in PARTS}
    for name, x in frame.tensors.items():
        part, _, rest = name.partition(".")
        parts[part][rest] = x
    return StoredAnswer(digest=fields["digest"], **counts, **parts)


def digest(tensors: Mapping[str, np.ndarray], *texts: str) -> str:
    """A digest of tensors by their names, types, shapes and bits, together with some texts."""
    sha = hashlib.sha256(repr(texts).encode())
    for name in sorted(tensors):
        x = np.asarray(tensors[name], order="C")
        sha.update(repr((name, x.dtype.str, x.shape)).encode())
        sha.update(x.tobytes())
    return sha.hexdigest()


def check_round(run: str, round_: int, record: StoredAnswer) -> None:
    """Reject out-of-range or already answered rounds."""
    if not 0 <= round_ < MOST_ROUNDS:
        raise UserError(f"round must be a whole number from 0 to {MOST_ROUNDS - 1}, got {round_}")
    if round_ < record.round:
        raise UserError(f"round {round_} of {run} is over: the agent has already answered round {record.round}")


def reason_of(error: OSError) -> str:
    """The system's description of an error, as part of a sentence."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]
