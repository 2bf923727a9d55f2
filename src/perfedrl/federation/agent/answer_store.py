"""What an agent remembers of a run, on its own disk: which round it answered with what, and its personal state.

So that a question that is asked again, by a network or a server that was interrupted, gets the same answer without
another trajectory, and an agent that was interrupted goes on where it stood.
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
"""The last answered round of a run in which none was."""
PARTS, COUNTS = ("upload", "before", "after"), ("number", "generation", "round", "releases")
KIND, MOST_BYTES = "memory", 4 * LIMIT
MOST_ROUNDS = 2**30
"""Rounds stay below it, and so below what else is folded into an agent's key."""

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Record:
    """The last answer of a run, and the agent's state before and after it."""

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
    """An upload, whether it was computed for this question, and how many there were that needed noise."""

    upload: Tensors
    fresh: bool
    releases: int


class Memory:
    """An agent's folder: one file per run, for the agent's eyes only."""

    def __init__(self, folder: str | Path, number: int):
        self.folder, self.number = Path(folder), number
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be the agent's own folder: {said(error)}") from error

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
        """The upload for a round, computed from the state where it is not known, and kept before it is returned.

        The same round with the same message, by its digest, has the same upload; with another message it is computed
        again from the state before that round.
        """
        record = self.at(run, generation, start)
        check_round(run, round_, record)
        if round_ == record.round and digest == record.digest:
            self.join(run, generation, start)
            return Answer(record.upload, False, record.releases)
        before = record.before if round_ == record.round else record.after
        upload, after = compute(before)
        releases = record.releases + private
        self._keep(run, Record(self.number, generation, round_, digest, releases, upload, before, after))
        return Answer(upload, True, releases)

    def state(self, run: str, generation: int, round_: int, start: Tensors) -> Tensors:
        """The state in which the agent is after `round_` rounds."""
        record = self.at(run, generation, start)
        check_round(run, round_, record)
        return record.before if round_ == record.round else record.after

    def join(self, run: str, generation: int, start: Tensors) -> None:
        """Remember a run's generation; earlier ones are stale from then on."""
        known = self.known(run)
        if known is None or known.generation != generation:
            self._keep(run, self.at(run, generation, start))

    def at(self, run: str, generation: int, start: Tensors) -> Record:
        """Where a run stands, for a generation that is not stale."""
        if generation < 0 or generation >= 2**63:
            raise UserError(f"a generation is a whole number from 0 on; it is {generation}")
        known = self.known(run)
        if known is None:
            return Record(self.number, generation, NEVER, "", 0, {}, start, start)
        if generation < known.generation:
            raise UserError(
                f"this is a stale job: generation {generation} of {run}, and the agent works for {known.generation}"
            )
        return replace(known, generation=generation)

    def known(self, run: str) -> Record | None:
        """What is remembered of a run."""
        path = self.path(run)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {said(error)}") from error
        record = parsed(data, path)
        if record.number != self.number:
            raise UserError(f"{path} is of agent number {record.number}; this is agent number {self.number}")
        return record

    def path(self, run: str, what: str = "run") -> Path:
        """The file of a run; the run's name becomes part of the file's."""
        if not NAME.fullmatch(run):
            raise UserError(f"a run's id has 1 to 100 letters, digits, '.', '_' and '-'; it is {abbreviated(run)}")
        return self.folder / f"{what}-{run}.safetensors"

    def write(self, path: Path, content: bytes) -> None:
        """Write a file whole or not at all, for the agent's eyes only."""
        try:
            write_atomically(path, content)
            path.chmod(0o600)
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {said(error)}") from error

    def _keep(self, run: str, record: Record) -> None:
        tensors = {f"{part}.{name}": np.asarray(x) for part in PARTS for name, x in getattr(record, part).items()}
        fields = {name: str(getattr(record, name)) for name in ("digest", *COUNTS)}
        fields |= {"format": str(FORMAT), "content": digest(tensors, *fields.values())}
        self.write(self.path(run), encode(Frame(KIND, fields, tensors)))


def parsed(data: bytes, path: Path) -> Record:
    """The record that a file holds."""
    damaged = f"{path} is damaged; without it the agent would start the run anew: restore the file, or remove it"
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
    return Record(digest=fields["digest"], **counts, **parts)


def digest(tensors: Mapping[str, np.ndarray], *texts: str) -> str:
    """What identifies tensors by their names, types, shapes and bits, together with some texts."""
    sha = hashlib.sha256(repr(texts).encode())
    for name in sorted(tensors):
        x = np.asarray(tensors[name], order="C")
        sha.update(repr((name, x.dtype.str, x.shape)).encode())
        sha.update(x.tobytes())
    return sha.hexdigest()


def check_round(run: str, round_: int, record: Record) -> None:
    """Refuse rounds that there are not, and those that are over."""
    if not 0 <= round_ < MOST_ROUNDS:
        raise UserError(f"a round is a whole number from 0 to {MOST_ROUNDS - 1}; it is {round_}")
    if round_ < record.round:
        raise UserError(f"round {round_} of {run} is over: the agent has answered round {record.round} already")


def said(error: OSError) -> str:
    """What the system says is wrong."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]
