"""NVFlare's connections are ours: its processes find the drivers, and Unix sockets are private."""

import json
import socket
import stat
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo, Mode
from nvflare.fuel.f3.drivers.net_utils import parse_url
from real_fleet import wait_until

from perfedrl.errors import UserError
from perfedrl.federation.engine import driver, processes, provision
from perfedrl.federation.engine.connection_log import ConnectionLog
from perfedrl.federation.engine.driver import SOCKETS, UNIX, UnixDriver
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit, socket_folder

LOOK = """
from nvflare.fuel.f3.communicator import driver_mgr, load_comm_drivers
load_comm_drivers()
print(*(driver_mgr.find_driver_class(url).__name__ for url in ("tcp://a:1", "stcp://a:1", "perfedrl-unix://0/a")))
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver") / "fleet"
    provision.init(folder, 1, port=8767)
    return FleetFolder(folder)


def test_nvflares_processes_find_the_drivers(fleet):
    """It knows schemes of its own only, so one of them is replaced; this test fails if a new version forbids that."""
    env = processes.client_process(Kit(fleet.kit("agent-0"))).env
    found = subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["TlsDriver", "TlsDriver", "UnixDriver"]


def test_a_fleets_settings_name_these_connections(fleet):
    for kit, file in ((fleet.server, "fed_server.json"), (fleet.kit("agent-0"), "fed_client.json")):
        settings = json.loads((kit / "startup" / file).read_text())
        assert settings["servers"][0]["service"]["scheme"] == driver.SCHEME
        assert json.loads((kit / "local" / "comm_config.json").read_text())["internal"]["scheme"] == UNIX


class Monitor:
    """What NVFlare's manager of connections does with a driver: it counts connections and keeps frames."""

    def __init__(self, name):
        self.local_endpoint, self.connections, self.frames = SimpleNamespace(name=name), [], []

    def state_change(self, connection):
        self.connections.append(connection)
        connection.register_frame_receiver(SimpleNamespace(process_frame=self.frames.append))


@pytest.fixture
def sockets(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("s", numbered=True)
    folder.chmod(0o700)
    monkeypatch.setenv(SOCKETS, str(folder))
    return folder


def start(monitor, url, mode):
    """A driver that listens or connects, in a thread as NVFlare starts it."""
    one = UnixDriver()
    one.register_conn_monitor(monitor)
    connector = ConnectorInfo("handle", one, parse_url(url), mode, 0, 0, False, threading.Event())
    threading.Thread(target=one.listen if mode == Mode.PASSIVE else one.connect, args=(connector,), daemon=True).start()
    return one


def test_processes_of_one_machine_talk_over_a_socket_that_only_their_user_can_reach(sockets):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(sockets / "engine-dead.sock"))
    url, same = UnixDriver.get_urls(UNIX, {})
    assert url == same
    parent, child = Monitor("server"), Monitor("server.job")
    listening = start(parent, url, Mode.PASSIVE)
    connecting = start(child, url, Mode.ACTIVE)
    wait_until(lambda: parent.connections and child.connections)
    child.connections[0].send_frame(b"from the job")
    wait_until(lambda: parent.frames == [b"from the job"])
    (path,) = sockets.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    connecting.shutdown()
    wait_until(lambda: len(parent.connections) == 2)
    with pytest.raises(CommError):
        child.connections[0].send_frame(b"too late")
    listening.shutdown()


def test_sockets_in_a_folder_of_others_are_an_error(fleet, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    folder = socket_folder(fleet.info)
    assert folder.parent.as_posix() == "/tmp", "the other one is gone when its user logs out"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    try:
        with pytest.raises(UserError, match="other users may write to"):
            processes.engine_environment(fleet.info)
    finally:
        folder.chmod(0o700)
    monkeypatch.delenv(SOCKETS, raising=False)
    with pytest.raises(CommError, match=SOCKETS):
        UnixDriver.get_urls(UNIX, {})


def test_a_log_of_connections_is_read_line_by_line(tmp_path):
    path = tmp_path / "connections.log"
    told = ConnectionLog(path)
    assert told.new_lines() == []
    path.write_text("today agent-1 is connected\ntoday agent-11 is connected\n")
    assert told.new_lines() == ["today agent-1 is connected", "today agent-11 is connected"]
    assert told.new_lines() == []
    path.write_text("later agent-1 was refused\n")
    assert told.new_lines() == ["later agent-1 was refused"], "a log that was begun anew"
    assert told.last("agent-1") == "later agent-1 was refused"
    assert told.last("agent-2") is None
