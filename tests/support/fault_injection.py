"""Faults on purpose, each of which can be repeated: system calls that fail, kills, broken connections, a wrong clock.

A `FaultPlan` says which of the system calls below a folder fails, and how; `drawn` draws one from a seed. Its text is
all that is needed to run it again: `FaultPlan({3: "ENOSPC"})`. `FlakyProxy` stands between a daemon and those who ask
it, and delays, cuts or resets their connections; `wrong_clock` moves the time of day.
"""

import errno
import itertools
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from system_calls import SystemCall, intercepted

ERRORS = ("EIO", "ENOSPC", "EINTR")
KINDS = (*ERRORS, "late EIO", "short", "torn", "kill")
"""How a call fails.

A name of an error: before anything is done; "late EIO": after it is done; "short": a write takes half of the bytes,
which is no error; "torn": it takes half and fails; "kill": the process ends, and nothing that follows is done.
"""


class Killed(BaseException):
    """The process has ended."""


@dataclass
class FaultPlan:
    """Which calls fail, by their number, counted from 0; `at` kills at a named point, such as "rename f", instead.

    `calls` lists the calls so far, and `struck` those that failed.
    """

    faults: Mapping[int, str] = field(default_factory=dict)
    at: str = ""
    calls: list[SystemCall] = field(default_factory=list, repr=False)
    struck: list[str] = field(default_factory=list, repr=False)
    dead: bool = field(default=False, repr=False)

    @contextmanager
    def below(self, folder: Path) -> Iterator["FaultPlan"]:
        """Let calls below a folder fail."""
        with intercepted(folder, self.perform):
            yield self

    def perform(self, call: SystemCall, carry_out: Callable[..., Any]) -> Any:
        """Carry out a call, or fail it."""
        if self.dead:
            raise Killed
        how = self.faults.get(len(self.calls), "kill" if self.at and point(call) == self.at else "")
        self.calls.append(call)
        if not how or (how in ("short", "torn") and len(call.data) < 2):
            return carry_out()
        self.struck.append(f"{how} at {point(call)}")
        if how == "kill":
            self.dead = True
            raise Killed
        if how in ("short", "torn"):
            done = carry_out(call.data[: len(call.data) // 2])
            if how == "short":
                return done
        if how == "late EIO":
            carry_out()
        number = vars(errno).get(how, errno.EIO)
        named = () if call.kind in ("write", "sync", "close") else (call.path,)  # as the system does
        raise OSError(number, os.strerror(number), *named)


def drawn(seed: int, calls: int, rate: float, kinds: tuple[str, ...] = KINDS) -> FaultPlan:
    """A plan in which each of a number of calls fails with a probability, drawn from a seed."""
    rng = random.Random(seed)
    return FaultPlan({n: rng.choice(kinds) for n in range(calls) if rng.random() < rate})


def point(call: SystemCall) -> str:
    """The name of a point in a program: the kind of a call, and the name of the file without the random part."""
    name = os.path.basename(call.target or call.path)
    return f"{call.kind} {name.rpartition('.')[0] if name.startswith('.') else name}"


@contextmanager
def wrong_clock(offsets: tuple[float, ...]) -> Iterator[None]:
    """Let the time of day be off by each of some offsets in turn; the time since the start of the machine stays."""
    real, turns = time.time, itertools.cycle(offsets)

    def now() -> float:
        return real() + next(turns)

    with mock.patch.object(time, "time", now):
        yield


class FlakyProxy:
    """Listens on a socket of its own and passes bytes on to another one, as long as its plan lets it.

    `broken` maps the number of a connection to how it breaks: ("reset", direction, n) after n bytes in one direction
    ("to" the daemon or "from" it), ("partition", ...) likewise, without a word until `heal`, or ("delay", ...), after
    which it goes on at `heal`.
    """

    def __init__(self, path: Path, target: Path, broken: Mapping[int, tuple[str, str, int]]):
        self.path, self.target, self.broken = path, target, dict(broken)
        self.connections = 0
        self._healed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(8)
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        """End all delays and partitions: what was delayed is passed on, and what was cut off is closed."""
        self._healed.set()

    def close(self) -> None:
        """Accept no more connections."""
        self.heal()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                number, self.connections = self.connections, self.connections + 1
                daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                daemon.connect(str(self.target))
                for way, source, sink in (("to", client, daemon), ("from", daemon, client)):
                    how, direction, count = self.broken.get(number, ("", way, 0))
                    mine = (how, count) if direction == way else ("", 0)
                    threading.Thread(target=self._pass_on, args=(source, sink, *mine), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, how: str, count: int) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(count - passed if how and count > passed else 65536):
                if how and passed >= count and not self._survives(how, source, sink):
                    return
                sink.sendall(data)
                passed += len(data)
            sink.shutdown(socket.SHUT_WR)

    def _survives(self, how: str, source: socket.socket, sink: socket.socket) -> bool:
        if how == "reset":
            for end in (source, sink):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
                end.close()
            return False
        self._healed.wait()
        return how == "delay"
