"""Checks of uploads before they are combined: well-formed, of the current round, and not too far from the message."""

import math
import numbers
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_high
from typing import Any, NamedTuple

import numpy as np

from perfedrl.errors import UserError
from perfedrl.federation.frames import BadFrame, decode
from perfedrl.registry import abbreviated

ROOM, ROOM_PER_TENSOR = 2**16, 2**10
"""Bytes of an upload beside its numbers: in all, and for each tensor."""
LONGEST_REASON = 500
ROUNDING = 1e-5
"""Relative rounding error of a length in single precision."""
ABSURD = 100.0
"""Multiple of the longest displacement that is taken whole, beyond which an upload is rejected, not shortened."""
FEWEST, ENOUGH = 3, 10
"""Displacements needed for a median, and from how many on the past alone gives it."""
QUARANTINED = "quarantined"


class Refused(UserError):  # noqa: N818
    """An upload was rejected; the message says why."""


class Failed(Refused):
    """The agent reported an error instead of an upload."""


@dataclass(frozen=True, eq=False)
class Expected:
    """The run, generation and round that an upload must name, and the tensors whose names, shapes and types it has.

    `tensors` is the upload of an agent that learned nothing, by leaf name; `measured` are the names of those whose
    distance from it is limited, None for all. Only distances of one `kind` are compared with each other. With `whole`,
    uploads are not shortened: those that would be are left out, without a strike.
    """

    run: str
    generation: int
    round: int
    tensors: Mapping[str, np.ndarray]
    measured: Collection[str] | None = None
    kind: int = 0
    whole: bool = False

    def measured_part(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors whose distance is limited."""
        return {name: x for name, x in tensors.items() if self.measured is None or name in self.measured}

    @property
    def limit(self) -> int:
        """The largest size of an upload in bytes."""
        return sum(x.nbytes for x in self.tensors.values()) + ROOM + ROOM_PER_TENSOR * len(self.tensors)


@dataclass(frozen=True)
class UploadVerdict:
    """The accepted uploads of a round, the reasons of the rejected ones, and the agents newly in quarantine.

    `clipped` are the accepted uploads that were shortened: how many times too long each of them was.
    """

    accepted: dict[str, dict[str, np.ndarray]]
    refused: dict[str, str]
    quarantined: tuple[str, ...]
    clipped: dict[str, float] = field(default_factory=dict)


def read_upload(data: bytes, expected: Expected) -> dict[str, np.ndarray]:
    """Decode an upload; raise Refused for invalid bytes, and Failed for an error that the agent reports."""
    if len(data) > expected.limit:
        raise Refused(f"expected an upload of at most {expected.limit} bytes, got {len(data)}")
    try:
        frame = decode(data, expected.limit)
    except BadFrame as error:
        raise Refused(f"the upload cannot be read: {error}") from error
    except Exception as error:  # no bytes may stop the server
        raise Refused("the upload cannot be read") from error
    if frame.kind == "error":
        raise Failed(f"the agent failed: {printable(frame.fields.get('message', 'it gave no reason'))}")
    if frame.kind != "upload":
        raise Refused(f"expected a frame of kind 'upload', got {abbreviated(frame.kind)}")
    wanted = {"run": expected.run, "generation": str(expected.generation), "round": str(expected.round)}
    for name, value in wanted.items():
        came = frame.fields.get(name)
        if came is None:
            raise Refused(f"the upload lacks the field {name!r}; expected {abbreviated(value)}")
        if came != value:
            raise Refused(
                f"the upload is replayed or of another {name}: expected {abbreviated(value)}, got {abbreviated(came)}"
            )
    _check_tensors(frame.tensors, expected.tensors)
    return {name: frame.tensors[name] for name in expected.tensors}


def _check_tensors(tensors: Mapping[str, np.ndarray], message: Mapping[str, np.ndarray]) -> None:
    """Check names, shapes and types against the message, and that all values are finite."""
    for name in (*message, *tensors):
        if name not in tensors or name not in message:
            problem = "lacks the" if name in message else "has an unknown"
            raise Refused(f"the upload {problem} tensor {abbreviated(name)}")
    for name, sent in message.items():
        came = tensors[name]
        if (came.dtype, came.shape) != (sent.dtype, sent.shape):
            got, wanted = (f"{x.dtype}{list(x.shape)}" for x in (came, sent))
            raise Refused(f"tensor {abbreviated(name)} of the upload: expected {wanted}, got {got}")
        if not np.isfinite(came).all():
            raise Refused(f"tensor {abbreviated(name)} of the upload is not finite")


def printable(text: str) -> str:
    """Untrusted text as one short printable line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * LONGEST_REASON]).split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."


