"""A component of NVFlare's server: no agent can end a job, and a job learns at once which agents left it."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, RunProcessKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.fuel.f3.cellnet.defs import ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.endpoint import Endpoint, EndpointMonitor, EndpointState
from nvflare.private.defs import CellChannel, CellChannelTopic, CellMessageHeaderKeys, JobFailureMsgKey

log = logging.getLogger(__name__)

PROCESS_ENDED, CONNECTION_LOST, SILENCE = "process ended", "connection lost", "heartbeats stopped"
"""Why a client is gone from a job; after the last one its process may still be alive."""
RECONNECTS = 2.0
"""Seconds in which a lost connection may come back before the job is told that the agent's process is gone."""
WATCH, SILENT = 0.5, 8.0
"""Seconds between two looks at the clients, and without a heartbeat after which a job goes on without a client."""


class ServerGuard(FLComponent, EndpointMonitor):
    """Replaces NVFlare's answer to a failed client process, which is to end the job for everybody.

    Instead the job's process is told that this client is gone, and goes on with the others. It is told the same when
    the connection of a client's process does not come back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._server: Any = None
        self._away: set[str] = set()
        self._missing: dict[tuple[str, str], str] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Take over once the server listens."""
        if event_type == EventType.SYSTEM_START:
            self._server = fl_ctx.get_prop(FLContextKey.SITE_OBJ)
            channel, topic = CellChannel.SERVER_MAIN, CellChannelTopic.REPORT_JOB_FAILURE
            self._server.cell.register_request_cb(channel=channel, topic=topic, cb=self.job_ended)
            self._server.cell.core_cell.communicator.register_monitor(self)
            threading.Thread(target=self._keep_watching, name="server_guard", daemon=True).start()

    def job_ended(self, request: Any) -> Any:
        """Note that a client's process of a job ended; NVFlare itself only hears of processes that succeeded."""
        client = self._server.client_manager.clients.get(request.get_header(CellMessageHeaderKeys.TOKEN))
        report = request.payload
        if client is None or not isinstance(report, dict):
            return make_reply(ReturnCode.UNAUTHENTICATED)
        job, code = report.get(JobFailureMsgKey.JOB_ID), report.get(JobFailureMsgKey.CODE)
        runner = self._server.engine.job_runner
        if runner.is_client_outcome_pending(job, client.name):
            runner.resolve_client_outcome(job, client.name)
            if code != JobReturnCode.SUCCESS:
                self._tell(job, client.name, PROCESS_ENDED)
        return make_reply(ReturnCode.OK)

    def state_change(self, endpoint: Endpoint) -> None:
        """Tell a job that the connection of a client's process is lost, unless it comes back soon."""
        if endpoint.state == EndpointState.READY:
            self._away.discard(endpoint.name)
        elif len(FQCN.split(endpoint.name)) == 2 and FQCN.get_root(endpoint.name) != FQCN.ROOT_SERVER:
            client, job = FQCN.split(endpoint.name)
            self._away.add(endpoint.name)
            _later(RECONNECTS, self._tell_again, job, client, CONNECTION_LOST, 1.0)

    def watch(self) -> None:
        """Tell jobs of clients that registered anew or left, whose old processes are gone, and of silent ones."""
        clients, now = self._server.client_manager.clients, time.time()
        missing: dict[tuple[str, str], str] = {}
        for job, process in list(self._server.engine.run_processes.items()):
            for token, client in list((process.get(RunProcessKey.PARTICIPANTS) or {}).items()):
                if (known := clients.get(token)) is None:
                    missing[job, client.name] = CONNECTION_LOST
                elif now - known.last_connect_time > SILENT:
                    missing[job, client.name] = SILENCE
        told, self._missing = self._missing, missing
        for (job, name), reason in missing.items():
            if told.get((job, name)) != reason:
                self._tell(job, name, reason)

    def _keep_watching(self) -> None:
        while True:
            time.sleep(WATCH)
            try:
                self.watch()
            except Exception:  # the next look may succeed, and nobody else would notice a silent agent
                log.exception("the watch over agents failed once")

    def _tell(self, job: Any, client: str, reason: str) -> None:
        self._away.add(FQCN.join([client, job]))
        self._tell_again(job, client, reason, 1.0)

    def _tell_again(self, job: str, client: str, reason: str, wait: float) -> None:
        """Tell a job as long as it runs without this client, since its process may not listen yet.

        NVFlare passes on only the name of the client, so the reason travels with it.
        """
        if FQCN.join([client, job]) in self._away and job in self._server.engine.run_processes:
            self._server.engine.notify_dead_job(job, f"{client} {reason}", reason)
            _later(wait, self._tell_again, job, client, reason, 2 * wait)
        else:
            self._away.discard(FQCN.join([client, job]))


def _later(seconds: float, call: Callable[..., None], *arguments: Any) -> None:
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()
