"""Hostile agents in a real fleet over TLS: bad uploads, foreign certificates, revoked kits."""

import os
import socket
import ssl
import sys
from contextlib import contextmanager
from dataclasses import replace

import jax
import lying_agent
import numpy as np
import pytest
import real_fleet
from real_fleet import connected, wait_until

from perfedrl.envs import Fleet
from perfedrl.errors import UserError
from perfedrl.federation.connections.streams import HEADER, HELLO, Hello
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit
from perfedrl.federation.engine.processes import check_server, client_process, daemon_process, environment
from perfedrl.federation.engine.provision import init
from perfedrl.federation.engine.renewal import revoked
from perfedrl.federation.restarting_process import RestartingProcess
from perfedrl.federation.server.network_config import networked
from perfedrl.simulation.simulator import Simulation

pytestmark = pytest.mark.network

PATIENT = """
import perfedrl.federation.frames as frames
frames.LIMIT = 2**33
"""
"""A modified bridge on the hostile machine, without a size limit."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """Three agents, of which the last sends bad uploads, and a kit that nobody uses."""
    folder = tmp_path_factory.mktemp("hostile")
    with (
        real_fleet.running_fleet(folder, 4, joining=("agent-0", "agent-1")) as fleet,
        rogue_agent(fleet, "agent-2", folder),
    ):
        yield fleet


@contextmanager
def rogue_agent(fleet, name, folder):
    kit = Kit(fleet.kit(name))
    (folder / "own").mkdir()
    (folder / "own" / "sitecustomize.py").write_text(PATIENT)
    kit.state.mkdir(mode=0o700)
    listening = kit.socket
    kit.socket = kit.state / "real.sock"
    daemon = daemon_process(kit, folder / "agent.toml", None).start()
    liar = RestartingProcess(
        [sys.executable, lying_agent.__file__, str(kit.socket), str(listening)],
        folder / "rogue.log",
        environment(),
        folder,
    ).start()
    kit.socket = listening
    client = client_process(kit)
    client.env["PYTHONPATH"] = f"{folder / 'own'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    client.start()
    try:
        yield
    finally:
        for process in (client, liar, daemon):
            process.stop()


def honest_only(wanted, agents):
    """The parameters of a simulated run without the other agents, by the aggregation of the network."""
    experiment = networked(wanted).experiment
    few = Fleet(jax.tree.map(lambda x: x[:agents], experiment.fleet.train))
    simulation = Simulation(replace(experiment, fleet=few), [0])
    state = simulation.advance(simulation.start(), 0, wanted.rounds)
    return jax.tree.map(lambda x: x[0], state.server.message)


def test_every_bad_upload_is_rejected_and_has_no_effect(fleet):
    ways = list(lying_agent.MANIPULATIONS)
    wanted = real_fleet.config("hostile", len(ways))
    run, events = real_fleet.train(fleet, wanted, min_agents=2, strikes=100, deadline=120.0)
    np.testing.assert_array_equal(run.message[0], honest_only(wanted, 2))
    refused = {event["round"]: event for event in events if event["event"] == "refused"}
    assert {event["agent"] for event in refused.values()} == {"agent-2"}
    for k, way in enumerate(ways[:-1]):
        assert lying_agent.REASONS[way] in refused[k]["reason"], (way, refused[k])
    # The server drops a gigabyte piece by piece, before it reaches the gate: the agent did not answer, and is named.
    named = [(event["event"], event.get("round")) for event in events if event.get("agent") == "agent-2"]
    assert ("silent", len(ways) - 1) in named
    assert ("excess", None) in named
    assert "agent-2 sent a message of" in server_log(fleet)


def test_three_bad_uploads_in_a_row_lead_to_quarantine(fleet):
    wanted = real_fleet.config("quarantine", 6)
    run, events = real_fleet.train(fleet, wanted, min_agents=2, strikes=3, deadline=120.0)
    assert [(e["agent"], e["round"]) for e in events if e["event"] == "quarantined"] == [("agent-2", 2)]
    assert not [e for e in events if e["event"] == "refused" and e["round"] > 2]
    np.testing.assert_array_equal(run.message[0], honest_only(wanted, 2))


def tls(fleet, authority, certificate=None):
    """The first bytes that the server sends over TLS with some certificate; empty if it rejects the connection."""
    hello = Hello("session", probe=True).encode()
    context = ssl.create_default_context(cafile=str(authority))
    if certificate:
        context.load_cert_chain(*map(str, certificate))
    plain = socket.create_connection(("localhost", fleet.info.port), 60)
    try:
        with context.wrap_socket(plain, server_hostname="localhost") as secure:
            secure.sendall(HEADER.pack(HELLO, len(hello), 0) + hello)
            secure.settimeout(60)
            return secure.recv(1000)
    except (ssl.SSLError, ConnectionError):
        return b""
    finally:
        plain.close()


def test_connections_without_a_certificate_of_the_fleet_are_rejected(fleet, tmp_path):
    kit = Kit(fleet.kit("agent-0"))
    assert tls(fleet, kit.authority, (kit.certificate, kit.key)), "the kit's own certificate was rejected"
    assert tls(fleet, kit.authority) == b""
    init(tmp_path / "other", 1, port=fleet.info.port)
    other = Kit(FleetFolder(tmp_path / "other").kit("agent-0"))
    assert tls(fleet, kit.authority, (other.certificate, other.key)) == b""
    with pytest.raises(UserError, match="belongs to another fleet"):
        check_server(other)


def test_a_kit_cannot_act_as_another_agent(fleet, tmp_path):
    thief = Kit(fleet.kit("agent-3"))
    process = real_fleet.without_daemon(client_process(thief))
    process.command = [word.replace("uid=agent-3", "uid=agent-0") for word in process.command]
    process.log = tmp_path / "thief.log"
    process.start()
    try:
        wait_until(lambda: "authenticated as 'agent-3' but claimed endpoint 'agent-0'" in server_log(fleet))
    finally:
        process.stop()
    assert "Successfully registered" not in process.log.read_text()


def test_a_revoked_kit_cannot_connect(fleet, run, tmp_path):
    wait_until(lambda: {"agent-0", "agent-1"} <= connected(fleet))
    code, _, said = run("federation", "revoke", fleet.folder, "agent-1")
    assert code == 0, said
    wait_until(lambda: "agent-1" not in connected(fleet))
    assert revoked(fleet) == {"agent-1"}
    real_fleet.kill("nvflare.private", fleet.kit("agent-1"), "client_train")
    wait_until(lambda: "Reject disabled client registration: agent-1" in server_log(fleet))
    assert "agent-1" not in connected(fleet)
    code, _, said = run("federation", "revoke", fleet.folder, "agent-1", "--undo")
    assert code == 0, said
    real_fleet.kill("nvflare.private", fleet.kit("agent-1"), "client_train")
    wait_until(lambda: "agent-1" in connected(fleet))


def server_log(fleet):
    log = fleet.server / "server.log"
    return log.read_text(errors="replace") if log.exists() else ""


def test_a_second_join_and_a_second_server_are_rejected(fleet, run):
    config = fleet.folder.parent / "agent.toml"
    for command in (("join", fleet.kit("agent-0"), "--agent-config", config), ("server", fleet.folder)):
        code, _, said = run("federation", *command)
        assert code == 2
        assert "is running already" in said
