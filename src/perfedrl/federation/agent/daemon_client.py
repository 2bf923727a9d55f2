"""Ask an agent's daemon one question over its Unix socket. Imports neither JAX nor an environment."""

import socket
import time
from pathlib import Path

from perfedrl.errors import UserError
from perfedrl.federation.frames import LIMIT, Frame, TornFrame, decode, encode, receive_raw, send_raw

TIMEOUT = 600.0
"""Seconds for a question and its answer."""


def line_of(number: int, what: str = "") -> str:
    """A line in which a daemon says what its agent did; the beginning of such lines if `what` is left out."""
    return f"agent {number}: {what}"


class DaemonError(UserError):
    """The daemon answered with an error."""


class AgentUnreachable(UserError):  # noqa: N818
    """No daemon listens, it ended before it answered, or it took too long."""


def call(socket_path: str | Path, frame: Frame, timeout: float = TIMEOUT, limit: int = LIMIT) -> Frame:
    """Ask an agent's daemon; an error in its answer is raised."""
    reply = decode(call_raw(socket_path, encode(frame), timeout, limit), limit)
    if reply.kind == "error":
        raise DaemonError(reply.fields.get("message", "the agent gave no reason"))
    return reply


def call_raw(socket_path: str | Path, data: bytes, timeout: float = TIMEOUT, limit: int = LIMIT) -> bytes:
    """Send an encoded question and return the encoded answer without decoding it."""
    deadline = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        try:
            sock.connect(str(socket_path))
        except OSError as error:
            why = error.strerror or str(error)
            raise AgentUnreachable(f"no agent listens at {socket_path}: {why[:1].lower()}{why[1:]}") from error
        try:
            send_raw(sock, data)
            return receive_raw(sock, limit, deadline)
        except TimeoutError as error:
            raise AgentUnreachable(f"the agent at {socket_path} did not answer within {timeout:g} s") from error
        except (OSError, TornFrame) as error:
            raise AgentUnreachable(f"the agent at {socket_path} ended before it answered") from error
