"""The commands of a run's state machine, which the coordinator carries out: questions to agents, and what is kept."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.asynchronous_rounds import uploads_by_round


@dataclass(frozen=True)
class Question:
    """Ask all agents but `without`. `needed` answers close it once everybody in `waited_for` has answered or failed.

    Answers of agents in `uncounted`, which do not train, are not among the `needed` ones. With `received`, the last
    rounds that were received of each agent, late uploads of other rounds are.
    """

    kind: str
    round: int
    frame: bytes
    without: frozenset[str]
    waited_for: frozenset[str]
    needed: int
    uncounted: frozenset[str] = frozenset()
    received: Mapping[str, int] | None = None

    def enough(self, answers: Answers) -> bool:
        """Whether the question can be closed before its deadline."""
        answered = set(answers.frames) | set(answers.failures)
        counted = set(answers.frames) - self.uncounted
        if self.received is not None and len(counted) < self.needed:
            late = uploads_by_round(answers.late_uploads, self.received, self.round)
            counted |= {name for uploads in late.values() for name in uploads}
        return len(counted) >= self.needed and self.waited_for & set(answers.asked) <= answered


@dataclass(frozen=True)
class Log:
    """Append an event to the run's log."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Save:
    """Write a checkpoint of the new state."""


@dataclass(frozen=True)
class Announce:
    """Report the new state to the observers."""


@dataclass(frozen=True)
class Pause:
    """Wait a moment before the next question, which repeats the last one."""


@dataclass(frozen=True)
class HandOver:
    """End the job after the last round: the next job takes in newcomers, and everybody personalizes."""


@dataclass(frozen=True)
class Finish:
    """Save the finished run."""


@dataclass(frozen=True)
class Fail:
    """End the job with an error."""

    reason: str


Command = Question | Log | Save | Announce | Pause | HandOver | Finish | Fail
