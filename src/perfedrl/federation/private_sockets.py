"""Unix sockets that only their user can reach."""

import os
import socket
from pathlib import Path

from perfedrl.errors import UserError

LONGEST_PATH = 100
"""The longest path of a socket in bytes; systems allow little more."""


def check_socket_path(path: Path) -> None:
    """Check that a socket can be created at a path and that only this user may write there; create the folder."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise UserError(f"expected a socket path of at most {LONGEST_PATH} bytes, got a longer one: {path}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = path.parent.stat()
        open_to_others = place.st_mode & 0o022 or place.st_uid != os.getuid()
    except OSError as error:
        raise UserError(f"the agent cannot listen at {path}: {reason_of(error)}") from error
    if open_to_others:
        raise UserError(
            f"other users may write to {path.parent}; the socket needs a folder that only its user may write to"
        )


def bind_privately(listener: socket.socket, path: Path) -> None:
    """Bind a socket to a path that only this user can connect to."""
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise UserError(f"the agent cannot listen at {path}: {reason_of(error)}") from error
    finally:
        os.umask(before)


def reason_of(error: OSError) -> str:
    """The system's description of an error, as part of a sentence."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]
