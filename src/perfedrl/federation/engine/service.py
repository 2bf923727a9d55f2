"""What runs on a machine of the fleet until it is told to stop: the server's processes, or an agent's."""

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from perfedrl.errors import UserError
from perfedrl.federation.agent.daemon_client import AgentUnreachable, call
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit
from perfedrl.federation.engine.processes import (
    check_clock,
    check_kit,
    check_port,
    check_server,
    client_process,
    daemon_process,
    server_process,
)
from perfedrl.federation.frames import Frame
from perfedrl.federation.restarting_process import Keeper

LOCK = "service.lock"
READY = 120.0
"""Seconds that an agent's daemon may take to answer."""
Tell = Callable[[str], None]


def serve(fleet: FleetFolder, tell: Tell) -> None:
    """Run the fleet's server until a signal, or `stop`, ends it."""
    with running(fleet.server):
        check_clock(fleet.server / "startup" / "server.crt")
        check_port(fleet.about.host, fleet.about.port)
        keeper = server_process(fleet).start()
        tell(f"{fleet.about.fleet} listens on port {fleet.about.port} for {len(fleet.about.agents)} agents")
        stand_by([keeper], tell)


def join(kit: Kit, agent_config: Path | None, env: str | None, tell: Tell) -> None:
    """Run an agent: its daemon, and the bridge to the kit's server."""
    with running(kit.folder):
        check_kit(kit.folder, kit.authority, kit.certificate)
        there = check_server(kit)
        daemon = daemon_process(kit, agent_config, env).start()
        try:
            wait_for(daemon, kit.socket)
        except BaseException:
            daemon.stop()
            raise
        where = f"{kit.about.host}:{kit.about.port}"
        tell(f"{kit.about.agent} is ready" + ("" if there else f"; nobody listens at {where} yet, it goes on trying"))
        bridge = client_process(kit).start()
        tell(f"{kit.about.agent} joins {kit.about.fleet} at {where}; its logs are agent.log and bridge.log in the kit")
        stand_by([bridge, daemon], tell)


def wait_for(daemon: Keeper, socket: Path) -> None:
    """Wait until an agent's daemon answers; one that cannot start says why."""
    end = time.monotonic() + READY
    while time.monotonic() < end:
        with suppress(AgentUnreachable):
            call(socket, Frame("health"), timeout=5.0)
            return
        if daemon.deaths:
            words = [line for line in daemon.last_words(20).splitlines() if line.startswith("error: ")]
            raise UserError(
                words[-1].removeprefix("error: ") if words else f"the agent does not start; see {daemon.log}"
            )
        time.sleep(0.1)
    raise UserError(f"the agent did not answer within {READY:g} s; see {daemon.log}")


def stand_by(keepers: Sequence[Keeper], tell: Tell) -> None:
    """Wait for a signal, then end the processes; say when one had to be started again."""
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    seen = [keeper.deaths for keeper in keepers]
    try:
        while not told.wait(0.5):
            for i, keeper in enumerate(keepers):
                if keeper.deaths > seen[i]:
                    tell(f"{keeper.log.stem} ended and is started again ({keeper.deaths}); see {keeper.log.name}")
                    seen[i] = keeper.deaths
    finally:
        for keeper in keepers:
            keeper.stop()
    tell("stopped")


@contextmanager
def running(folder: Path, what: str | None = None) -> Iterator[None]:
    """Mark a folder as in use by this process, which its end undoes, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        for attempt in range(5):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:  # somebody who only looks holds it for a moment
                if attempt == 4:
                    raise UserError(f"{what or folder} is running already (process {_holder(folder)})") from error
                time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def holder(folder: Path) -> int | None:
    """The process that runs in a folder, if one does."""
    path = folder / LOCK
    if not path.exists():
        return None
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return _holder(folder)
    return None


def _holder(folder: Path) -> int | None:
    text = (folder / LOCK).read_text(encoding="utf-8").strip()
    return int(text) if text.isdigit() else None


def stop(folder: Path, seconds: float = 30.0) -> bool:
    """End what runs in a folder, and wait until it has; False where nothing did."""
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
