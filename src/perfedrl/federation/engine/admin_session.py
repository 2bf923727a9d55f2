"""The operator's line to the server: who is there, what runs, start and stop."""

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
from perfedrl.federation.engine.fleet_folder import OPERATOR, FleetFolder

ANSWERS = (
    AuthenticationError,
    JobNotFound,
    JobNotRunning,
    JobNotDone,
    AuthorizationError,
    InvalidJobDefinition,
    InvalidTarget,
)
FRESH = 25.0
"""Seconds since an agent's last sign of life, of which there is one every 10, for it to count as connected."""


class Unreachable(UserError):  # noqa: N818
    """The server does not answer."""


class Declined(UserError):  # noqa: N818
    """The server answers, and does not do it."""


class Operator:
    """One connection; when the server dies it is of no use any more, and a new one is made."""

    def __init__(self, fleet: FleetFolder, timeout: float = 10.0):
        self.fleet = fleet
        with _quiet(), reachable():
            self._session: Session = new_secure_session(OPERATOR, str(fleet.operator), timeout=timeout)

    def connected(self) -> set[str]:
        """The agents that are there now."""
        with reachable():
            clients = self._session.get_connected_client_list()
        return {client.name for client in clients if time.time() - client.last_connect_time < FRESH}

    def idle(self, job: str) -> set[str]:
        """The agents that answer, and have no process for a job."""
        with reachable():
            rows = self._session.get_client_job_status() or []
        heard = {row["client_name"] for row in rows if row.get("status") != MetaStatusValue.NO_REPLY}
        return heard - {row["client_name"] for row in rows if row.get("job_id") == job}

    def submit(self, folder: Path) -> str:
        with reachable():
            return self._session.submit_job(str(folder))

    def status(self, job: str) -> str:
        """What the server says of a job: SUBMITTED, RUNNING, FINISHED:..."""
        with reachable():
            return str(self._session.get_job_meta(job)["status"])

    def unfinished(self) -> list[str]:
        """The jobs that the server thinks are under way."""
        with reachable():
            return [str(job["job_id"]) for job in self._session.list_jobs() if not _over(str(job["status"]))]

    def abort(self, job: str) -> None:
        with reachable():
            self._session.abort_job(job)

    def shut_out(self, agent: str) -> None:
        """Revoke an agent's kit: from now on it gets nothing."""
        with reachable():
            self._session.disable_client(agent)

    def let_in(self, agent: str) -> None:
        with reachable():
            self._session.enable_client(agent)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._session.close()


def _over(status: str) -> bool:
    return status.startswith("FINISHED")


@contextmanager
def reachable() -> Iterator[None]:
    """Whatever the engine raises when its server is gone is one error here, and what else it raises another."""
    try:
        yield
    except ANSWERS as error:
        raise Declined(f"the server declined: {error}") from error
    except Exception as error:
        raise Unreachable(f"the server does not answer: {error}") from error


@contextmanager
def _quiet() -> Iterator[Any]:
    """The engine prints to the terminal while it connects, and logs to it where nobody asked for a log."""
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())
    with contextlib.redirect_stdout(io.StringIO()) as said:
        yield said
