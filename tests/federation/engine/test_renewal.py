"""New certificates for an old fleet."""

import hashlib
import json
import shutil
import signal
import socket
import ssl
import threading
from datetime import datetime, timedelta

import pytest
from nvflare.lighter.utils import verify_folder_signature

from perfedrl.errors import UserError
from perfedrl.federation.engine import provision, service
from perfedrl.federation.engine.authority import read_certificate, valid_until
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit
from perfedrl.federation.engine.kit_checks import SIGNATURES, check_kit
from perfedrl.federation.engine.renewal import members, renew, revoked

AGENTS = ("agent-0", "agent-1")


@pytest.fixture
def fleet(tmp_path):
    provision.init(tmp_path / "fleet", 2, port=8765)
    return FleetFolder(tmp_path / "fleet")


def digests(fleet):
    files = [path for path in fleet.folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(fleet.folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def changed(fleet, before):
    now = digests(fleet)
    assert now.keys() == before.keys()
    return {name for name in now if now[name] != before[name]}


def revoke(fleet, *names):
    """As NVFlare's server writes it."""
    (fleet.server / "disabled_clients.json").write_text(json.dumps({"disabled_clients": names}))


def content(certificate):
    """What stays of a certificate."""
    return certificate.subject, certificate.issuer, certificate.public_key(), [x.value for x in certificate.extensions]


def test_certificates_are_new_and_names_and_keys_stay(fleet):
    renew(fleet, days=20)
    old = {member.name: read_certificate(member.certificate) for member in members(fleet)}
    before = digests(fleet)
    assert renew(fleet) == (["server", "operator", *AGENTS], {})
    for member in members(fleet):
        new = read_certificate(member.certificate)
        assert content(new) == content(old[member.name])
        assert new.serial_number != old[member.name].serial_number
        assert (new.not_valid_after_utc - old[member.name].not_valid_after_utc).days == 340
    certificates = {f"kits/{name}/startup/client.crt" for name in AGENTS}
    servers = {"server/startup/server.crt", f"server/startup/{SIGNATURES}", "operator/startup/client.crt"}
    assert changed(fleet, before) == certificates | servers
    root = str(fleet.server / "startup" / "rootCA.pem")
    assert verify_folder_signature(str(fleet.server / "startup"), root, True, SIGNATURES)
    for name in AGENTS:
        check_kit(Kit(fleet.kit(name)))


@pytest.mark.parametrize("host", ["fleet.example.org", "192.0.2.1"])
def test_a_renewed_certificate_has_what_init_gave_it(tmp_path, host):
    provision.init(tmp_path / "fleet", 1, host)
    fleet = FleetFolder(tmp_path / "fleet")
    made = [content(read_certificate(member.certificate)) for member in members(fleet)]
    renew(fleet)
    assert [content(read_certificate(member.certificate)) for member in members(fleet)] == made


def test_one_agent_alone(fleet):
    before = digests(fleet)
    assert renew(fleet, "agent-1") == (["agent-1"], {})
    assert changed(fleet, before) == {"kits/agent-1/startup/client.crt"}


def test_a_new_certificate_never_outlives_its_authority(fleet):
    renew(fleet, days=100_000)
    last = read_certificate(fleet.server / "startup" / "rootCA.pem").not_valid_after_utc
    assert {valid_until(member.certificate) for member in members(fleet)} == {last}


def test_revoked_agents_get_no_new_certificate(fleet, run):
    revoke(fleet, "agent-1")
    before = digests(fleet)
    assert renew(fleet) == (["server", "operator", "agent-0"], {"agent-1": "it is revoked"})
    assert "kits/agent-1/startup/client.crt" not in changed(fleet, before)
    assert revoked(fleet) == {"agent-1"}
    code, _, said = run("federation", "renew", fleet.folder, "--agent", "agent-1")
    assert code == 2
    assert "agent-1 gets no new certificate: it is revoked" in said


def handshake(server, client):
    """Connect two members by mutual TLS; each is a folder `startup`, the certificate's name and the host's."""
    accepting, connecting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for context, (startup, name) in ((accepting, server), (connecting, client)):
        context.load_cert_chain(startup / f"{name}.crt", startup / f"{name}.key")
        context.load_verify_locations(startup / "rootCA.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    ours, theirs = socket.socketpair()
    heard = []

    def accept():
        with accepting.wrap_socket(ours, server_side=True) as secure:
            heard.append(dict(part[0] for part in secure.getpeercert()["subject"])["commonName"])
            secure.sendall(b"welcome")

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    with connecting.wrap_socket(theirs, server_hostname="localhost") as secure:
        assert secure.recv(10) == b"welcome"
    thread.join(60)
    return heard[0]


def test_old_and_new_certificates_understand_each_other(fleet, tmp_path):
    for name in ("server", "kits/agent-0"):
        shutil.copytree(fleet.folder / name / "startup", tmp_path / "old" / name)
    renew(fleet)
    servers = (tmp_path / "old" / "server", "server"), (fleet.server / "startup", "server")
    clients = (tmp_path / "old" / "kits/agent-0", "client"), (fleet.kit("agent-0") / "startup", "client")
    for server in servers:
        for client in clients:
            assert handshake(server, client) == "agent-0"


def test_certificates_that_end_soon_are_named(fleet, run, monkeypatch):
    _, shown, _ = run("federation", "status", fleet.folder)
    assert "warning" not in shown
    renew(fleet, "agent-1", days=29)
    end = valid_until(fleet.kit("agent-1") / "startup" / "client.crt")
    code, shown, said = run("federation", "status", fleet.folder)
    assert code == 0, said
    assert f"valid until {end:%Y-%m-%d}" in shown
    renewal = f"perfedrl federation renew {fleet.folder}"
    assert f"warning: certificates end within 30 days (agent-1): {renewal}" in shown
    revoke(fleet, "agent-1")
    assert "warning" not in run("federation", "status", fleet.folder)[1]
    renew(fleet, days=10)
    told = []
    for module in ("daemon_process", "client_process", "server_process", "stand_by", "wait_for"):
        monkeypatch.setattr(service, module, lambda *_, **__: type("Started", (), {"start": lambda _: None})())
    for name in AGENTS[:1]:
        service.join(Kit(fleet.kit(name)), None, "arc", told.append)
    service.serve(fleet, told.append)
    warnings = [line for line in told if line.startswith("warning: the certificate")]
    assert [line.split()[3] for line in warnings] == ["client.crt", "server.crt"]


def test_a_running_service_says_that_its_certificate_ends_and_has_ended(fleet, monkeypatch):
    told, now = [], [0.0]
    monkeypatch.setattr(service.time, "monotonic", lambda: now[0])
    watch = service.CertificateWatch(fleet.kit("agent-0") / "startup" / "client.crt", told.append)

    def look() -> list[str]:
        told.clear()
        now[0] += service.LOOK_EVERY
        watch.look()
        return list(told)

    assert look() == []
    renew(fleet, "agent-0", days=10)
    (soon,) = look()
    assert "client.crt ends on" in soon
    assert look() == [], "said once"
    later = type("Later", (datetime,), {"now": classmethod(lambda cls, zone: datetime.now(zone) + timedelta(days=11))})
    monkeypatch.setattr(service, "datetime", later)
    (over,) = look()
    assert "client.crt has ended on" in over
    monkeypatch.setattr(service, "datetime", datetime)
    renew(fleet, "agent-0", days=365)
    assert look() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_service(number, fleet):
    told = []
    watch = service.CertificateWatch(fleet.kit("agent-0") / "startup" / "client.crt", told.append)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}

    def lines() -> list[str]:
        signal.raise_signal(number)
        return ["a line"]

    try:
        service.stand_by([], told.append, lines, watch)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert told == ["a line", "stopped"]


def test_what_cannot_be_renewed_is_said(fleet, run, tmp_path):
    code, _, said = run("federation", "renew", fleet.folder, "--agent", "agent-7")
    assert code == 2
    assert "the fleet has no agent 'agent-7'; did you mean" in said
    shutil.copy(fleet.kit("agent-1") / "startup" / "client.crt", fleet.kit("agent-0") / "startup")
    with pytest.raises(UserError, match="is not a certificate of agent-0 of this fleet"):
        renew(fleet, "agent-0")
    shutil.move(fleet.folder / "authority", tmp_path / "safe")
    code, _, said = run("federation", "renew", fleet.folder)
    assert code == 2
    assert "expected the authority of the fleet in" in said
    assert "copy it there for this command" in said
    (fleet.server / "disabled_clients.json").write_text("{")
    shutil.move(tmp_path / "safe", fleet.folder / "authority")
    with pytest.raises(UserError, match="which holds the revoked agents, is damaged"):
        renew(fleet)


def test_the_command_says_what_to_copy(fleet, run):
    (fleet.kit("agent-0") / "startup" / "client.crt").unlink()
    code, shown, said = run("federation", "renew", fleet.folder)
    assert code == 0, said
    end = valid_until(fleet.server / "startup" / "server.crt")
    assert f"new certificates, valid until {end:%Y-%m-%d}: server, operator, agent-1" in shown
    assert "agent-0 gets no new certificate: there is no" in shown
    assert f"restart the server: perfedrl federation server {fleet.folder}" in shown
    assert f"copy {fleet.kit('agent-1')}/startup/client.crt into the folder startup of the kit of agent-1" in shown
