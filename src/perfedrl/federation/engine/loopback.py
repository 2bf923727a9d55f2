"""A whole fleet on one machine: the server and every agent in processes of their own, over the loopback device."""

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from perfedrl.federation.engine.fleet_folder import FleetFolder
from perfedrl.federation.engine.processes import environment
from perfedrl.federation.engine.provision import init
from perfedrl.federation.restarting_process import Keeper


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def machines(
    folder: Path, agents: int, agent_config: Path, joining: Sequence[str] | None = None
) -> Iterator[FleetFolder]:
    """A new fleet whose server and agents all run here, each in processes of its own, as they would elsewhere.

    Of the agents only those in `joining`, if it is given.
    """
    init(folder, agents, port=free_port())
    fleet = FleetFolder(folder)
    with ExitStack() as running:
        for name, arguments in {
            "server": ["server", str(folder)],
            **{name: join_arguments(fleet, name, agent_config) for name in joining or fleet.about.agents},
        }.items():
            running.enter_context(machine(arguments, folder / f"{name}.out"))
        yield fleet


def join_arguments(fleet: FleetFolder, name: str, agent_config: Path) -> list[str]:
    return ["join", str(fleet.kit(name)), "--agent-config", str(agent_config)]


@contextmanager
def machine(arguments: Sequence[str], log: Path) -> Iterator[Keeper]:
    """`perfedrl federation ...` in a process of its own, until the end."""
    command = [sys.executable, "-m", "perfedrl", "federation", *arguments]
    keeper = Keeper(command, log, environment(), Path.cwd()).start()
    try:
        yield keeper
    finally:
        keeper.stop()
