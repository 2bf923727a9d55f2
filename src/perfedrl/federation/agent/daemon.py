"""An agent's daemon: answers requests on a Unix socket that only its user can reach, one thread per request."""

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
from typing import NoReturn

from perfedrl.errors import UserError
from perfedrl.federation.agent.config import AgentConfig
from perfedrl.federation.agent.request_handler import Agent, failure
from perfedrl.federation.frames import LIMIT, BadFrame, receive, send
from perfedrl.federation.private_sockets import bind_privately, check_socket_path, reason_of

MOST_CONNECTIONS = 16
"""The number of open requests; all but one of them wait."""
PATIENCE = 60.0
"""Seconds in which a request must have arrived, and an answer must have been received."""


class Daemon:
    """Answers requests on a socket until it is stopped."""

    def __init__(self, agent: Agent, listener: socket.socket, limit: int = LIMIT):
        self._agent, self._listener, self._limit = agent, listener, limit
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._woken, self._waker = socket.socketpair()

    def run(self) -> None:
        """Answer requests until `stop`."""
        with selectors.DefaultSelector() as selector:
            for source in (self._listener, self._woken):
                selector.register(source, selectors.EVENT_READ)
            while all(key.fileobj is not self._woken for key, _ in selector.select()):
                self._accept()

    def stop(self) -> None:
        """End `run`; may be called from any thread or signal handler."""
        with suppress(OSError):
            self._waker.send(b"x")

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """End `run` at SIGTERM or Ctrl-C; in the main thread.

        The system may hand a signal to another thread than the one that waits in `run`. Python then writes a byte to
        the wake-up file at once, and calls the handler only when the waiting thread goes on.
        """
        before = {name: signal.signal(name, lambda *_: self.stop()) for name in (signal.SIGTERM, signal.SIGINT)}
        self._waker.setblocking(False)
        file = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(file)
            for name, handler in before.items():
                signal.signal(name, handler)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client is gone, or too many files are open for the moment
            time.sleep(0.05)
            return
        if not self._free.acquire(blocking=False):
            with connection, suppress(OSError):
                connection.settimeout(1.0)
                send(connection, failure(f"the agent has {MOST_CONNECTIONS} open requests already; ask again later"))
            return
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one request; a connection that ends or stalls is dropped."""
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
    tell: Callable[[str], None] = lambda _: None,
    stopped: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Run an agent in a process's main thread until SIGTERM or Ctrl-C; then the process ends.

    `ready` is called when the agent listens, `tell` with each thing that it did, and `stopped` at the end. The folder
    holds the agent's stored answers and belongs to this agent alone.
    """
    path, folder = Path(socket_path), Path(folder)
    with ExitStack() as stack:
        agent = Agent(config, number, folder, tell)
        stack.enter_context(exclusive_lock(folder / "lock", f"another agent is using {folder}"))
        listener = stack.enter_context(listening(path))
        daemon = Daemon(agent, listener, limit)
        stack.enter_context(daemon.stopped_by_signals())
        ready()
        daemon.run()
        agent.close()
    stopped()
    # Answers are on disk already, and JAX may crash or hang if it is shut down while another thread uses it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen on a socket that only this user can connect to, and remove it afterwards."""
    check_socket_path(path)
    with exclusive_lock(path.with_name(path.name + ".lock"), f"another agent listens at {path}"):
        _remove_dead(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            bind_privately(listener, path)
            try:
                listener.listen(MOST_CONNECTIONS)
                listener.setblocking(False)
                yield listener
            finally:
                path.unlink(missing_ok=True)


def _remove_dead(path: Path) -> None:
    """Remove the socket of a dead daemon; raise an error if a daemon is alive or the file is not a socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UserError(f"{path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise UserError(f"{path} is a socket of another program: {reason_of(error)}") from error
    raise UserError(f"another agent listens at {path}")


@contextmanager
def exclusive_lock(path: Path, otherwise: str) -> Iterator[None]:
    """Hold a lock file, which the system releases when this process ends; raise `otherwise` if it is taken."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {reason_of(error)}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(otherwise) from error
        yield
    finally:
        os.close(handle)
