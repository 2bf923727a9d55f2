"""The services on a fleet's machines: run the server's or an agent's processes until they are told to stop."""

import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from perfedrl.errors import UserError
from perfedrl.federation.agent.daemon_client import AgentUnreachable, call, line_of
from perfedrl.federation.engine.authority import is_soon, valid_until
from perfedrl.federation.engine.connection_log import ConnectionLog
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit, check_path
from perfedrl.federation.engine.kit_checks import check_kit
from perfedrl.federation.engine.processes import (
    check_clock,
    check_port,
    check_server,
    client_process,
    daemon_process,
    server_process,
)
from perfedrl.federation.frames import Frame
from perfedrl.federation.restarting_process import RestartingProcess

LOCK = "service.lock"
READY = 120.0
"""Seconds in which an agent's daemon must answer after its start."""
LOOK_EVERY = 60.0
"""Seconds between two looks at a certificate."""
Tell = Callable[[str], None]


def serve(fleet: FleetFolder, tell: Tell) -> None:
    """Run the fleet's server until a signal or `stop`."""
    with exclusive_service(fleet.server):
        check_path(fleet.folder)
        check_clock(fleet.server / "startup" / "server.crt")
        check_port(fleet.info.host, fleet.info.port)
        fleet.write_storage()
        watch = CertificateWatch(fleet.server / "startup" / "server.crt", tell)
        watch.look()
        connections = ConnectionLog(fleet.connection_log)
        process = server_process(fleet).start()
        tell(f"{fleet.info.fleet} listens on port {fleet.info.port} for {len(fleet.info.agents)} agents")
        stand_by([process], tell, connections.new_lines, watch)


def join(kit: Kit, agent_config: Path | None, env: str | None, tell: Tell) -> None:
    """Run an agent, its daemon and the bridge to the kit's server, until a signal or `stop`."""
    with exclusive_service(kit.folder):
        check_path(kit.folder)
        check_kit(kit)
        check_clock(kit.certificate)
        watch = CertificateWatch(kit.certificate, tell)
        watch.look()
        reachable = check_server(kit)
        daemon, bridge = daemon_process(kit, agent_config, env).start(), client_process(kit).start()
        try:
            wait_for(daemon, kit.socket, kit.info.agent)
        except BaseException:
            bridge.stop()
            daemon.stop()
            raise
        where = f"{kit.info.host}:{kit.info.port}"
        tell(
            f"{kit.info.agent} is ready" + ("" if reachable else f"; no server listens at {where} yet, it keeps trying")
        )
        tell(f"{kit.info.agent} joins {kit.info.fleet} at {where}; its logs are agent.log and bridge.log in the kit")
        stand_by([bridge, daemon], tell, lambda: lines_of(daemon, kit.info.number), watch)


class CertificateWatch:
    """Says of a certificate once that it ends soon, and once that it has ended; a renewed one is looked at anew."""

    def __init__(self, certificate: Path, tell: Tell):
        self._certificate, self._tell = certificate, tell
        self._said: set[str] = set()
        self._next = 0.0

    def look(self) -> None:
        """Read the certificate, at most once a minute, and say what is new of it."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_EVERY
        try:
            end = valid_until(self._certificate)
        except (UserError, OSError):
            return  # while it is being replaced
        if not is_soon(end):
            return
        what = "has ended" if end <= datetime.now(UTC) else "ends"
        said = (
            f"warning: the certificate {self._certificate.name} {what} on {end:%Y-%m-%d}; "
            "`perfedrl federation renew` makes a new one on the server's machine"
        )
        if said not in self._said:
            self._said.add(said)
            self._tell(said)


def wait_for(daemon: RestartingProcess, socket: Path, name: str) -> None:
    """Wait until an agent's daemon answers; raise the error in its log if it cannot start."""
    end = time.monotonic() + READY
    while time.monotonic() < end:
        with suppress(AgentUnreachable):
            call(socket, Frame("health"), timeout=5.0)
            return
        if daemon.deaths:
            errors = [line for line in daemon.log_tail(20).splitlines() if line.startswith("error: ")]
            why = errors[-1].removeprefix("error: ") if errors else f"see {daemon.log}"
            raise UserError(f"the process of {name} does not start: {why}")
        time.sleep(0.1)
    raise UserError(f"the process of {name} did not answer within {READY:g} s; see {daemon.log}")


def lines_of(daemon: RestartingProcess, number: int) -> list[str]:
    """What an agent's daemon has said in its log since the last call."""
    return [line for line in daemon.new_lines() if line.startswith(line_of(number))]


def stand_by(
    processes: Sequence[RestartingProcess], tell: Tell, new_lines: Callable[[], list[str]], watch: CertificateWatch
) -> None:
    """Wait for a signal, then end the processes; meanwhile report restarts, new lines and the certificate's end."""
    received, sent = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        # A handler may interrupt any line of this thread, so it may take no lock, as an Event's `set` does.
        signal.signal(number, lambda *_: os.write(sent, b"x"))
    seen = [process.deaths for process in processes]
    try:
        while not select.select([received], [], [], 0.5)[0]:
            for line in new_lines():
                tell(line)
            watch.look()
            for i, process in enumerate(processes):
                if process.deaths > seen[i]:
                    tell(f"{process.log.stem} ended and is restarted ({process.deaths}); see {process.log.name}")
                    seen[i] = process.deaths
    finally:
        for process in processes:
            process.stop()
    tell("stopped")


@contextmanager
def exclusive_service(folder: Path, what: str | None = None) -> Iterator[None]:
    """Lock a folder for this process; the system releases the lock when the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        for attempt in range(5):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:  # `holder` takes the lock for a moment
                if attempt == 4:
                    raise UserError(f"{what or folder} is running already (process {_recorded_pid(folder)})") from error
                time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def holder(folder: Path) -> int | None:
    """The id of the process that holds a folder's lock, if there is one."""
    path = folder / LOCK
    if not path.exists():
        return None
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return _recorded_pid(folder)
    return None


def _recorded_pid(folder: Path) -> int | None:
    """The process id in a folder's lock file."""
    text = (folder / LOCK).read_text(encoding="utf-8").strip()
    return int(text) if text.isdigit() else None


def stop(folder: Path, seconds: float = 30.0) -> bool:
    """End the service of a folder and wait for its end; False if none runs."""
    pid = holder(folder)
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + seconds
    while holder(folder) is not None:
        if time.monotonic() > end:
            raise UserError(f"process {pid} did not end within {seconds:g} s")
        time.sleep(0.1)
    return True
