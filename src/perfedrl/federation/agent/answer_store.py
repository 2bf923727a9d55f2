"""An agent's store on disk: for each run the last two answers, and the agent's personal state before and after them.

A question that is repeated after an interruption gets the same answer without new trajectories. Every question says
which of the agent's uploads the server counted last, and the agent continues from its state after that one. A server
that lost its last checkpoint may go back by one answer.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from perfedrl.errors import UserError
from perfedrl.experiments.files import make_folder, write_atomically
from perfedrl.federation.frames import LIMIT, NEVER, BadFrame, Frame, decode, digest, encode
from perfedrl.federation.private_sockets import reason_of
from perfedrl.registry import abbreviated

FORMAT = 3
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
PARTS = ("upload", "before", "after", "earlier_upload", "earlier_before", "earlier_after")
COUNTS = ("number", "generation", "round", "since", "releases", "answered_for", "earlier_round", "earlier_since")
TEXTS = ("digest", "earlier_digest")
KIND, MOST_BYTES = "memory", len(PARTS) * LIMIT
MOST_ROUNDS = 2**30
"""Rounds are smaller, and so differ from the other numbers that are folded into an agent's key."""

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class StoredAnswer:
    """The last answer in a run, the agent's state before and after it, and the same of the answer before it.

    `since` is the round whose answer led to the state `before`, the last one that the server had counted. `generation`
    is the latest that the agent has heard of, `answered_for` the one that got the last answer.
    """

    number: int
    generation: int
    round: int
    since: int
    digest: str
    releases: int
    upload: Tensors
    before: Tensors
    after: Tensors
    answered_for: int
    earlier_round: int
    earlier_since: int
    earlier_digest: str
    earlier_upload: Tensors
    earlier_before: Tensors
    earlier_after: Tensors

    def as_of(self, round_: int) -> "StoredAnswer":
        """The record with which to answer a round: this one, or the one before the last answer.

        The latter if a later job asks for an earlier round, since the server lost the checkpoint after it.
        """
        if round_ >= self.round or self.generation <= self.answered_for or round_ < self.earlier_round:
            return self
        return replace(
            self,
            round=self.earlier_round,
            since=self.earlier_since,
            digest=self.earlier_digest,
            upload=self.earlier_upload,
            before=self.earlier_before,
            after=self.earlier_after,
        )

    def as_earlier(self) -> "StoredAnswer":
        """The record in which the last answer is the earlier one too, so that a new one can take its place."""
        return replace(
            self,
            earlier_round=self.round,
            earlier_since=self.since,
            earlier_digest=self.digest,
            earlier_upload=self.upload,
            earlier_before=self.before,
            earlier_after=self.after,
        )

    def state_after(self, round_: int) -> Tensors | None:
        """The agent's state after its answer to a round; None if it is not kept."""
        known = (self.round, self.after), (self.since, self.before)
        earlier = (self.earlier_round, self.earlier_after), (self.earlier_since, self.earlier_before)
        return next((state for known_round, state in (*known, *earlier) if known_round == round_), None)


@dataclass(frozen=True)
class Counted:
    """The last round whose upload the server has counted (`NEVER`: none), from whose state the agent continues.

    `required` if the agent cannot take part without that state, otherwise it continues from its last one.
    """

    round: int
    required: bool = False


@dataclass(frozen=True)
class Answer:
    """An upload, and whether it is newly computed."""

    upload: Tensors
    fresh: bool


