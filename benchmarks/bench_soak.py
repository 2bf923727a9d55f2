"""`make bench-soak`: memory, threads, open files and logs of a fleet's processes over many rounds.

Agents on this machine train a small network. The table has one row for each kind of process, with the largest of its
kind at several rounds; the last column compares the last with the first.
"""

import argparse
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from bench_federation import SIZES, agent_config, config
from rich.console import Console
from rich.table import Table

from perfedrl.federation.engine import supervisor
from perfedrl.federation.engine.fleet_folder import FleetFolder
from perfedrl.federation.engine.local_fleet import local_fleet
from perfedrl.federation.server.run_folder import Terms

KINDS = {
    "server": ("nvflare.private", "server_train"),
    "server, job": ("nvflare.private", "runner_process"),
    "bridge": ("nvflare.private", "client_train"),
    "bridge, job": ("nvflare.private", "worker_process"),
    "daemon": ("perfedrl agent",),
}
MEASURES = ("MB", "threads", "files")
Sizes = dict[str, tuple[float, int, int]]


def main() -> None:
    """Train and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep the fleet's folder and its logs here")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--first", type=int, default=200, help="the round with which the last one is compared")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="perfedrl-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.toml").write_text(agent_config(options.agents))
    wanted = config(SIZES["360"][0], options.rounds, options.agents)
    marks = sorted({options.first, options.rounds // 2, options.rounds - 1})
    with local_fleet(folder / "fleet", options.agents, folder / "agent.toml") as fleet:
        found = soak(fleet, wanted, marks, options.agents)
    show(found)


def soak(fleet: FleetFolder, wanted: Any, marks: list[int], agents: int) -> dict[int, Sizes]:
    """Train, and measure the processes at some rounds."""
    found: dict[int, Sizes] = {}

    def watch(view: supervisor.View) -> None:
        due = [mark for mark in marks if mark not in found and view.progress.get("round", 0) >= mark]
        if due:
            found[due[0]] = sizes(fleet)

    with supervisor.only_training(fleet):
        run_folder = supervisor.prepare(fleet, wanted, Terms(agents, personalize=0), restart=True)
        supervisor.Supervisor(fleet, run_folder, 60.0, watch).run()
    times = [event["time"] for event in run_folder.events() if event["event"] == "round"]
    logs = sum(path.stat().st_size for path in fleet.folder.rglob("*.log*")) / len(times)
    print(f"{len(times)} rounds, {(times[-1] - times[0]) / (len(times) - 1):.3f} s each, {logs:.0f} bytes of logs each")
    return found


def sizes(fleet: FleetFolder) -> Sizes:
    """Megabytes, threads and open files of the largest process of each kind that has a job."""
    largest: Sizes = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            for kind, words in KINDS.items():
                if str(fleet.folder) in line and all(word in line for word in words):
                    now = process.memory_info().rss / 2**20, process.num_threads(), process.num_fds()
                    largest[kind] = max(largest.get(kind, now), now)
    return largest


def show(found: dict[int, Sizes]) -> None:
    """Print the table."""
    marks = sorted(found)
    table = Table("process", *(f"round {mark}: {', '.join(MEASURES)}" for mark in marks), "last / first")
    for kind in KINDS:
        rows = [found[mark].get(kind, (0.0, 0, 0)) for mark in marks]
        ratios = [f"{last / first:.2f}" if first else "-" for first, last in zip(rows[0], rows[-1], strict=True)]
        table.add_row(kind, *(f"{row[0]:.0f}, {row[1]}, {row[2]}" for row in rows), ", ".join(ratios))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
