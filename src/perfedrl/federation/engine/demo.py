"""`perfedrl federation demo`: a server and three agents on one machine over TLS, one of which is killed."""

import os
import signal
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from perfedrl.experiments.config import Config, make_config
from perfedrl.federation.agent.daemon_client import call
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit
from perfedrl.federation.engine.local_fleet import local_fleet
from perfedrl.federation.engine.supervisor import Supervisor, View, Watch, finished, only_training, prepare
from perfedrl.federation.frames import Frame
from perfedrl.federation.server.network_config import networked
from perfedrl.federation.server.run_folder import RunFolder, Terms
from perfedrl.studies.few_shot.study import recommended

AGENTS, ROUNDS, DEATH = 3, 150, 20
"""The number of agents, the number of rounds, and the round after which one agent is killed."""
VICTIM = 1


def config() -> Config:
    """The recommended settings on three goals."""
    table = tomllib.loads(recommended(1).to_toml())
    table |= {"name": "federation-demo", "rounds": ROUNDS, "evaluate_every": ROUNDS // 3}
    table["fleet"] = {"env": "arc", "goals": AGENTS, "held_out": 0}
    return make_config(table)


def run(folder: Path, watch: Watch) -> tuple[Path, RunFolder]:
    """Train the demonstration's config; return the folder of the finished run and the run's folder with its log."""
    folder.mkdir(parents=True, exist_ok=True)
    agent_config = folder / "agent.toml"
    agent_config.write_text(f'[fleet]\nenv = "arc"\ngoals = {AGENTS}\nheld_out = 0\n', encoding="utf-8")
    with local_fleet(folder / "fleet", AGENTS, agent_config) as fleet:
        wanted = networked(config())
        with only_training(fleet):
            run_folder = prepare(fleet, wanted, Terms(AGENTS - 1, deadline=60.0))
            Supervisor(fleet, run_folder, wait=60.0, watch=_killing(fleet, run_folder, watch)).run()
        done = finished(fleet, wanted)
    assert done is not None
    return done, run_folder


def _killing(fleet: FleetFolder, run_folder: RunFolder, watch: Watch) -> Watch:
    """Wrap a `watch` function so that it also kills one agent's daemon after round DEATH."""
    killed: list[Any] = []

    def look(view: View) -> None:
        watch(view)
        if view.progress.get("round", 0) >= DEATH and not killed:
            kit = Kit(fleet.kit(fleet.info.agents[VICTIM]))
            pid = int(call(kit.socket, Frame("health"), timeout=5.0).fields["pid"])
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            run_folder.log("killed", agent=kit.info.agent, round=view.progress["round"])

    return look


def story(events: Sequence[dict[str, Any]]) -> list[str]:
    """Summarize the log in sentences."""
    rounds = [event for event in events if event["event"] == "round"]
    victim = f"agent-{VICTIM}"
    without = [event["round"] for event in rounds if victim not in event["agents"]]
    lines = [f"{len(rounds)} rounds over mutual TLS, {_seconds_per_round(rounds):.2f} s each (median)"]
    if without:
        after = [event["round"] for event in rounds if event["round"] > without[-1] and victim in event["agents"]]
        back = f"it rejoined by itself in round {after[0]}" if after else "it did not rejoin before the end"
        lines.append(
            f"{victim} was killed: rounds {without[0]} to {without[-1]} continued with the other two, and {back}"
        )
    own = [event for event in events if event["event"] == "personalized"]
    lines += [
        f"{event['agent']} personalized on its own machine: return {event['before.return']:.2f} -> "
        f"{event['after.return']:.2f}"
        for event in own
    ]
    return lines


def _seconds_per_round(rounds: Sequence[dict[str, Any]]) -> float:
    """The median time between two rounds."""
    times = [event["time"] for event in rounds]
    return median(later - earlier for earlier, later in pairwise(times)) if len(times) > 1 else float("nan")