def displacement(upload: Mapping[str, np.ndarray], message: Mapping[str, np.ndarray]) -> float:
    """Euclidean distance between an upload and the message over all tensors; infinite if float64 overflows."""
    with np.errstate(over="ignore"):
        return length(x.astype(np.float64) - message[name].astype(np.float64) for name, x in sorted(upload.items()))


def length(arrays: Iterable[np.ndarray]) -> float:
    """Euclidean length of all arrays as one vector, scaled so that squares neither overflow nor underflow."""
    wide = [np.asarray(x, np.float64) for x in arrays]
    largest = max((float(np.abs(x).max()) for x in wide if x.size), default=0.0)
    if largest == 0 or not math.isfinite(largest):
        return 0.0 if largest == 0 else math.inf
    return largest * math.sqrt(sum(float(np.sum((x / largest) ** 2)) for x in wide))


def shortened(
    upload: Mapping[str, np.ndarray], message: Mapping[str, np.ndarray], share: float
) -> dict[str, np.ndarray]:
    """Move the message by a share of the upload's displacement, in float64; whole numbers are rounded."""

    def moved(sent: np.ndarray, x: np.ndarray) -> np.ndarray:
        wide = sent.astype(np.float64)
        nearer = wide + share * (x.astype(np.float64) - wide)
        return (np.rint(nearer) if x.dtype.kind in "iub" else nearer).astype(x.dtype)

    return {name: moved(message[name], x) for name, x in upload.items()}


class UploadLimits(NamedTuple):
    """Displacements from which on an upload is shortened, and from which on it is rejected, with the rule for this."""

    clipping: float
    rejection: float
    rule: str


