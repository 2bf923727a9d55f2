"""`make bench-recovery`: seconds from a SIGKILL of each process of a fleet to the rounds that follow.

Three agents on this machine train a small network without end; a round needs all of them. Each of the fleet's processes
is killed several times; reported is the median of the longest pause between two counted rounds.
"""

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import psutil
from bench_federation import SIZES, agent_config, config
from rich.console import Console
from rich.table import Table

from perfedrl.federation.agent.daemon_client import AgentUnreachable, call
from perfedrl.federation.engine import supervisor
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit
from perfedrl.federation.engine.local_fleet import local_fleet
from perfedrl.federation.frames import Frame
from perfedrl.federation.server.run_folder import RunFolder, Terms

ENDLESS, LIMIT = 10**6, 300.0
SETTLED, USUAL = 40, ("round", "repeated")
"""Rounds between two kills, and events that are not shown."""


def main() -> None:
    """Kill and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep the fleet's folder and its logs here")
    parser.add_argument("--times", type=int, default=3, help="kills of each process")
    parser.add_argument("--only", nargs="*", help="kill only these processes")
    parser.add_argument("--agents", type=int, default=3)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="perfedrl-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.toml").write_text(agent_config(options.agents))
    table = Table("killed", "median pause, s", "each", "events after the last kill")
    with local_fleet(folder / "fleet", options.agents, folder / "agent.toml") as fleet, training(fleet) as run_folder:
        for name, kill in victims(fleet).items():
            if options.only and name not in options.only:
                continue
            found = [measure(run_folder, kill) for _ in range(options.times)]
            pauses, events = zip(*found, strict=True)
            every = ", ".join(f"{x:.1f}" for x in pauses)
            table.add_row(name, f"{statistics.median(pauses):.1f}", every, events[-1])
    Console(width=150).print(table)


@contextmanager
def training(fleet: FleetFolder) -> Iterator[RunFolder]:
    """Train in a thread until the caller is done."""
    done = threading.Event()

    def watch(_: supervisor.View) -> None:
        if done.is_set():
            raise KeyboardInterrupt

    with supervisor.only_training(fleet):
        agents = len(fleet.info.agents)
        wanted, terms = config(SIZES["360"][0], ENDLESS, agents), Terms(agents, personalize=0)
        run_folder = supervisor.prepare(fleet, wanted, terms, restart=True)

        def train() -> None:
            with suppress(KeyboardInterrupt):
                supervisor.Supervisor(fleet, run_folder, 60.0, watch).run()

        thread = threading.Thread(target=train, daemon=True)
        thread.start()
        yield run_folder
        done.set()
        thread.join(60.0)


def victims(fleet: FleetFolder) -> dict[str, Callable[[], None]]:
    """What to kill, by name."""
    kit = Kit(fleet.kit(fleet.info.agents[-1]))

    def daemon() -> None:
        os.kill(int(call(kit.socket, Frame("health"), timeout=60.0).fields["pid"]), signal.SIGKILL)

    return {
        "server": lambda: kill("server_train", "nvflare.private", str(fleet.server)),
        "server's job": lambda: kill("runner_process", "nvflare.private", str(fleet.server)),
        "bridge": lambda: kill("client_train", "nvflare.private", str(kit.folder)),
        "bridge's job": lambda: kill("worker_process", "nvflare.private", str(kit.folder)),
        "join": lambda: kill("federation", "join", str(kit.folder)),
        "daemon": daemon,
    }


def kill(*words: str) -> None:
    """SIGKILL the oldest process whose command line contains all words: a younger one waits for the next job."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if all(word in " ".join(process.cmdline()) for word in words):
                found.append((process.create_time(), process))
    if not found:
        raise RuntimeError(f"no process with {words}")
    min(found, key=lambda pair: pair[0])[1].kill()


def measure(run_folder: RunFolder, kill: Callable[[], None]) -> tuple[float, str]:
    """Kill after a while; return the longest pause until training goes on, and what happened meanwhile."""
    wait_for(run_folder, 0, SETTLED)
    while True:
        with suppress(AgentUnreachable):
            start, began = run_folder.events_since(0)[1], time.time()
            kill()
            break
        time.sleep(0.2)
    events = wait_for(run_folder, start, SETTLED)
    rounds = [began, *(event["time"] for event in events if event["event"] == "round")]
    told = [f"{event['event']}+{event['time'] - began:.1f}" for event in events if event["event"] not in USUAL]
    return max(later - earlier for earlier, later in pairwise(rounds)), " ".join(told)


def wait_for(run_folder: RunFolder, start: int, rounds: int) -> list[dict]:
    """Wait until the last so many events since an offset are rounds; return the events."""
    end = time.monotonic() + LIMIT
    while True:
        events = run_folder.events_since(start)[0]
        if len(events) >= rounds and all(event["event"] == "round" for event in events[-rounds:]):
            return events
        if time.monotonic() > end:
            raise RuntimeError(f"training did not go on: {events[-3:]}")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
