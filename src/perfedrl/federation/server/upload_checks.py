"""What a server checks before it averages anything: that an upload is one, of this round, and not too far away."""

import math
import numbers
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_high
from typing import Any

import numpy as np

from perfedrl.errors import UserError
from perfedrl.federation.frames import BadFrame, decode
from perfedrl.registry import abbreviated

ROOM, ROOM_PER_TENSOR = 2**16, 2**10
"""Bytes of an upload beside its numbers."""
LONGEST_REASON = 200
ROUNDING = 1e-5
"""What single precision may add to a length."""
LOOSE = 100.0
"""Times `factor`: how far from the usual even what a bound allows may be."""
FEWEST, ENOUGH = 3, 10
"""Displacements without which nothing is usual, and with which the past alone says what is."""
QUARANTINED = "quarantined"


class Refused(UserError):  # noqa: N818
    """Why an upload is not taken."""


class Failed(Refused):
    """What the agent itself said went wrong; there is no upload."""


@dataclass(frozen=True, eq=False)
class Expected:
    """What an upload must be like: of this run, generation and round, with the names, shapes and types of the message.

    `tensors` is the message that was broadcast, by leaf name.
    """

    run: str
    generation: int
    round: int
    tensors: Mapping[str, np.ndarray]

    @property
    def limit(self) -> int:
        """The most bytes that an upload may have."""
        return sum(x.nbytes for x in self.tensors.values()) + ROOM + ROOM_PER_TENSOR * len(self.tensors)


@dataclass(frozen=True)
class Verdict:
    """One round's uploads: what counts, why the rest does not, and who is in quarantine from now on."""

    accepted: dict[str, dict[str, np.ndarray]]
    refused: dict[str, str]
    quarantined: tuple[str, ...]


def read_upload(data: bytes, expected: Expected) -> dict[str, np.ndarray]:
    """The tensors of an upload; whatever is wrong with the bytes is Refused, and Failed where the agent says so."""
    if len(data) > expected.limit:
        raise Refused(f"the upload has {len(data)} bytes; at most {expected.limit} are taken")
    try:
        frame = decode(data, expected.limit)
    except BadFrame as error:
        raise Refused(f"the upload cannot be read: {error}") from error
    except Exception as error:  # no bytes may stop the server
        raise Refused("the upload cannot be read") from error
    if frame.kind == "error":
        raise Failed(f"the agent failed: {printable(frame.fields.get('message', 'it gave no reason'))}")
    if frame.kind != "upload":
        raise Refused(f"an upload was expected, not a frame of the kind {abbreviated(frame.kind)}")
    wanted = {"run": expected.run, "generation": str(expected.generation), "round": str(expected.round)}
    for name, value in wanted.items():
        came = frame.fields.get(name)
        if came != value:
            said = (
                "does not say its" if came is None else f"is replayed or of another {name}: {abbreviated(came)} is its"
            )
            raise Refused(f"the upload {said} {name}; {abbreviated(value)} is expected")
    _check_like(frame.tensors, expected.tensors)
    return {name: frame.tensors[name] for name in expected.tensors}


def _check_like(tensors: Mapping[str, np.ndarray], message: Mapping[str, np.ndarray]) -> None:
    """Refuse other names, shapes and types than the message's, and numbers that are none."""
    for name in (*message, *tensors):
        if name not in tensors or name not in message:
            raise Refused(
                f"the upload {'lacks the' if name in message else 'has an unknown'} tensor {abbreviated(name)}"
            )
    for name, sent in message.items():
        came = tensors[name]
        if (came.dtype, came.shape) != (sent.dtype, sent.shape):
            was, must = (f"{x.dtype}{list(x.shape)}" for x in (came, sent))
            raise Refused(f"the upload's tensor {abbreviated(name)} is {was}; it must be {must}")
        if not np.isfinite(came).all():
            raise Refused(f"the upload's tensor {abbreviated(name)} is not finite")


