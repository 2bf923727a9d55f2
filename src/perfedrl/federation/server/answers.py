"""Asking agents: what came back of one question, and what of it is taken."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from perfedrl.federation.frames import BadFrame, decode
from perfedrl.federation.server.upload_checks import printable


@dataclass
class Answers:
    """What came back of one question: the frames, unread, and the reasons of those who failed; both by agent."""

    asked: tuple[str, ...]
    frames: dict[str, bytes] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    late: tuple[str, ...] = ()
    """Who answered an earlier question after it was closed."""

    @property
    def silent(self) -> set[str]:
        return set(self.asked) - set(self.frames) - set(self.failures)


class Ask(Protocol):
    """Sends a frame to some agents and waits until there are enough answers, or all, or the deadline (seconds)."""

    def __call__(
        self, kind: str, frame: bytes, without: set[str], enough: Callable[[Answers], bool], deadline: float
    ) -> Answers: ...


Taken = Callable[[Answers], tuple[dict[str, Any], dict[str, str]]]
"""What is taken of some answers, and why the rest is not; both by agent."""


def of_kind(answers: Answers, kind: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The answers of one kind, and why the others are none."""
    accepted: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, data in answers.frames.items():
        try:
            frame = decode(data)
        except BadFrame as error:
            refused[name] = str(error)
            continue
        if frame.kind == kind:
            accepted[name] = frame
        else:
            refused[name] = printable(frame.fields.get("message", f"the answer is {frame.kind!r}, not {kind!r}"))
    return accepted, refused
