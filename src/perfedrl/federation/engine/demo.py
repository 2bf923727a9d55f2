"""A fleet on one machine, to see it work: a server and three agents over TLS, one of which dies on the way."""

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
from perfedrl.federation.engine.loopback import machines
from perfedrl.federation.engine.supervisor import Supervisor, View, Watch, finished, prepare
from perfedrl.federation.frames import Frame
from perfedrl.federation.server.run_folder import Control, Terms
from perfedrl.studies.curvature.study import recommended

AGENTS, ROUNDS, DEATH = 3, 150, 20
"""How many agents, how many rounds, and after which of them one agent is killed."""
VICTIM = 1


def config() -> Config:
    """The recommended recipe on three goals."""
    table = tomllib.loads(recommended(1).to_toml())
    table |= {"name": "federation-demo", "rounds": ROUNDS, "evaluate_every": ROUNDS // 3}
    table["fleet"] = {"env": "arc", "goals": AGENTS, "held_out": 0}
    return make_config(table)


def run(folder: Path, watch: Watch) -> tuple[Path, Control]:
    """Train the demonstration's config; the finished run and the folder with what happened."""
    folder.mkdir(parents=True, exist_ok=True)
    agent_config = folder / "agent.toml"
    agent_config.write_text(f'[fleet]\nenv = "arc"\ngoals = {AGENTS}\nheld_out = 0\n', encoding="utf-8")
    with machines(folder / "fleet", AGENTS, agent_config) as fleet:
        wanted = config()
        control = prepare(fleet, wanted, Terms(AGENTS - 1, deadline=60.0))
        Supervisor(fleet, control, wait=60.0, watch=_killing(fleet, control, watch)).run()
        done = finished(fleet, wanted)
    assert done is not None
    return done, control


def _killing(fleet: FleetFolder, control: Control, watch: Watch) -> Watch:
    """Watch on, and kill one agent's daemon when the time has come."""
    killed: list[Any] = []

    def look(view: View) -> None:
        watch(view)
        if view.progress.get("round", 0) >= DEATH and not killed:
            kit = Kit(fleet.kit(fleet.about.agents[VICTIM]))
            pid = int(call(kit.socket, Frame("health"), timeout=5.0).fields["pid"])
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            control.say("killed", agent=kit.about.agent, round=view.progress["round"])

    return look


def story(events: Sequence[dict[str, Any]]) -> list[str]:
    """What happened, in sentences."""
    rounds = [event for event in events if event["event"] == "round"]
    victim = f"agent-{VICTIM}"
    without = [event["round"] for event in rounds if victim not in event["agents"]]
    lines = [f"{len(rounds)} rounds over mutual TLS, {_pace(rounds):.2f} s each (median)"]
    if without:
        after = [event["round"] for event in rounds if event["round"] > without[-1] and victim in event["agents"]]
        back = f"it was back by itself in round {after[0]}" if after else "it was not back before the end"
        lines.append(
            f"{victim} was killed: rounds {without[0]} to {without[-1]} went on with the other two, and {back}"
        )
    own = [event for event in events if event["event"] == "personalized"]
    lines += [
        f"{event['agent']} personalized on its own machine: return {event['before.return']:.2f} -> "
        f"{event['after.return']:.2f}"
        for event in own
    ]
    return lines


def _pace(rounds: Sequence[dict[str, Any]]) -> float:
    times = [event["time"] for event in rounds]
    return median(later - earlier for earlier, later in pairwise(times)) if len(times) > 1 else float("nan")
