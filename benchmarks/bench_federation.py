"""`make bench-federation`: the cost of a round over NVFlare with mutual TLS, compared to plain sockets.

Three agents on this machine, a trivial local step, two parameter sizes. Reports medians over rounds, the bytes that the
system counts on the server's connections (`ss`), and resident memory.
"""

import argparse
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from perfedrl.experiments.config import make_config
from perfedrl.federation.engine import supervisor
from perfedrl.federation.engine.local_fleet import local_fleet
from perfedrl.federation.frames import Frame, decode, encode, receive_raw, send_raw
from perfedrl.federation.server.run_folder import Terms

AGENTS = 3
SIZES = {"360": ((32,), 100), "1,000,000": ((994, 994), 40)}
"""By the number of parameters: the hidden layers of a network, and the number of rounds to time."""
TARGETS = {"360": 0.5, "1,000,000": 1.0}
PEER = """
import socket, sys
import numpy as np
from perfedrl.federation.frames import Frame, decode, encode, receive_raw, send_raw
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as sock:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        frame = decode(receive_raw(sock))
        moved = {name: x + np.float32(1e-3) for name, x in frame.tensors.items()}
        send_raw(sock, encode(Frame("upload", frame.fields, moved)))
"""


def agent_config(agents: int) -> str:
    """The file of every agent."""
    return f'[fleet]\nenv = "arc"\ngoals = {agents}\nheld_out = 0\nhorizon = 1\n'


def config(hidden: tuple[int, ...], rounds: int, agents: int = AGENTS):
    return make_config(
        {
            "name": f"bench-{hidden[0]}",
            "seeds": [0],
            "rounds": rounds,
            "evaluate_every": rounds,
            "fleet": {"env": "arc", "goals": agents, "held_out": 0, "horizon": 1},
            "policy": {"name": "mlp", "hidden": list(hidden)},
            "algorithm": {"name": "fedavg-pg", "alpha": 0.1, "beta": 0.01, "local_steps": 1, "m": 2},
            "evaluation": {"name": "monte-carlo", "trajectories": 2, "episodes": 2},
            "aggregation": "mean",  # so that the network is measured, not the aggregation
        }
    )


def parameters(config) -> int:
    return sum(x.size for x in jax.tree.leaves(config.experiment.policy.init(jax.random.key(0))))


class Meter(threading.Thread):
    """Counter of the bytes on the server's connections during a run."""

    def __init__(self, port: int):
        super().__init__(daemon=True)
        self.port, self.samples, self.stopping = port, [], False
        self.start()

    def run(self) -> None:
        while not self.stopping and shutil.which("ss"):
            text = subprocess.run(
                ["ss", "-tinH", f"sport = :{self.port}"], capture_output=True, text=True, check=False
            ).stdout
            moved = sum(int(x) for x in re.findall(r"bytes_(?:sent|received):(\d+)", text))
            self.samples.append((time.time(), moved))
            time.sleep(0.1)

    def between(self, start: float, end: float) -> float | None:
        """Bytes per second between two moments; None without two samples."""
        within = [sample for sample in self.samples if start <= sample[0] <= end]
        if len(within) < 2 or within[-1][0] == within[0][0]:
            return None
        return (within[-1][1] - within[0][1]) / (within[-1][0] - within[0][0])


def networked(fleet, hidden: tuple[int, ...], rounds: int) -> dict:
    """Seconds and bytes of a round over NVFlare, and the memory of its processes."""
    wanted, memory = config(hidden, rounds), {}
    meter = Meter(fleet.info.port)

    def watch(view) -> None:
        if view.progress.get("round", 0) > rounds // 2 and not memory:
            memory.update(resident(fleet))

    with supervisor.only_training(fleet):
        run_folder = supervisor.prepare(fleet, wanted, Terms(AGENTS, personalize=0), restart=True)
        supervisor.Supervisor(fleet, run_folder, 60.0, watch).run()
    meter.stopping = True
    events = [event for event in run_folder.events() if event["event"] == "round"][3:]
    times = [event["time"] for event in events]
    seconds = statistics.median(later - earlier for earlier, later in pairwise(times))
    rate = meter.between(times[0], times[-1])
    per_round = (times[-1] - times[0]) / (len(times) - 1)
    wire = None if rate is None else rate * per_round / AGENTS
    return {"seconds": seconds, "frames": sum(events[-1]["bytes"]), "wire": wire, "memory": memory}


def resident(fleet) -> dict[str, float]:
    """Megabytes of each process of one agent and of the server."""
    kit, kinds = str(fleet.kit("agent-0")), {}
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            size = process.memory_info().rss / 2**20
        except psutil.Error:
            continue
        for name, words in {
            "daemon": ("perfedrl agent", kit),
            "bridge, client": ("client_train", kit),
            "bridge, job": ("worker_process", kit),
            "server": ("server_train", str(fleet.server)),
            "server, job": ("runner_process", str(fleet.server)),
        }.items():
            if all(word in line for word in words):
                kinds[name] = size
    return kinds


def bare(size: int, rounds: int) -> float:
    """Seconds per round of the same averaging over plain TCP sockets, with three answering processes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        peers = [subprocess.Popen([sys.executable, "-c", PEER, str(port)]) for _ in range(AGENTS)]
        lines = [listening.accept()[0] for _ in range(AGENTS)]
    for line in lines:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    theta, times = np.zeros(size, np.float32), []
    try:
        for k in range(rounds):
            began = time.perf_counter()
            data = encode(Frame("update", {"round": str(k)}, {"theta": theta}))
            for line in lines:
                send_raw(line, data)
            uploads = [decode(receive_raw(line)).tensors["theta"] for line in lines]
            theta = np.mean(uploads, axis=0, dtype=np.float32)
            times.append(time.perf_counter() - began)
    finally:
        for peer in peers:
            peer.kill()
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="keep the fleet's folder and its logs here")
    console = Console(width=140)
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp(prefix="perfedrl-bench-"))
    table = Table("parameters", "s/round", "target", "bare sockets", "ratio", "frames", "on the wire", "2 d floats")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.toml").write_text(agent_config(AGENTS))
    with local_fleet(folder / "fleet", AGENTS, folder / "agent.toml") as fleet:
        for name, (hidden, rounds) in SIZES.items():
            size = parameters(config(hidden, rounds))
            plain = bare(size, rounds)
            found = networked(fleet, hidden, rounds)
            wire = "no `ss`" if found["wire"] is None else f"{found['wire']:,.0f}"
            row = f"{found['seconds']:.3f}", f"< {TARGETS[name]}", f"{plain:.4f}", f"{found['seconds'] / plain:.0f}"
            table.add_row(name, *row, f"{found['frames']:,}", wire, f"{8 * size:,}")
            memory = ", ".join(f"{kind} {size:.0f}" for kind, size in found["memory"].items())
            console.print(f"{name} parameters, MB of one agent and of the server: {memory}")
    table.caption = (
        "seconds are medians; bytes are per agent and round in both directions, as frames and on the wire with TLS"
    )
    console.print(table)


if __name__ == "__main__":
    main()
