"""The operator's connection to NVFlare's server: connected agents, jobs, and revocation."""

import contextlib
import io
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import (
    AuthenticationError,
    AuthorizationError,
    InvalidJobDefinition,
    InvalidTarget,
    JobNotDone,
    JobNotFound,
    JobNotRunning,
)
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session
from nvflare.fuel.hci.proto import MetaStatusValue

from perfedrl.errors import UserError
from perfedrl.federation.engine.driver import install
from perfedrl.federation.engine.fleet_folder import OPERATOR, FleetFolder

REJECTIONS = (
    AuthenticationError,
    JobNotFound,
    JobNotRunning,
    JobNotDone,
    AuthorizationError,
    InvalidJobDefinition,
    InvalidTarget,
)
FRESH = 25.0
"""An agent counts as connected if its last heartbeat, sent every 10 seconds, is at most this many seconds old."""


class ServerUnreachable(UserError):  # noqa: N818
    """The server does not answer."""


class RequestDeclined(UserError):  # noqa: N818
    """The server answered that it does not carry out a request."""


class Operator:
    """One connection to the server; after the server's death a new one is needed."""

    def __init__(self, fleet: FleetFolder, timeout: float = 10.0):
        self.fleet = fleet
        install()
        with _quiet(), translated_errors():
            self._session: Session = new_secure_session(OPERATOR, str(fleet.operator), timeout=timeout)

    def connected(self) -> set[str]:
        """The names of the connected agents."""
        with translated_errors():
            clients = self._session.get_connected_client_list()
        return {client.name for client in clients if time.time() - client.last_connect_time < FRESH}

    def idle(self, job: str) -> set[str]:
        """The agents that answer and have no process for a job."""
        with translated_errors():
            rows = self._session.get_client_job_status() or []
        heard = {row["client_name"] for row in rows if row.get("status") != MetaStatusValue.NO_REPLY}
        return heard - {row["client_name"] for row in rows if row.get("job_id") == job}

    def submit(self, folder: Path) -> str:
        """Submit the job in a folder; return its id."""
        with translated_errors():
            return self._session.submit_job(str(folder))

    def status(self, job: str) -> str:
        """The status of a job: SUBMITTED, RUNNING, FINISHED:..."""
        with translated_errors():
            return str(self._session.get_job_meta(job)["status"])

    def unfinished(self) -> list[str]:
        """The ids of the jobs that the server considers unfinished."""
        with translated_errors():
            return [str(job["job_id"]) for job in self._session.list_jobs() if not _over(str(job["status"]))]

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


def _over(status: str) -> bool:
    return status.startswith("FINISHED")


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
