"""An agent's daemon: a Unix socket that only its user can reach, and one thread per question."""

import fcntl
import os
import selectors
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from perfedrl.errors import UserError
from perfedrl.federation.agent.answer_store import said
from perfedrl.federation.agent.config import AgentConfig
from perfedrl.federation.agent.requests import Agent, failure
from perfedrl.federation.frames import LIMIT, BadFrame, receive, send

MOST_CONNECTIONS = 16
"""Questions at a time; most of them wait."""
PATIENCE = 60.0
"""Seconds in which a question must have come, and an answer must have been taken."""
LONGEST_PATH = 100
"""Of a socket, in bytes; systems take little more."""


class Daemon:
    """Answers on a socket until it is stopped."""

    def __init__(self, agent: Agent, listener: socket.socket, limit: int = LIMIT):
        self._agent, self._listener, self._limit = agent, listener, limit
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._woken, self._waker = socket.socketpair()

    def run(self) -> None:
        """Answer questions until `stop`."""
        with selectors.DefaultSelector() as selector, self._woken, self._waker:
            for source in (self._listener, self._woken):
                selector.register(source, selectors.EVENT_READ)
            while all(key.fileobj is not self._woken for key, _ in selector.select()):
                self._accept()

    def stop(self) -> None:
        """End `run`, from any thread or a signal."""
        with suppress(OSError):
            self._waker.send(b"x")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # whoever knocked is gone, or there are too many open files: they will be fewer
            time.sleep(0.05)
            return
        if not self._free.acquire(blocking=False):
            with connection, suppress(OSError):
                connection.settimeout(1.0)
                send(connection, failure(f"the agent has {MOST_CONNECTIONS} questions already; ask again later"))
            return
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One question and its answer; a stream that ends or stalls is nobody's loss."""
        try:
            with connection, suppress(OSError):
                try:
                    reply = self._agent.answer(receive(connection, self._limit, time.monotonic() + PATIENCE))
                except BadFrame as error:
                    reply = failure(str(error))
                connection.settimeout(PATIENCE)
                send(connection, reply)
        finally:
            self._free.release()


def serve(
    config: AgentConfig,
    number: int,
    socket_path: str | Path,
    folder: str | Path,
    limit: int = LIMIT,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Run an agent until a SIGTERM or Ctrl-C; `ready` is called when it listens. For a process's main thread.

    The folder is for this agent alone: what it remembers is there.
    """
    path, folder = Path(socket_path), Path(folder)
    with ExitStack() as stack:
        agent = Agent(config, number, folder)
        stack.enter_context(alone(folder / "lock", f"another agent works in {folder} right now"))
        listener = stack.enter_context(listening(path))
        daemon = Daemon(agent, listener, limit)
        for name in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, name, signal.signal(name, lambda *_: daemon.stop()))
        ready()
        daemon.run()
    if agent.busy:
        # What is under way is lost, what was answered is on disk; JAX crashes when it is torn down while it works.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A socket at a path that only this user can connect to; it is gone afterwards."""
    check_place(path)
    with alone(path.with_name(path.name + ".lock"), f"another agent listens at {path}"):
        _remove_dead(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            except OSError as error:
                raise UserError(f"the agent cannot listen at {path}: {said(error)}") from error
            finally:
                os.umask(before)
            try:
                listener.listen(MOST_CONNECTIONS)
                listener.setblocking(False)
                yield listener
            finally:
                path.unlink(missing_ok=True)


def check_place(path: Path) -> None:
    """Refuse a path where no socket can be, or where others could put theirs; make its folder."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise UserError(f"the socket's path may have {LONGEST_PATH} bytes; {path} is longer")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = path.parent.stat()
        open_to_others = place.st_mode & 0o022 or place.st_uid != os.getuid()
    except OSError as error:
        raise UserError(f"the agent cannot listen at {path}: {said(error)}") from error
    if open_to_others:
        raise UserError(f"others may write to {path.parent}; a socket needs a folder of its user's own")


def _remove_dead(path: Path) -> None:
    """Make room where a daemon died; refuse what is alive, or no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UserError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise UserError(f"{path} is somebody's socket: {said(error)}") from error
    raise UserError(f"another agent listens at {path}")


@contextmanager
def alone(path: Path, otherwise: str) -> Iterator[None]:
    """A lock that goes with its holder, however that ends."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {said(error)}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(otherwise) from error
        yield
    finally:
        os.close(handle)
