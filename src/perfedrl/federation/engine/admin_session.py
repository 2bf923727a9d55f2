"""The operator's connection to NVFlare's server: connected agents, jobs, and revocation."""

import contextlib
import io
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import (
    AuthenticationError,
    AuthorizationError,
    InternalError,
    InvalidJobDefinition,
    InvalidTarget,
    JobNotDone,
    JobNotFound,
    JobNotRunning,
)
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from perfedrl.errors import UserError
from perfedrl.federation.engine.driver import install
from perfedrl.federation.engine.fleet_folder import OPERATOR, FleetFolder
from perfedrl.federation.engine.nvflare_settings import shorten_waits

REJECTIONS = (
    AuthenticationError,
    JobNotFound,
    JobNotRunning,
    JobNotDone,
    AuthorizationError,
    InternalError,
    InvalidJobDefinition,
    InvalidTarget,
    InternalError,
)
"""What NVFlare raises for an answer of the server; an internal error is, for example, a job that has ended already."""
FRESH = 12.0
"""An agent counts as connected if its last heartbeat, sent every 2 seconds, is at most this many seconds old."""


class ServerUnreachable(UserError):  # noqa: N818
    """The server does not answer."""


class RequestDeclined(UserError):  # noqa: N818
    """The server answered that it does not carry out a request."""


class Operator:
    """One connection to the server; after the server's death a new one is needed."""

    def __init__(self, fleet: FleetFolder, timeout: float = 10.0):
        self.fleet = fleet
        install()
        shorten_waits()
        with _quiet(), translated_errors():
            self._session: Session = new_secure_session(OPERATOR, str(fleet.operator), timeout=timeout)

    def connected(self) -> set[str]:
        """The names of the connected agents."""
        return fresh(self.last_heartbeats())

    def last_heartbeats(self) -> dict[str, float]:
        """When each agent was last heard of, in seconds since 1970."""
        with translated_errors():
            clients = self._session.get_connected_client_list()
        return {client.name: client.last_connect_time for client in clients}

    def submit(self, folder: Path) -> str:
        """Submit the job in a folder; return its id."""
        with translated_errors():
            return self._session.submit_job(str(folder))

    def status(self, job: str) -> str:
        """The status of a job: SUBMITTED, RUNNING, FINISHED:..."""
        with translated_errors():
            return str(self._session.get_job_meta(job)["status"])

    def jobs(self) -> dict[str, bool]:
        """The ids of all jobs that the server has, and whether it considers them finished."""
        with translated_errors():
            return {str(job["job_id"]): str(job["status"]).startswith("FINISHED") for job in self._session.list_jobs()}

    def delete(self, job: str) -> None:
        """Delete what the server has kept of a finished job."""
        with translated_errors():
            self._session.delete_job(job)

    def abort(self, job: str) -> None:
        """Abort a job."""
        with translated_errors():
            self._session.abort_job(job)

    def revoke(self, agent: str) -> None:
        """Revoke an agent's kit."""
        with translated_errors():
            self._session.disable_client(agent)

    def reinstate(self, agent: str) -> None:
        """Undo `revoke`."""
        with translated_errors():
            self._session.enable_client(agent)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(Exception):
            self._session.close()


def fresh(heartbeats: Mapping[str, float]) -> set[str]:
    """The agents whose last heartbeat is recent."""
    now = time.time()
    return {name for name, last in heartbeats.items() if now - last < FRESH}


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise NVFlare's rejections as RequestDeclined, and all its other errors as ServerUnreachable."""
    try:
        yield
    except REJECTIONS as error:
        raise RequestDeclined(f"the server declined: {error}") from error
    except Exception as error:
        raise ServerUnreachable(f"the server does not answer: {error}") from error


@contextmanager
def _quiet() -> Iterator[Any]:
    """Suppress NVFlare's prints while it connects, and its log where none is configured."""
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield printed