class AnswerStore:
    """An agent's folder: one file per run, readable by the agent's user only."""

    def __init__(self, folder: str | Path, number: int):
        self.folder, self.number = Path(folder), number
        try:
            make_folder(self.folder, mode=0o700)
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
        noised: int | None = None,
        counted: Counted | None = None,
    ) -> Answer:
        """Return the stored upload for a round, or compute it from the agent's state and store it first.

        The same round with the same message (the same digest) has the same upload; with another message it is computed
        again. The state is that after the upload that was `counted` last; None: all are counted. `noised` is the number
        of the run's noised uploads so far, as the agent's ledger has it; None if this upload is without noise, which no
        run with noised uploads may ask for.
        """
        stored = self.record_for(run, generation, start)
        record = stored.as_of(round_)
        check_round(run, round_, record)
        check_releases(run, record.releases, noised)
        if round_ == record.round and digest == record.digest:
            self.join(run, generation, start)
            return Answer(record.upload, False)
        since, before = self._state(run, stored, round_, counted)
        record = record.as_earlier() if round_ > record.round else record
        upload, after = compute(before)
        about: dict[str, Any] = {"round": round_, "since": since, "digest": digest, "answered_for": generation}
        releases = record.releases + (noised is not None)
        record = replace(record, **about, upload=upload, before=before, after=after, releases=releases)
        self._save(run, record)
        return Answer(upload, True)

    def waiting(self, run: str, generation: int, round_: int, counted: Counted) -> StoredAnswer | None:
        """The last answer, if this job asked for it in an earlier round and has not received it yet."""
        record = self.record_for(run, generation, {})
        return record if counted.round < record.round < round_ and record.answered_for == generation else None

    def state(self, run: str, generation: int, round_: int, start: Tensors, counted: Counted | None = None) -> Tensors:
        """The agent's state after `round_` rounds, that after the upload that was `counted` last."""
        stored = self.record_for(run, generation, start)
        check_round(run, round_, stored.as_of(round_))
        return self._state(run, stored, round_, counted)[1]

    def _state(self, run: str, stored: StoredAnswer, round_: int, counted: Counted | None) -> tuple[int, Tensors]:
        """The agent's state after the answer that was counted last, and the round of that answer."""
        if counted is not None:
            found = stored.state_after(counted.round)
            if found is not None:
                return counted.round, found
            if counted.required:
                raise UserError(
                    f"the server counted the agent's upload of round {counted.round}, and {self.path(run)} does not "
                    "have the state after it, without which this algorithm cannot go on: restore the file, or train "
                    "again with --restart"
                )
        record = stored.as_of(round_)
        return (record.since, record.before) if round_ == record.round else (record.round, record.after)

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
            never = {"answered_for": generation, "earlier_round": NEVER, "earlier_since": NEVER, "earlier_digest": ""}
            empty: dict[str, Any] = {**never, "earlier_upload": {}, "earlier_before": start, "earlier_after": start}
            return StoredAnswer(self.number, generation, NEVER, NEVER, "", 0, {}, start, start, **empty)
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

    def runs(self) -> list[str]:
        """The ids of the runs that have a file."""
        files = self.folder.glob("run-*.safetensors")
        return sorted(path.name.removeprefix("run-").removesuffix(".safetensors") for path in files)

    def path(self, run: str, what: str = "run") -> Path:
        """The file of a run; its name contains the run's id, which is checked."""
        if not NAME.fullmatch(run):
            raise UserError(f"a run's id has 1 to 100 letters, digits, '.', '_' and '-', got {abbreviated(run)}")
        return self.folder / f"{what}-{run}.safetensors"

    def write(self, path: Path, content: bytes) -> None:
        """Write a file atomically and durably, readable by the agent's user only."""
        try:
            write_atomically(path, content, mode=0o600)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {reason_of(error)}") from error

    def _save(self, run: str, record: StoredAnswer) -> None:
        tensors = {f"{part}.{name}": np.asarray(x) for part in PARTS for name, x in getattr(record, part).items()}
        fields = {name: str(getattr(record, name)) for name in (*TEXTS, *COUNTS)}
        fields |= {"format": str(FORMAT), "content": digest(tensors, *fields.values())}
        self.write(self.path(run), encode(Frame(KIND, fields, tensors)))


def parsed(data: bytes, path: Path) -> StoredAnswer:
    """Parse the content of a run's file."""
    damaged = f"{path} is damaged: restore it, or remove it, after which the agent starts the run anew"
    try:
        frame = decode(data, MOST_BYTES)
        fields = dict(frame.fields)
        known = [fields[name] for name in (*TEXTS, *COUNTS) if name in fields]  # earlier formats have fewer
        whole = frame.kind == KIND and fields.pop("content") == digest(frame.tensors, *known)
        format_ = int(fields["format"])
        counts: dict[str, Any] = {name: int(fields[name]) for name in COUNTS if name in fields}
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
    texts: dict[str, Any] = {name: fields[name] for name in TEXTS}
    return StoredAnswer(**texts, **counts, **parts)


def check_round(run: str, round_: int, record: StoredAnswer) -> None:
    """Reject out-of-range or already answered rounds."""
    if not 0 <= round_ < MOST_ROUNDS:
        raise UserError(f"round must be a whole number from 0 to {MOST_ROUNDS - 1}, got {round_}")
    if round_ < record.round:
        raise UserError(f"round {round_} of {run} is over: the agent has already answered round {record.round}")


def check_releases(run: str, stored: int, noised: int | None) -> None:
    """Reject an upload without noise in a run with noised ones, and a ledger that lacks some of those."""
    if noised is None and stored:
        raise UserError(
            f"the agent has uploaded to {run} with noise, and uploads nothing to it without: start another run, or "
            "keep [privacy] in the plan"
        )
    if noised is not None and noised < stored:
        raise UserError(
            f"the agent's privacy ledger has {noised} uploads to {run}, but {stored} were made: restore the ledger"
        )
