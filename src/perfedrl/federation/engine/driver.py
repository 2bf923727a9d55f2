"""NVFlare's connections, replaced by perfedrl's: TLS between machines, and Unix sockets within one.

NVFlare calls a driver from its own threads; everything else happens in one event loop per process.
"""

import asyncio
import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import cache
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.communicator import driver_mgr, load_comm_drivers
from nvflare.fuel.f3.connection import Connection
from nvflare.fuel.f3.drivers.base_driver import BaseDriver
from nvflare.fuel.f3.drivers.driver import ConnectorInfo
from nvflare.fuel.f3.drivers.driver_params import DriverCap, DriverParams

from perfedrl.federation.connections.dialer import Dialer, Target
from perfedrl.federation.connections.listener import Listener, ListenerLimits, Peer
from perfedrl.federation.connections.session import Deliver, Session, SessionOver
from perfedrl.federation.connections.streams import Stream, client_context, server_context
from perfedrl.federation.engine.fleet_folder import OPERATOR
from perfedrl.federation.engine.message_limits import limits_in
from perfedrl.federation.private_sockets import bind_privately, check_socket_path

SCHEME, UNIX = "tcp", "perfedrl-unix"
"""The schemes of URLs in NVFlare's settings. NVFlare accepts only names of its own for connections between machines."""
SOCKETS, CONNECTION_LOG = "PERFEDRL_ENGINE_SOCKETS", "PERFEDRL_CONNECTION_LOG"
"""The environment variables with the folder of Unix sockets, and with the file to which a server tells its events."""
SHUTDOWN = 3.0
"""Seconds in which connections are closed when a process ends."""
log = logging.getLogger(__name__)


def install() -> None:
    """Let NVFlare use these drivers in this process."""
    load_comm_drivers()
    driver_mgr.drivers.update(DRIVERS)


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of all connections of this process, in a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="connections", daemon=True).start()
    return loop


class SessionConnection(Connection):
    """A session as NVFlare sees it."""

    def __init__(self, connector: ConnectorInfo, session: Session, ends: tuple[str, str], name: str):
        super().__init__(connector)
        self._session = session
        self._properties = {DriverParams.LOCAL_ADDR.value: ends[0], DriverParams.PEER_ADDR.value: ends[1]}
        self._properties |= {DriverParams.PEER_CN.value: name} if name else {}

    def get_conn_properties(self) -> dict:
        """The addresses of both ends and the name in the peer's certificate, which NVFlare compares with its claims."""
        return self._properties

    def close(self) -> None:
        """End the session."""
        self._session.close()

    def deliver(self, frame: bytes) -> float:
        """Hand a frame to NVFlare; no wait before the next one."""
        self.process_frame(frame)
        return 0.0

    def send_frame(self, frame: Any) -> None:
        """Send a frame."""
        try:
            self._session.send(frame)
        except SessionOver as error:
            raise CommError(CommError.CLOSED, str(error)) from error


