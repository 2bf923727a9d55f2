"""One hostile kit in a real fleet over TLS: failing processes, floods of messages, and huge answers."""

import os
from contextlib import contextmanager, suppress

import psutil
import pytest
import real_fleet

from perfedrl.federation.engine import supervisor
from perfedrl.federation.engine.fleet_folder import Kit
from perfedrl.federation.engine.processes import client_process, daemon_process
from perfedrl.federation.server.run_folder import Terms

pytestmark = pytest.mark.network

MDPS = {"env": "random-mdps", "agents": 2}
AGENT = '[fleet]\nenv = "random-mdps"\nagents = 2\n'
ENDLESS, ROUNDS = 10**6, 20
HOSTILE = """
import os, sys, threading

if "worker_process" in " ".join(sys.orig_argv):
    if os.environ["HOSTILE"] == "fails":
        os._exit(1)
    from nvflare.apis.shareable import Shareable
    from nvflare.fuel.f3.cellnet.utils import new_cell_message
    from perfedrl.federation.engine import bridge

    honest = bridge.AgentBridge.execute

    def flood(cell):
        for _ in range(20000):
            message = new_cell_message({}, Shareable())
            cell.fire_and_forget(channel="task", topic="heart_beat", targets="server", message=message)

    def execute(self, task, shareable, fl_ctx, abort_signal):
        reply = honest(self, task, shareable, fl_ctx, abort_signal)
        if task == "update" and os.environ["HOSTILE"] == "huge":
            reply[bridge.FRAME] = bytes(200 * 2**20)
        elif task == "update" and os.environ["HOSTILE"] == "floods":
            os.environ["HOSTILE"] = "flooded"
            threading.Thread(target=flood, args=[fl_ctx.get_engine().get_cell()], daemon=True).start()
        return reply

    bridge.AgentBridge.execute = execute
"""
"""A modified program on the hostile machine."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Two kits, of which the first has joined honestly."""
    folder = tmp_path_factory.mktemp("kit")
    with real_fleet.running_fleet(folder, 2, AGENT, joining=("agent-0",)) as fleet:
        yield fleet


@contextmanager
def hostile_kit(fleet, way):
    """The second kit joins with a modified program."""
    kit, own = Kit(fleet.kit("agent-1")), fleet.folder.parent / way
    own.mkdir()
    (own / "sitecustomize.py").write_text(HOSTILE)
    kit.state.mkdir(mode=0o700, exist_ok=True)
    daemon, client = daemon_process(kit, fleet.folder.parent / "agent.toml", None), client_process(kit)
    client.env |= {"PYTHONPATH": f"{own}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "HOSTILE": way}
    try:
        daemon.start()
        client.start()
        yield
    finally:
        client.stop()
        daemon.stop()


def server_memory(fleet):
    """Megabytes of the server's processes."""
    sizes = [0.0]
    for process in real_fleet.processes("nvflare.private", fleet.server):
        with suppress(psutil.Error):
            sizes.append(process.memory_info().rss / 2**20)
    return sum(sizes)


def train_beside(fleet, way, kind):
    """Train until an event of some kind names the hostile kit, and some rounds more.

    Return the log and the server's largest memory in megabytes.
    """
    memory, after = [], []

    def watch(view):
        memory.append(server_memory(fleet))
        named = after or any(event["event"] == kind and event["agent"] == "agent-1" for event in view.news)
        after.extend(event for event in view.news if named and event["event"] in ("round", kind))
        if sum(event["event"] == "round" for event in after) >= ROUNDS:
            raise KeyboardInterrupt

    with hostile_kit(fleet, way), supervisor.only_training(fleet):
        terms = Terms(1, deadline=5.0, personalize=0)
        run_folder = supervisor.prepare(fleet, real_fleet.config(way, ENDLESS, fleet=MDPS), terms)
        with pytest.raises(KeyboardInterrupt):
            supervisor.Supervisor(fleet, run_folder, 60.0, watch).run()
    return run_folder.events(), max(memory)


def test_a_kit_whose_processes_always_fail_is_excluded_and_the_others_go_on(fleet):
    events, _ = train_beside(fleet, "fails", "excluded")
    assert sum(event["event"] == "submitted" for event in events) <= 3, "nobody is disturbed more often than necessary"


def test_a_kit_that_floods_is_named_and_the_others_go_on(fleet):
    train_beside(fleet, "floods", "excess")


def test_huge_answers_are_not_taken_into_memory(fleet):
    events, memory = train_beside(fleet, "huge", "excess")
    assert not any("agent-1" in event["agents"] for event in events if event["event"] == "round")
    assert memory < 1500, "the server took in what no answer of this run can be"
