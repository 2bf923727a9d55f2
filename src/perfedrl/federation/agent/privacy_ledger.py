"""An agent's privacy ledger: the noise of every upload of its lifetime, over all runs, and their privacy loss.

An upload is in the ledger, on disk, before it is stored or sent: after a crash in between, the ledger counts one upload
too many, never one too few.
"""

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from perfedrl import privacy
from perfedrl.errors import UserError
from perfedrl.federation.agent.answer_store import NEVER, AnswerStore
from perfedrl.federation.agent.config import PrivacyDemands
from perfedrl.federation.frames import digest
from perfedrl.federation.private_sockets import reason_of

FILE, FORMAT = "privacy-ledger.json", 1


@dataclass(frozen=True)
class LedgerEntry:
    """The number of uploads to one run with one clip and one noise, in units of the clip.

    Without noise the clip may be None, and only the first upload to the run is counted: no further one costs more.
    """

    run: str
    clip: float | None
    noise: float
    uploads: int


class PrivacyLedger:
    """The ledger in the folder of an agent's answers, and the budget that the agent's demands set."""

    def __init__(self, store: AnswerStore, demands: PrivacyDemands | None = None):
        self._store, self._demands, self.path = store, demands, store.folder / FILE
        self.entries()  # fails if the file is damaged or lost
        if demands is not None:
            self.loss(demands.delta)  # fails if the library for it is missing

    def entries(self) -> tuple[LedgerEntry, ...]:
        """Read all entries; a damaged or lost file is an error, since what it counted is not known any more."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            self._check_that_nothing_was_uploaded()
            return ()
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {reason_of(error)}") from error
        try:
            file = json.loads(data)
            content = file["content"]
            number, entries = content["number"], tuple(LedgerEntry(**entry) for entry in content["entries"])
            if file["digest"] != digest({}, canonical(content)):
                raise ValueError("the digest differs")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(
                f"{self.path} is damaged, so that it is not known what this agent has uploaded: restore it from a "
                "backup; the agent answers nothing without it"
            ) from error
        if content["format"] != FORMAT:
            raise UserError(f"{self.path} was written by another version of perfedrl (format {content['format']})")
        if number != self._store.number:
            raise UserError(f"{self.path} belongs to agent number {number}; this is agent number {self._store.number}")
        return entries

    def noised(self, run: str | None = None) -> int:
        """The number of noised uploads, to one run or to all."""
        return sum(x.uploads for x in self.entries() if x.noise > 0 and run in (None, x.run))

    def loss(self, delta: float) -> float:
        """The epsilon of all uploads so far, at this delta; infinite if one of them had no noise."""
        return privacy.loss_of_cost(total_cost(self.entries()), delta)

    def check_budget(self, noise: float) -> None:
        """Reject an upload with this noise if all uploads together would exceed the agent's budget."""
        if self._demands is None:
            return
        limit, delta, entries = self._demands.epsilon, self._demands.delta, self.entries()
        then = privacy.loss_of_cost(total_cost(entries) + privacy.concentrated_cost(noise), delta)
        if then > limit:
            raise UserError(
                f"this agent's privacy budget is spent: with this upload epsilon would be {then:.4g} at delta "
                f"{delta:g}, its limit is {limit:g}, and its uploads so far, {self.noised()} with noise, have spent "
                f"{self.loss(delta):.4g}"
            )

    def record(self, run: str, clip: float | None, noise: float) -> None:
        """Write that an upload is about to be made; it is on disk when this returns."""
        entries = list(self.entries())
        same = [i for i, x in enumerate(entries) if (x.run, x.clip, x.noise) == (run, clip, noise)]
        if same and noise == 0:
            return
        if same:
            entries[same[0]] = replace(entries[same[0]], uploads=entries[same[0]].uploads + 1)
        else:
            entries.append(LedgerEntry(run, clip, noise, 1))
        about = {"format": FORMAT, "number": self._store.number}
        content = {**about, "entries": [asdict(entry) for entry in entries]}
        file = {"content": content, "digest": digest({}, canonical(content))}
        self._store.write(self.path, json.dumps(file, indent=1).encode())

    def told(self, delta: float | None = None) -> str:
        """The privacy loss so far in a few words, at the agent's delta or else at the given one.

        Empty if nothing is to be told, or nothing can be computed.
        """
        if self._demands is not None:
            limit, delta = self._demands.epsilon, self._demands.delta
            return f"epsilon {self.loss(delta):.4g} of {limit:g} at delta {delta:g} over the agent's lifetime"
        if delta is not None:
            with suppress(UserError):  # the library is missing
                return f"epsilon {self.loss(delta):.4g} at delta {delta:g} over the agent's lifetime"
        return ""

    def _check_that_nothing_was_uploaded(self) -> None:
        """Reject a missing ledger if the agent has uploaded with noise, or has uploaded at all and demands privacy."""
        for run in self._store.runs():
            try:
                stored = self._store.stored(run)
            except UserError:
                if self._demands is None:  # no budget depends on this run, and its next question gets the error
                    continue
                raise
            if stored is None or stored.round == NEVER:
                continue
            if stored.releases or self._demands is not None:
                raise UserError(
                    f"there is no {self.path}, but the agent has uploaded to {run}: restore the ledger from a backup, "
                    "or remove the agent's folder to start another agent"
                )


def total_cost(entries: tuple[LedgerEntry, ...]) -> float:
    """The concentrated cost of all uploads."""
    return math.fsum(x.uploads * privacy.concentrated_cost(x.noise) for x in entries)


def canonical(content: dict) -> str:
    """The same text for the same content."""
    return json.dumps(content, sort_keys=True)