class SessionDriver(BaseDriver):
    """What both drivers have in common."""

    limits = ListenerLimits()

    def __init__(self) -> None:
        super().__init__()
        self._running: list[Any] = []
        self._closing = False

    @staticmethod
    def capabilities() -> dict[str, Any]:
        """Sessions give signs of life by themselves."""
        return {DriverCap.SEND_HEARTBEAT.value: False, DriverCap.SUPPORT_SSL.value: True}

    def listening(self, params: dict) -> tuple[socket.socket, Any]:
        """A socket that is bound, and TLS's context for the server."""
        raise NotImplementedError

    def target(self, params: dict) -> Target:
        """Where a URL leads."""
        raise NotImplementedError

    def listen(self, connector: ConnectorInfo) -> None:
        """Accept sessions until `shutdown`."""
        self.connector = connector
        tell = _teller()

        async def opened(peer: Peer) -> None:
            connection = SessionConnection(connector, peer.session, peer.addresses, peer.name)
            peer.deliver = self.receiver(connection, peer.name)
            await asyncio.to_thread(self.add_connection, connection)
            peer.ended = lambda: asyncio.to_thread(self.close_connection, connection)

        async def run() -> None:
            await Listener(*self.listening(connector.params), opened, tell, is_agent, self.limits).run()

        self._wait(run())

    def receiver(self, connection: SessionConnection, name: str) -> Deliver:
        """What takes the frames of a connection to this listener from a process with some name."""
        return connection.deliver

    def connect(self, connector: ConnectorInfo) -> None:
        """Hold one session until it ends or until `shutdown`; NVFlare then connects again."""
        self.connector = connector
        self._wait(self._dial(connector))

    async def _dial(self, connector: ConnectorInfo) -> None:
        connections: list[SessionConnection] = []

        async def opened(stream: Stream) -> None:
            connections.append(SessionConnection(connector, dialer.session, stream.addresses, stream.common_name))
            await asyncio.to_thread(self.add_connection, connections[0])

        def deliver(frame: bytes) -> float:
            return connections[0].deliver(frame)

        endpoint = self.conn_monitor.local_endpoint.name
        dialer = Dialer(self.target(connector.params), endpoint, opened, deliver, log.error, self.limits.resume)
        try:
            await dialer.run()
        finally:
            for connection in connections:
                await asyncio.to_thread(self.close_connection, connection)

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the event loop and wait for its end, or for `shutdown`."""
        if self._closing:
            work.close()
            return
        future = asyncio.run_coroutine_threadsafe(work, event_loop())
        self._running.append(future)
        if self._closing:
            future.cancel()
        with suppress(CancelledError):
            future.result()

    def shutdown(self) -> None:
        """End all sessions, and wait a moment until their peers are told."""
        self._closing = True
        self.close_all()
        with suppress(FutureTimeout, CancelledError):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), event_loop()).result(SHUTDOWN)
        for future in self._running:
            future.cancel()


class TlsDriver(SessionDriver):
    """Connections between machines: mutual TLS with the fleet's authority."""

    @staticmethod
    def supported_transports() -> list[str]:
        """None that are free; `install` replaces NVFlare's own."""
        return []

    @staticmethod
    def get_urls(scheme: str, resources: dict) -> tuple[str, str]:  # noqa: ARG004
        """No such listener is made for job processes."""
        raise CommError(CommError.NOT_SUPPORTED, f"{scheme} is for connections between machines only")

    def listening(self, params: dict) -> tuple[socket.socket, Any]:
        """Listen on the fleet's port."""
        host, port = params.get(DriverParams.HOST.value) or "0.0.0.0", int(params[DriverParams.PORT.value])
        listening = socket.create_server((host, port), backlog=1)
        keys = (DriverParams.CA_CERT, DriverParams.SERVER_CERT, DriverParams.SERVER_KEY)
        return listening, server_context(*(params[key.value] for key in keys))

    def target(self, params: dict) -> Target:
        """The server."""
        keys = (DriverParams.CA_CERT, DriverParams.CLIENT_CERT, DriverParams.CLIENT_KEY)
        context = client_context(*(params[key.value] for key in keys))
        return Target(params[DriverParams.HOST.value], int(params[DriverParams.PORT.value]), context)

    def receiver(self, connection: SessionConnection, name: str) -> Deliver:
        """NVFlare, within the limits of a kit."""
        limits = limits_in(Path.cwd())
        return lambda frame: limits.receive(name, frame, connection.process_frame)


class UnixDriver(SessionDriver):
    """Connections between the processes of one machine: a Unix socket in a folder that only its user can enter.

    A stream breaks only when the process at its other end dies, so the session ends with it.
    """

    limits = ListenerLimits(resume=0.0, per_name=1000)

    @staticmethod
    def supported_transports() -> list[str]:
        """The scheme of URLs like perfedrl-unix://0/tmp/folder/name.sock."""
        return [UNIX]

    @staticmethod
    def get_urls(scheme: str, resources: dict) -> tuple[str, str]:  # noqa: ARG004
        """A new socket's URL, for both ends."""
        if not os.environ.get(SOCKETS):
            raise CommError(CommError.BAD_CONFIG, f"{SOCKETS} is not set; start NVFlare with `perfedrl federation`")
        url = f"{scheme}://0{Path(os.environ[SOCKETS]) / f'engine-{secrets.token_hex(4)}.sock'}"
        return url, url

    def listening(self, params: dict) -> tuple[socket.socket, Any]:
        """Listen on the socket of a URL; sockets of dead processes are removed."""
        path = Path(params[DriverParams.PATH.value])
        check_socket_path(path)
        for other in path.parent.glob("engine-*.sock"):
            _remove_if_dead(other)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bind_privately(listening, path)
        return listening, None

    def target(self, params: dict) -> Target:
        """The socket of a URL."""
        return Target(path=Path(params[DriverParams.PATH.value]))


DRIVERS: dict[str, type[SessionDriver]] = {SCHEME: TlsDriver, "s" + SCHEME: TlsDriver, UNIX: UnixDriver}


def is_agent(name: str) -> bool:
    """Whether a certificate's name is an agent's: the operator may run several commands at once."""
    return name not in ("", OPERATOR)


def _remove_if_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            return


def _teller() -> Callable[[str, str], None]:
    """Writes a line with the time for each event, in the server's log and in the file that the environment names."""
    events = logging.Logger("perfedrl.connections")
    if path := os.environ.get(CONNECTION_LOG):
        handler = RotatingFileHandler(path, maxBytes=2**20, backupCount=1, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        events.addHandler(handler)

    def tell(name: str, sentence: str) -> None:
        line = re.sub(r"[^\x20-\x7e]", "?", f"{name} {sentence}")
        events.warning(line)
        log.warning(line)

    return tell