class Gate:
    """Decides round by round which uploads count, how far, and which agents are put in quarantine.

    An upload farther from the message than `factor` times the usual displacement is *clipped*: shortened to that limit
    along its displacement. Honest uploads have a heavy tail where curvature is estimated from few trajectories, so this
    is no offence. An upload is *rejected*, with a strike, if it cannot be honest or is absurd: if it cannot be read, is
    not finite, is beyond the proven `bound` (`upload_bound.hard_bound`), or 100 times beyond the limit for clipping.

    The usual displacement is the median of the last `window` ones of its kind, each as long as it was taken; while
    there are fewer than ten of these, the round's own count as well. With fewer than three there is no median: nothing
    is clipped, and uploads that are absurd compared to the message's length are rejected. Displacements up to `floor`
    always pass and do not enter the median: if most agents found no reward and did not move, those that did are no
    outliers. If more than two thirds of a round are too far, the fleet has changed rather than an agent: then the
    round's own median counts, and the past is dropped.

    The rule assumes that most agents that move are honest. Two colluding agents of three determine the median from the
    start: far uploads of theirs pass, or near ones get the honest agent clipped. Later the past counts against them,
    but within its limits they can still raise the median step by step. Only lengths are checked, not directions, for
    which there are robust aggregations.

    An agent with `strikes` rejections in a row is in quarantine until it is released; its uploads are not read.
    Agents whose upload is clipped, or that report a failure of their own, get no strike and keep those they have.
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
                raise UserError(f"the gate's {name} must be a finite number >= {least}, got {abbreviated(value)}")
        for name, count, least in (("strikes", strikes, 1), ("window", window, ENOUGH)):
            if not isinstance(count, int) or isinstance(count, bool) or count < least:
                raise UserError(f"the gate's {name} must be an integer >= {least}, got {abbreviated(count)}")
        self.bound, self.factor, self.strikes, self.window, self.floor = bound, factor, strikes, window, floor
        self._lengths: dict[int, deque[float]] = {}
        self._counts: dict[str, int] = {}
        self._quarantined: set[str] = set()

    def judge(self, expected: Expected, uploads: Mapping[str, bytes]) -> UploadVerdict:
        """Check a round's uploads, given by agent name."""
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
        start, clipped = expected.measured_part(expected.tensors), {}
        lengths = {name: displacement(expected.measured_part(x), start) for name, x in read.items()}
        past = self._lengths.setdefault(expected.kind, deque(maxlen=self.window))
        limits = self._limits(list(lengths.values()), past, start)
        for name, far in lengths.items():
            if far > limits.rejection or math.isinf(far):
                refused[name] = (
                    f"the upload is {far:.3g} from the message; the limit is {limits.rejection:.3g}, {limits.rule}"
                )
                blamed.append(name)
                del read[name]
            elif far > limits.clipping and expected.whole:
                refused[name] = (
                    f"the upload is {far:.3g} from the message, and cannot be shortened to {limits.clipping:.3g}: "
                    "raise --factor to take it"
                )
                del read[name]
            elif far > limits.clipping:
                clipped[name] = far / limits.clipping
                read[name] |= shortened(expected.measured_part(read[name]), start, limits.clipping / far)
        past.extend(min(lengths[name], limits.clipping) for name in read if lengths[name] > self.floor)
        out = self._count_strikes(read.keys() - clipped.keys(), blamed)
        return UploadVerdict(read, dict(sorted(refused.items())), out, clipped)

    def _limits(self, lengths: list[float], past: deque[float], message: Mapping[str, np.ndarray]) -> UploadLimits:
        """The displacements from which on this round's uploads are shortened and rejected."""
        size = length(message.values())
        # Parameters are rounded at every step, by at most a share of their own size.
        hard = math.inf if self.bound is None else self.bound + ROUNDING * size
        usual = self._usual(lengths, past)
        if usual is None:
            clipping, absurd = math.inf, ABSURD * self.factor * (1 + size)
            rule = "relative to the message's own length"
        else:
            clipping = self.factor * usual
            absurd, rule = ABSURD * clipping, f"{ABSURD * self.factor:g} times the median"
        if hard <= absurd:
            return UploadLimits(clipping, max(hard, self.floor), "the proven bound")
        return UploadLimits(clipping, absurd, rule)

    def _usual(self, lengths: list[float], past: deque[float]) -> float | None:
        """The median displacement of the past, with the round's own while the past is short.

        None with too few displacements.
        """
        moved = [x for x in lengths if self.floor < x < math.inf]
        known = [*past, *(moved if len(past) < ENOUGH else ())]
        if len(known) < FEWEST:
            return None
        usual = median_high(known)
        too_far = sum(x > self.factor * usual for x in moved)
        if too_far >= FEWEST and 3 * too_far > 2 * len(lengths):
            past.clear()
            usual = median_high(moved)
        return usual

    def _count_strikes(self, whole: Iterable[str], blamed: Iterable[str]) -> tuple[str, ...]:
        """Update the strikes, given the agents whose uploads were taken whole; return those newly in quarantine."""
        for name in whole:
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
        """The agents in quarantine."""
        return tuple(sorted(self._quarantined))

    def release(self, name: str) -> None:
        """Release an agent from quarantine, with no strikes."""
        if name not in self._quarantined:
            raise UserError(f"{abbreviated(name)} is not in quarantine")
        self._quarantined.remove(name)

    def snapshot(self) -> dict[str, Any]:
        """The settings and the record of past rounds, as JSON values."""
        settings = {"bound": self.bound, "factor": self.factor, "strikes": self.strikes}
        settings |= {"window": self.window, "floor": self.floor}
        lengths = [list(self._lengths.get(kind, ())) for kind in range(max(self._lengths, default=0) + 1)]
        past = {"lengths": lengths, "counts": dict(sorted(self._counts.items()))}
        return {**settings, **past, "quarantined": list(self.quarantined)}

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> "Gate":
        """The gate of a snapshot, which continues exactly as the original would."""
        settings = dict(snapshot)
        try:
            lengths, counts, out = (settings.pop(key) for key in ("lengths", "counts", "quarantined"))
            gate = cls(**settings)
            for kind, known in enumerate(lengths):
                valid = (float(x) for x in known if gate.floor < x < math.inf)
                gate._lengths[kind] = deque(valid, gate.window)
            gate._counts.update({str(name): int(count) for name, count in counts.items()})
            gate._quarantined.update(map(str, out))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"invalid snapshot of a gate: {error}") from error
        return gate


def _number(x: Any) -> bool:
    """Whether x is a real number; True and False are not."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)
