"""What an agent's daemon answers: a frame in, a frame out, one piece of work at a time."""

import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from perfedrl import privacy
from perfedrl.errors import UserError
from perfedrl.experiments.files import named_leaves
from perfedrl.federation.agent.answer_store import Memory, digest
from perfedrl.federation.agent.config import AgentConfig
from perfedrl.federation.agent.worker import Measured, Tensors, Work, Worker, unnamed
from perfedrl.federation.frames import Frame, encode

LONGEST_MESSAGE = 1000


class Agent:
    """A worker and its memory, asked by frames. Work is done one piece at a time; health is answered meanwhile."""

    def __init__(self, config: AgentConfig, number: int, folder: Path):
        self.worker, self.memory = Worker(config, number), Memory(folder, number)
        self._lock = threading.Lock()
        self._at = {"run": "", "round": ""}
        self._known: Mapping[str, Callable[[Frame], Frame]] = {
            "prepare": self._prepare,
            "update": self._update,
            "evaluate": self._evaluate,
            "personalize": self._personalize,
        }

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    def answer(self, frame: Frame) -> Frame:
        """The answer to a frame; what goes wrong is one too, and never more than a sentence."""
        try:
            if frame.kind == "health":
                return self._health()
            if frame.kind not in self._known:
                raise UserError(f"an agent knows health, {', '.join(self._known)}; it was asked {frame.kind[:40]!r}")
            with self._working(frame):
                return self._known[frame.kind](frame)
        except UserError as error:
            return failure(str(error))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            return failure(f"the agent failed over {frame.kind[:40]!r}: {type(error).__name__}, see its log")

    @contextmanager
    def _working(self, frame: Frame):
        with self._lock:
            self._at = {name: frame.fields.get(name, "")[:100] for name in self._at}
            yield

    def _health(self) -> Frame:
        fields = {"name": f"agent-{self.worker.number}", "pid": str(os.getpid()), "version": version("perfedrl")}
        fields |= {**self._at, "busy": "yes" if self.busy else "no", "rss": str(resident())}
        return Frame("health", fields | {"env": self.worker.config.env})

    def _prepare(self, frame: Frame) -> Frame:
        run, generation, begun = text(frame, "run"), count(frame, "generation"), time.monotonic()
        work, _ = self._work(frame)
        self.memory.join(run, generation, named_leaves(work.state))
        work.prepare()
        seconds = f"{time.monotonic() - begun:.6f}"
        about = {"seconds": seconds, "trajectories": str(work.trajectories)}
        return Frame("prepared", {"run": run, "generation": str(generation), **about})

    def _update(self, frame: Frame) -> Frame:
        run, generation, round_ = text(frame, "run"), count(frame, "generation"), count(frame, "round")
        begun = time.monotonic()
        work, message = self._work(frame)

        def compute(tensors: Tensors) -> tuple[Tensors, Tensors]:
            state = unnamed(work.state, tensors, f"the state that is kept of {run}")
            upload, after = work.update(message, state, round_)
            return named_leaves(upload), named_leaves(after)

        identity = digest(frame.tensors, text(frame, "plan"))
        private = work.private is not None
        answer = self.memory.answer(run, generation, round_, identity, named_leaves(work.state), compute, private)
        spent = work.trajectories if answer.fresh else 0
        about = {"seconds": f"{time.monotonic() - begun:.6f}", "trajectories": str(spent)}
        asked = {"run": run, "generation": str(generation), "round": str(round_)}
        return Frame("upload", {**asked, **about, **protection(work, answer.releases)}, answer.upload)

    def _evaluate(self, frame: Frame) -> Frame:
        run, generation, round_ = text(frame, "run"), count(frame, "generation"), count(frame, "round")
        if not self.worker.config.tell_outcomes:
            raise UserError("this agent does not tell what its parameters are worth to it")
        work, message = self._work(frame)
        state = self._state(work, run, self.memory.state(run, generation, round_, named_leaves(work.state)))
        measured = work.evaluate(message, state, round_)
        return Frame("outcomes", {"run": run, "generation": str(generation), "round": str(round_)}, scalars(measured))

    def _personalize(self, frame: Frame) -> Frame:
        run, m, draw = text(frame, "run"), count(frame, "m"), count(frame, "draw", "0")
        path = self.memory.path(run, "personal")
        work, message = self._work(frame)
        known = self.memory.known(run)
        if known is not None and "generation" in frame.fields:
            self.memory.at(run, count(frame, "generation"), {})
        state = work.state if known is None else self._state(work, run, known.after)
        own, measured = work.personalize(message, state, m, draw)
        about = {"run": run, "m": str(m), "draw": str(draw), "number": str(self.worker.number)}
        self.memory.write(path, encode(Frame("personal", about, named_leaves(own))))
        tensors = scalars(measured) if self.worker.config.tell_outcomes else {}
        if frame.fields.get("parameters") == "yes":
            tensors |= {f"parameters.{name}": x for name, x in named_leaves(own).items()}
        return Frame("personalized", about, tensors)

    def _work(self, frame: Frame) -> tuple[Work, Any]:
        """What the plan asks for, and the message, which must fit it."""
        work = self.worker.work(text(frame, "plan"))
        return work, unnamed(work.message, dict(frame.tensors), "the message")

    def _state(self, work: Work, run: str, tensors: Tensors) -> Any:
        return unnamed(work.state, tensors, f"the state that is kept of {run}")


def failure(message: str) -> Frame:
    """An answer that says what is wrong, in one line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
    return Frame("error", {"message": line[:LONGEST_MESSAGE]})


def text(frame: Frame, name: str) -> str:
    """A field that a question must have."""
    if name not in frame.fields:
        raise UserError(f"a question of the kind {frame.kind!r} needs the field {name!r}")
    return frame.fields[name]


def count(frame: Frame, name: str, default: str | None = None) -> int:
    """A field that must be a whole number."""
    value = text(frame, name) if default is None else frame.fields.get(name, default)
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise UserError(f"{name} must be a whole number; it is {value[:40]!r}")
    return int(value)


def scalars(measured: Measured) -> Tensors:
    """Outcomes by name, "before.return", say."""
    both = measured._asdict().items()
    return {f"{when}.{name}": np.asarray(x, np.float64) for when, named in both for name, x in named.items()}


def protection(work: Work, releases: int) -> dict[str, str]:
    """What a private plan's uploads have revealed so far; without the accounting library, their number alone."""
    table = work.config.privacy
    if work.private is None or table is None:
        return {}
    fields = {"privacy_releases": str(releases)}
    with suppress(UserError):
        fields["epsilon"] = repr(privacy.loss(table.noise, releases, table.delta))
    return fields


def resident() -> int:
    """Bytes of memory that this process holds; where the system does not say, the most it ever held."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
