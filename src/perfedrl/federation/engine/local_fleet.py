"""A whole fleet on one machine: the server and every agent in their own processes, over the loopback device."""

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from perfedrl.federation.engine.fleet_folder import FleetFolder
from perfedrl.federation.engine.processes import environment
from perfedrl.federation.engine.provision import init
from perfedrl.federation.restarting_process import RestartingProcess


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def local_fleet(
    folder: Path, agents: int, agent_config: Path, joining: Sequence[str] | None = None
) -> Iterator[FleetFolder]:
    """Run a new fleet on this machine; if given, only agents in `joining` join."""
    init(folder, agents, port=free_port())
    with started(FleetFolder(folder), agent_config, joining) as fleet:
        yield fleet


@contextmanager
def started(fleet: FleetFolder, agent_config: Path, joining: Sequence[str] | None = None) -> Iterator[FleetFolder]:
    """Run a fleet on this machine, each member in processes of its own; if given, only agents in `joining` join."""
    with ExitStack() as running:
        for name, arguments in {
            "server": ["server", str(fleet.folder)],
            **{name: join_arguments(fleet, name, agent_config) for name in joining or fleet.info.agents},
        }.items():
            running.enter_context(federation_command(arguments, fleet.folder / f"{name}.out"))
        yield fleet


def join_arguments(fleet: FleetFolder, name: str, agent_config: Path) -> list[str]:
    """The arguments of `perfedrl federation` with which an agent joins."""
    return ["join", str(fleet.kit(name)), "--agent-config", str(agent_config)]


@contextmanager
def federation_command(arguments: Sequence[str], log: Path) -> Iterator[RestartingProcess]:
    """Run `perfedrl federation ...` in a process of its own."""
    command = [sys.executable, "-m", "perfedrl", "federation", *arguments]
    process = RestartingProcess(command, log, environment(), Path.cwd()).start()
    try:
        yield process
    finally:
        process.stop()
