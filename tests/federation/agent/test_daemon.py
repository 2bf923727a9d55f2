"""An agent's daemon as a separate process: permissions of its socket, crashes, invalid requests."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import poles
import pytest
import tomli_w

from perfedrl.errors import UserError
from perfedrl.experiments.files import named_leaves
from perfedrl.federation.agent import daemon as daemons
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.daemon_client import AgentUnreachable, DaemonError, call
from perfedrl.federation.agent.worker import Worker
from perfedrl.federation.frames import Frame

PLAN = tomli_w.dumps(
    {
        "name": "x",
        "seeds": [3],
        "rounds": 5,
        "fleet": {"env": "gridworld", "width": 3},
        "policy": {"name": "table"},
        "algorithm": {
            "name": "per-fedavg-pg",
            "variant": "first-order",
            "alpha": 0.5,
            "beta": 0.3,
            "local_steps": 2,
            "m_in": 4,
            "m_out": 4,
        },
    }
)
THETA = np.zeros((9, 4), np.float32)
HOURS = 7200.0
"""A sampler's pause that no test waits for."""
SCRIPT = """
import sys
from perfedrl.federation.agent.config import load_agent_config
from perfedrl.federation.agent.daemon import serve
serve(load_agent_config(sys.argv[1]), 2, sys.argv[2], sys.argv[3])
"""


def ask(path, kind="health", timeout=300, round_=0, **fields):
    about = {"run": "r", "generation": "1", "round": str(round_), "plan": PLAN, **fields}
    return call(path, Frame(kind, about, {"theta": THETA}), timeout)


class Process:
    """A daemon in a folder with a short path, which sockets need."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="pf", dir="/tmp"))
        self.socket, self.process = self.folder / "s" / "a.sock", None

    def start(self, pause=0.0, fleet=None):
        fleet = fleet or {"env": "robots:robot", "pause": pause, "calls": str(self.folder / "calls")}
        (self.folder / "agent.toml").write_text(tomli_w.dumps({"fleet": fleet}))
        arguments = [self.folder / "agent.toml", self.socket, self.folder / "own"]
        paths = [str(Path(__file__).parents[2] / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        with open(self.folder / "log", "a") as log:
            command = [sys.executable, "-X", "faulthandler", "-c", SCRIPT, *map(str, arguments)]
            self.process = subprocess.Popen(command, env=environment, stderr=log)
        until(self.answers)
        return self

    def answers(self):
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            return ask(self.socket, timeout=60)
        except AgentUnreachable:
            return None

    @property
    def calls(self):
        path = self.folder / "calls"
        return len(path.read_text().split()) if path.exists() else 0

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        try:
            return self.process.wait(600)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # writes where every thread is to the log
            self.process.wait(60)
            pytest.fail((self.folder / "log").read_text())


def until(what, seconds=180):
    end = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.05)
    return result


@pytest.fixture
def process():
    daemon = Process()
    yield daemon
    if daemon.process and daemon.process.poll() is None:
        daemon.end(signal.SIGKILL)
    shutil.rmtree(daemon.folder)


CLOSING = """
    def close(self):
        super().close()
        with open("closed", "a") as file:
            file.write("x")
