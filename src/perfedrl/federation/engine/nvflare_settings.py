"""Settings of NVFlare 2.9 that it has no option for: waits that are made for long rounds and patient operators.

Each is an attribute of one of its modules or objects; a UserError says if a new version has none of that name.
"""

import sys
import time
from types import ModuleType
from typing import Any

from nvflare.fuel.f3.cellnet import cell
from nvflare.fuel.f3.sfm import conn_manager

from perfedrl.errors import UserError

FIRST_RECONNECT, LAST_RECONNECT = 0.25, 2.0
"""Seconds before a lost connection is tried again, first and at most; NVFlare's are 1 and 10."""
HEARTBEAT = 2
"""Seconds between two heartbeats of a client, and before one that failed is repeated; NVFlare's are 10 and 5."""
LONGEST_SLEEPS = {
    "nvflare.private.fed.authenticator": 0.1,
    "nvflare.private.fed.app.client.client_train": 0.1,
    "nvflare.private.fed.client.client_app_runner": 0.1,
    "nvflare.private.fed.client.client_runner": 0.2,
    "nvflare.private.fed.client.communicator": HEARTBEAT,
    "nvflare.private.fed.client.fed_client_base": 0.1,
    "nvflare.private.fed.server.job_runner": 0.25,
    "nvflare.private.fed.server.server_engine": 0.1,
}
"""The longest sleeps of NVFlare's modules in seconds; it checks once a second or less often whether something is
connected or registered, or whether a job is to start."""


def shorten_waits() -> None:
    """Shorten the waits of the modules that this process has imported."""
    replace_attribute(conn_manager, "INIT_WAIT", FIRST_RECONNECT)
    replace_attribute(conn_manager, "MAX_WAIT", LAST_RECONNECT)
    for name, longest in LONGEST_SLEEPS.items():
        if name in sys.modules:
            replace_attribute(sys.modules[name], "time", ShortSleeps(longest))


def let_no_agent_end_the_job(runner: Any) -> None:
    """In the server's job: treat an agent's bad answer as that agent's failure only.

    NVFlare ends the job at some return codes of a task, and its process at answers that cannot be decoded or that an
    agent calls too large.
    """
    replace_attribute(runner, "ABORT_RETURN_CODES", [])
    replace_attribute(cell, "_is_server_job_cell", lambda _: False)


def limit_blobs(own_cell: Any, size: int) -> None:
    """Let a cell reject blobs of more than `size` bytes, by their announced size or as soon as more has come."""
    for callback in own_cell.byte_receiver.registry.reg.values():
        replace_attribute(callback.cb.__self__, "max_blob_size", size)


def replace_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute that must exist."""
    if name not in dir(owner):
        what = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__name__
        raise UserError(f"NVFlare's {what} has no {name}; perfedrl needs NVFlare 2.9")
    setattr(owner, name, value)


class ShortSleeps:
    """The part of the module `time` that NVFlare's modules use, with sleeps that are not longer than a limit."""

    def __init__(self, longest: float):
        self.longest = longest
        self.time, self.monotonic = time.time, time.monotonic

    def sleep(self, seconds: float) -> None:
        """Sleep for the given time, or for the limit if that is shorter."""
        time.sleep(min(seconds, self.longest))