def printable(text: str) -> str:
    """A stranger's text as one short line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * LONGEST_REASON]).split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."


def displacement(upload: Mapping[str, np.ndarray], message: Mapping[str, np.ndarray]) -> float:
    """How far an upload is from the message, over all tensors; infinitely far where float64 cannot hold it."""
    with np.errstate(over="ignore"):
        return length(x.astype(np.float64) - message[name].astype(np.float64) for name, x in sorted(upload.items()))


def length(arrays: Iterable[np.ndarray]) -> float:
    """The Euclidean length of arrays together, scaled so that no square overflows or vanishes."""
    kept = [np.asarray(x, np.float64) for x in arrays]
    largest = max((float(np.abs(x).max()) for x in kept if x.size), default=0.0)
    if largest == 0 or not math.isfinite(largest):
        return 0.0 if largest == 0 else math.inf
    return largest * math.sqrt(sum(float(np.sum((x / largest) ** 2)) for x in kept))


class Gate:
    """Judges the uploads of round after round: which count, and which agents are no longer heard.

    With a `bound` (`bound.hard_bound`) an upload that is farther from the message is refused; no honest one ever is.
    A bound by constants may be a million times what agents do, so the rule below holds as well, with a hundred times
    the factor, which stops the absurd.

    Without one, an upload is refused if it is farther than `factor` times the usual: the median of the last `window`
    accepted displacements, or, while these are few, of them and the round's own; with fewer than three nothing is
    usual, and only what is absurd beside the message's own length is refused. A curvature estimate from few
    trajectories has a long tail: allow it a larger factor. Displacements up to `floor` always pass and make nothing
    usual: where most agents found no reward and did not move, those who did are no outliers. If more than two thirds of
    a round are too far, the fleet has changed, not an agent: then the round itself says what is usual, and the past is
    forgotten.

    This presumes that most agents that move are honest. Two of three that collude from the start say what is usual:
    far ones then pass, and near ones get the honest one refused. Later the past speaks against them, though within its
    limits they can still raise the usual step by step. Only lengths are judged here, no directions: for these there are
    robust aggregations.

    An agent that is refused `strikes` times in a row is in quarantine until it is released: nothing from it is read.
    An agent that says that it failed is neither blamed nor forgiven.
    """

    def __init__(
        self, bound: float | None, factor: float = 10.0, strikes: int = 3, window: int = 200, floor: float = 1e-6
    ):
        for name, value, least in (
            ("bound", 0 if bound is None else bound, 0),
            ("factor", factor, 1),
            ("floor", floor, 0),
        ):
            if not (_number(value) and least <= value < math.inf):
                raise UserError(f"the gate's {name} must be a finite number >= {least}; it is {abbreviated(value)}")
        for name, count, least in (("strikes", strikes, 1), ("window", window, ENOUGH)):
            if not isinstance(count, int) or isinstance(count, bool) or count < least:
                raise UserError(f"the gate's {name} must be a whole number >= {least}; it is {abbreviated(count)}")
        self.bound, self.factor, self.strikes, self.window, self.floor = bound, factor, strikes, window, floor
        self._lengths: deque[float] = deque(maxlen=window)
        self._counts: dict[str, int] = {}
        self._quarantined: set[str] = set()

    def judge(self, expected: Expected, uploads: Mapping[str, bytes]) -> Verdict:
        """The verdict on a round's uploads by agent name; agents that did not answer are not in it."""
        read, refused, blamed = {}, {}, []
        for name in sorted(uploads):
            if name in self._quarantined:
                refused[name] = QUARANTINED
                continue
            try:
                read[name] = read_upload(uploads[name], expected)
            except Refused as error:
                refused[name] = str(error)
                if not isinstance(error, Failed):
                    blamed.append(name)
        lengths = {name: displacement(x, expected.tensors) for name, x in read.items()}
        farthest, why = self._farthest(list(lengths.values()), expected.tensors)
        for name, far in lengths.items():
            if far > max(farthest, self.floor) or math.isinf(far):
                refused[name] = f"the upload is {far:.3g} from the message; at most {farthest:.3g} is {why}"
                blamed.append(name)
                del read[name]
        self._lengths.extend(lengths[name] for name in read if lengths[name] > self.floor)
        return Verdict(read, dict(sorted(refused.items())), self._blame(read, blamed))

    def _farthest(self, lengths: list[float], message: Mapping[str, np.ndarray]) -> tuple[float, str]:
        """The largest displacement that is accepted, and what it is."""
        factor = self.factor if self.bound is None else LOOSE * self.factor
        size = length(message.values())
        usual = self._usual(lengths, factor)
        why = f"usual, {factor:g} times the median"
        if usual is None:
            usual, why = LOOSE * self.factor * (1 + size), "thinkable beside the message's own length"
        # Parameters are rounded at every step, by no more than a share of their own size.
        hard = math.inf if self.bound is None else self.bound + ROUNDING * size
        return (hard, "possible") if hard <= usual else (usual, why)

    def _usual(self, lengths: list[float], factor: float) -> float | None:
        """So many times the median, of the past or, while that is short, of the round with it; None of too few."""
        moved = [x for x in lengths if self.floor < x < math.inf]
        known = [*self._lengths, *(moved if len(self._lengths) < ENOUGH else ())]
        if len(known) < FEWEST:
            return None
        farthest = factor * median_high(known)
        beyond = sum(x > farthest for x in moved)
        if beyond >= FEWEST and 3 * beyond > 2 * len(lengths):
            self._lengths.clear()
            farthest = factor * median_high(moved)
        return farthest

    def _blame(self, accepted: Iterable[str], blamed: Iterable[str]) -> tuple[str, ...]:
        """Count strikes; the agents that have too many now."""
        for name in accepted:
            self._counts.pop(name, None)
        for name in blamed:
            self._counts[name] = self._counts.get(name, 0) + 1
        out = tuple(sorted(name for name, count in self._counts.items() if count >= self.strikes))
        for name in out:
            del self._counts[name]
        self._quarantined.update(out)
        return out

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Who is not heard."""
        return tuple(sorted(self._quarantined))

    def release(self, name: str) -> None:
        """Hear an agent again, as if it had never been refused."""
        if name not in self._quarantined:
            raise UserError(f"{abbreviated(name)} is not in quarantine")
        self._quarantined.remove(name)

    def memory(self) -> dict[str, Any]:
        """Settings and all that is remembered, for JSON."""
        settings = {name: getattr(self, name) for name in ("bound", "factor", "strikes", "window", "floor")}
        past = {"lengths": list(self._lengths), "counts": dict(sorted(self._counts.items()))}
        return {**settings, **past, "quarantined": list(self.quarantined)}

    @classmethod
    def recall(cls, memory: Mapping[str, Any]) -> "Gate":
        """The gate that a memory is of: it judges as that one would have."""
        settings = dict(memory)
        try:
            lengths, counts, out = (settings.pop(key) for key in ("lengths", "counts", "quarantined"))
            gate = cls(**settings)
            gate._lengths.extend(float(x) for x in lengths if gate.floor < x < math.inf)
            gate._counts.update({str(name): int(count) for name, count in counts.items()})
            gate._quarantined.update(map(str, out))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"this is no gate's memory: {error}") from error
        return gate


def _number(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)