"""


def test_a_daemon_closes_its_environments_before_it_ends(process, monkeypatch):
    (process.folder / "closing_poles.py").write_text(
        poles.MODULE + CLOSING.replace('"closed"', repr(str(process.folder / "closed")))
    )
    monkeypatch.syspath_prepend(process.folder)
    fleet = poles.agent_table(0, id="closing_poles:Pole")["fleet"]
    process.start(fleet=fleet)
    plan, closed = tomli_w.dumps(poles.table(1)), process.folder / "closed"
    message = Worker(make_agent_config({"fleet": fleet}), 2).training(plan).message
    fields = {"run": "r", "generation": "1", "round": "0", "plan": plan}
    assert call(process.socket, Frame("update", fields, named_leaves(message)), 300).kind == "upload"
    before = len(closed.read_text())
    assert process.end() == 0
    assert len(closed.read_text()) == before + poles.EPISODES["parallel"]


def honest() -> np.ndarray:
    """The upload of an undisturbed agent."""
    training = Worker(make_agent_config({"fleet": {"env": "robots:robot"}}), 2).training(PLAN)
    return training.update(THETA, training.state, 0)[0]


def test_a_daemon_answers_health_while_it_trains_and_survives_a_kill(process):
    process.start(pause=HOURS)
    assert process.socket.stat().st_mode & 0o777 == 0o600
    assert process.socket.parent.stat().st_mode & 0o777 == 0o700
    assert (process.folder / "own").stat().st_mode & 0o777 == 0o700
    failed = []

    def update():
        try:
            ask(process.socket, "update")
        except AgentUnreachable as error:
            failed.append(str(error))

    asking = threading.Thread(target=update)
    asking.start()
    until(lambda: process.calls >= 1)
    health = ask(process.socket).fields  # while the update is under way, which takes hours
    assert (health["busy"], health["run"], health["round"], health["name"]) == ("yes", "r", "0", "agent-2")
    assert int(health["pid"]) == process.process.pid
    assert 50e6 < int(health["rss"]) < 2e9
    process.end(signal.SIGKILL)
    asking.join(60)
    assert len(failed) == 1
    assert "ended before it answered" in failed[0]

    process.start()  # the dead daemon's socket is still there
    done = process.calls
    upload = ask(process.socket, "update")
    assert upload.tensors["theta"].tobytes() == honest().tobytes()
    assert process.calls == done + 4
    again = ask(process.socket, "update")
    assert again.tensors["theta"].tobytes() == upload.tensors["theta"].tobytes()
    assert process.calls == done + 4, "a repeated question took new trajectories"
    assert ask(process.socket).fields["busy"] == "no"

    garbage(process.socket)
    assert ask(process.socket, "update", round_=1).kind == "upload"
    with pytest.raises(DaemonError, match="is over"):
        ask(process.socket, "update")
    with pytest.raises(UserError, match="another agent"), daemons.listening(process.socket):
        pass
    assert process.end() == 0
    assert not process.socket.exists()
    assert "Traceback" not in (process.folder / "log").read_text()


def test_a_signal_that_the_system_hands_to_another_thread_ends_the_daemon(short, untyped):
    late = threading.Event()

    def give_up():
        late.set()
        daemon.stop()

    def signal_itself():
        time.sleep(0.2)  # until the main thread waits for requests
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        late.wait(60)  # a thread that goes on must not be what wakes the other one

    with daemons.listening(short / "own" / "a.sock") as listener:
        daemon = daemons.Daemon(None, listener)
        other, limit = threading.Thread(target=signal_itself, daemon=True), threading.Timer(30, give_up)
        with daemon.stopped_by_signals():
            other.start(), limit.start()
            daemon.run()
        limit.cancel()
        assert not late.is_set()
        late.set()


def garbage(path):
    """Send invalid requests, then more connections than the daemon accepts."""
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, b"\0" * 8, (9).to_bytes(8, "big") + b"x" * 9, b"\0\0"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            sock.connect(str(path))
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                while sock.recv(1000):
                    pass
    idle = [socket.socket(socket.AF_UNIX) for _ in range(daemons.MOST_CONNECTIONS)]
    for sock in idle:
        sock.connect(str(path))
    with pytest.raises((DaemonError, AgentUnreachable)):
        [ask(path, timeout=5) for _ in range(3)]
    for sock in idle:
        sock.close()
    until(lambda: healthy(path))


def healthy(path, kind="health"):
    try:
        return ask(path, kind, timeout=120)
    except (DaemonError, AgentUnreachable):
        return None


def test_a_busy_daemon_ends_on_sigterm(process):
    process.start(pause=HOURS)
    asking = threading.Thread(target=lambda: healthy(process.socket, "update"))
    asking.start()
    until(lambda: process.calls)
    assert process.end() == 0, "the daemon waited for the update"
    assert not process.socket.exists()
    asking.join(60)


@pytest.fixture
def short():
    folder = Path(tempfile.mkdtemp(prefix="pf", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_a_socket_is_created_only_where_other_users_cannot_write(short):
    with daemons.listening(short / "new" / "a.sock"):
        assert (short / "new").stat().st_mode & 0o777 == 0o700
        assert (short / "new" / "a.sock").stat().st_mode & 0o777 == 0o600
        with pytest.raises(UserError, match="another agent listens"), daemons.listening(short / "new" / "a.sock"):
            pass
    assert not (short / "new" / "a.sock").exists()
    (short / "file").write_text("precious")
    with pytest.raises(UserError, match="is not a socket"), daemons.listening(short / "file"):
        pass
    assert (short / "file").read_text() == "precious"
    with pytest.raises(UserError, match="longer"), daemons.listening(short / ("x" * 120)):
        pass
    (short / "open").mkdir()
    (short / "open").chmod(0o777)
    with pytest.raises(UserError, match="other users may write"), daemons.listening(short / "open" / "a.sock"):
        pass
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(short / "foreign.sock"))
        foreign.listen()
        with pytest.raises(UserError, match="another agent listens"), daemons.listening(short / "foreign.sock"):
            pass
    with daemons.listening(short / "foreign.sock"):  # its owner is gone
        pass


def test_two_agents_cannot_share_a_folder(short):
    config = make_agent_config({"fleet": {"env": "gridworld"}})
    (short / "own").mkdir()
    with (
        daemons.exclusive_lock(short / "own" / "lock", "taken"),
        pytest.raises(UserError, match="another agent is using"),
    ):
        daemons.serve(config, 0, short / "a.sock", short / "own")
