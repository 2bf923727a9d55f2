"""A real fleet on a bad network: faulty connections, idle strangers, local users, and copies of kits."""

import resource
import shutil
import socket
import threading
from contextlib import contextmanager

import psutil
import pytest
import real_fleet
from faulty_proxy import FaultyProxy
from real_fleet import connected, rounds_in, same_bits, wait_until

from perfedrl.federation.engine import local_fleet, processes, provision
from perfedrl.federation.engine.admin_session import ServerUnreachable
from perfedrl.federation.engine.fleet_folder import Kit

pytestmark = pytest.mark.network

STRANGERS = 5000


@pytest.fixture(scope="module")
def proxy():
    port = local_fleet.free_port()
    with FaultyProxy(port, 0, seed=1) as proxy:
        proxy.harmless = True
        yield proxy


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, proxy):
    """A fleet whose agents, but not the operator, reach the server through the proxy."""
    sign = provision.sign_kit

    def sign_for_the_proxy(kit, key):
        if kit.parent.name == "kits":
            path = kit / "startup" / "fed_client.json"
            path.write_text(path.read_text().replace(f"localhost:{proxy._target}", f"localhost:{proxy.port}"))
        sign(kit, key)

    def port():
        proxy._target = local_free_port()
        return proxy._target

    local_free_port = local_fleet.free_port
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provision, "sign_kit", sign_for_the_proxy)
        patch.setattr(local_fleet, "free_port", port)
        with real_fleet.running_fleet(tmp_path_factory.mktemp("faulty")) as fleet:
            wait_until(lambda: everybody_is_connected(fleet))
            yield fleet


def everybody_is_connected(fleet):
    try:
        return connected(fleet) == set(fleet.info.agents)
    except ServerUnreachable:
        return False


def test_a_run_through_a_faulty_network_has_the_simulators_bits(fleet, proxy, tmp_path):
    """Connections are reset, cut, delayed and reordered at random from before the first round to the last."""
    wanted = real_fleet.config("faulty", 60)
    proxy.harmless = False
    try:
        run, events = real_fleet.train(fleet, wanted)
    finally:
        proxy.harmless = True
    assert rounds_in(events) == list(range(60))
    assert sum(event["event"] == "submitted" for event in events) == 1, "a fault cost a job"
    assert not [event for event in events if event["event"] in ("silent", "failure", "repeated")]
    assert all(proxy.faults[kind] for kind in ("reset", "cut", "delayed", "reordered")), proxy.faults
    same_bits(run, wanted, tmp_path)


def test_an_agents_hanging_process_is_replaced(fleet, tmp_path):
    """Its connections stay open, and all agents are needed: without a new job the run would end in an error."""
    wanted = real_fleet.slow(12)
    training = real_fleet.Training(fleet, wanted, deadline=10.0, patience=600.0)
    training.until(2)
    found = real_fleet.processes("worker_process", fleet.kit("agent-2"))
    (hanging,) = (process for process in found if process.net_connections("inet"))
    hanging.suspend()
    run, events = training.result()
    assert [event["agents"] for event in events if event["event"] == "membership"] == [["agent-2"]]
    wait_until(lambda: not hanging.is_running())
    assert rounds_in(events) == list(range(12))
    same_bits(run, wanted, tmp_path)


@contextmanager
def strangers(port, count):
    """Connections that send nothing; those that the server closes are opened again."""
    stopping, held = threading.Event(), []

    def connect():
        idle = socket.socket()
        idle.settimeout(10)
        idle.connect(("127.0.0.1", port))
        idle.setblocking(False)
        return idle

    def open_again():
        while not stopping.wait(0.02):
            for k in range(0, len(held), 97):
                try:
                    closed = held[k].recv(1) == b""
                except BlockingIOError:
                    closed = False
                except OSError:
                    closed = True
                if closed:
                    held[k].close()
                    held[k] = connect()

    held += [connect() for _ in range(count)]
    thread = threading.Thread(target=open_again)
    thread.start()
    try:
        yield held
    finally:
        stopping.set()
        thread.join()
        for idle in held:
            idle.close()


@pytest.fixture
def many_files():
    """Let this process open enough files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < STRANGERS + 1000:
        pytest.skip(f"this machine allows {hard} open files per process, and {STRANGERS + 1000} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, STRANGERS + 1000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_thousands_of_idle_strangers_do_not_stop_training(fleet, many_files, tmp_path):
    wanted = real_fleet.config("crowded", 10)
    with strangers(fleet.info.port, STRANGERS) as held:
        run, events = real_fleet.train(fleet, wanted)
        assert len(held) == STRANGERS
        (server,) = real_fleet.processes("server_train", fleet.server)
        assert server.num_fds() < 1000
    assert rounds_in(events) == list(range(10))
    assert sum(event["event"] == "submitted" for event in events) == 1
    same_bits(run, wanted, tmp_path)


def listening_ports(found):
    """The TCP ports on which some processes or their descendants listen."""
    everybody = {one for process in found for one in (process, *process.children(recursive=True))}
    return {
        end.laddr.port for one in everybody for end in one.net_connections("inet") if end.status == psutil.CONN_LISTEN
    }


def test_only_the_servers_port_is_open(fleet):
    """While a job runs, when each machine has several processes of NVFlare that talk to each other."""
    training = real_fleet.Training(fleet, real_fleet.slow(6))
    training.until(1)
    assert real_fleet.processes("worker_process", fleet.kit("agent-0"))
    assert listening_ports(real_fleet.processes("federation", "server", fleet.folder)) == {fleet.info.port}
    for name in fleet.info.agents:
        joined = real_fleet.processes("federation", "join", fleet.kit(name))
        assert len(joined) == 1
        assert listening_ports(joined) == set()
    training.result()


def test_a_copied_kit_is_refused_while_its_agent_answers_and_everybody_is_told(fleet, run, tmp_path):
    shutil.copytree(fleet.kit("agent-1") / "startup", tmp_path / "copy" / "startup")
    shutil.copytree(fleet.kit("agent-1") / "local", tmp_path / "copy" / "local")
    copy = Kit(tmp_path / "copy")
    code, _, said = run("federation", "join", copy.folder, "--env", "random-mdps")
    assert code == 2
    assert "agent-1 is connected already, from 127.0.0.1:" in said
    # Whoever does not ask first is refused all the same, also without a daemon, for which `join` would wait.
    thief = real_fleet.without_daemon(processes.client_process(copy)).start()
    try:
        wait_until(lambda: "the server refuses the connection: agent-1 is connected already" in thief.log.read_text())
    finally:
        thief.stop()
    told = (fleet.folder / "server.out").read_text()
    assert "agent-1 is connected from 127.0.0.1:" in told
    assert "a second copy of its kit at 127.0.0.1:" in told
    code, shown, said = run("federation", "status", fleet.folder)
    assert code == 0, said
    assert "a second copy of its kit" in shown
    assert "agent-1: connected" in shown
