"""Kits whose private keys are made on the agents' machines."""

import json
import re
import shutil
import stat
from base64 import b64encode
from contextlib import ExitStack

import pytest
import real_fleet
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from perfedrl.errors import UserError
from perfedrl.federation.engine import provision
from perfedrl.federation.engine.authority import read_certificate
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit
from perfedrl.federation.engine.kit_checks import check_kit, private_key
from perfedrl.federation.engine.local_fleet import federation_command, free_port
from perfedrl.federation.engine.renewal import renew
from perfedrl.federation.engine.signing_requests import LARGEST, fingerprint, request, requested_key, sign

PEM = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.+?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)


@pytest.fixture
def fleet(tmp_path):
    provision.init(tmp_path / "fleet", 2, port=8765, keys_on_agents=True)
    return FleetFolder(tmp_path / "fleet")


def copied(fleet, name, place):
    """A kit on its agent's machine."""
    shutil.copytree(fleet.kit(name), place / name)
    return Kit(place / name)


def accept(kit, certificate):
    shutil.copy(certificate, kit.certificate)


def keys_within(folder):
    """The public halves of all private keys in the files of a folder, also those inside JSON."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            for pem in PEM.findall(path.read_bytes().replace(rb"\n", b"\n")):
                found.append(serialization.load_pem_private_key(pem, None).public_key())
    return found


def new_key(bits=2048):
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


def made(path, names, key, signer=None, extensions=()):
    """Write a request as somebody else could."""
    builder = x509.CertificateSigningRequestBuilder()
    builder = builder.subject_name(x509.Name([x509.NameAttribute(oid, value) for oid, value in names]))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    signed = builder.sign(signer or key, hashes.SHA256())
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    return path


def test_an_agents_key_is_made_where_the_agent_is(fleet, tmp_path):
    startup = fleet.kit("agent-0") / "startup"
    assert not {"client.key", "client.crt"} & {path.name for path in startup.iterdir()}
    kit = copied(fleet, "agent-0", tmp_path)
    with pytest.raises(UserError, match=r"has no certificate yet: make a request with `perfedrl federation request"):
        check_kit(kit)
    file, shown = request(kit)
    assert file == kit.folder / "agent-0.csr"
    assert stat.S_IMODE(kit.key.stat().st_mode) == 0o600
    key = kit.key.read_bytes()
    assert request(kit) == (file, shown), "the same key"
    assert kit.key.read_bytes() == key
    assert b"PRIVATE" not in file.read_bytes()
    certificate, signed = sign(fleet, "agent-0", file)
    assert signed == shown == fingerprint(private_key(kit.key).public_key())
    accept(kit, certificate)
    check_kit(kit)
    ours = private_key(kit.key).public_key()
    assert read_certificate(kit.certificate).public_key() == ours
    assert ours not in keys_within(fleet.folder)
    assert len(keys_within(fleet.folder)) == 3, "of the authority, the server and the operator"


def test_a_signed_certificate_is_like_one_of_init(fleet, tmp_path):
    provision.init(tmp_path / "other", 1)
    usual = read_certificate(FleetFolder(tmp_path / "other").kit("agent-0") / "startup" / "client.crt")
    ours = read_certificate(sign(fleet, "agent-0", request(copied(fleet, "agent-0", tmp_path))[0])[0])
    assert ours.subject == usual.subject
    assert [(x.oid, x.critical) for x in ours.extensions] == [(x.oid, x.critical) for x in usual.extensions]
    assert [(x.not_valid_after_utc - x.not_valid_before_utc).days for x in (ours, usual)] == [360, 360]


def test_nothing_but_the_public_key_is_taken_from_a_request(fleet, tmp_path):
    """Roles, other names and the right to sign certificates are ignored."""
    honest, _ = sign(fleet, "agent-0", request(copied(fleet, "agent-0", tmp_path))[0])
    names = [
        (NameOID.COMMON_NAME, "agent-1"),
        (NameOID.ORGANIZATION_NAME, "others"),
        (NameOID.UNSTRUCTURED_NAME, "project_admin"),
    ]
    wishes = (
        x509.BasicConstraints(ca=True, path_length=None),
        x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.DNSName("agent-0")]),
    )
    key = new_key()
    got = read_certificate(sign(fleet, "agent-1", made(tmp_path / "wish.csr", names, key, extensions=wishes))[0])
    expected = read_certificate(honest)
    assert got.public_key() == key.public_key()
    assert [(x.oid, x.value) for x in got.subject] == [(x.oid, x.value.replace("-0", "-1")) for x in expected.subject]
    assert [x.oid for x in got.extensions] == [x.oid for x in expected.extensions]
    alternative = got.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert alternative.get_values_for_type(x509.DNSName) == ["agent-1"]


NAME = [(NameOID.COMMON_NAME, "agent-0")]


def forged(path):
    """A request for somebody else's key."""
    own, other = made(path, NAME, new_key()), made(path.with_suffix(".other"), NAME, new_key())
    key, signature = (x509.load_pem_x509_csr(file.read_bytes()) for file in (own, other))
    der = key.public_bytes(serialization.Encoding.DER).replace(key.signature, signature.signature)
    path.write_bytes(x509.load_der_x509_csr(der).public_bytes(serialization.Encoding.PEM))


BAD = {
    "another name": (lambda p: made(p, [(NameOID.COMMON_NAME, "agent-1")], new_key()), "expected a request of agent-0"),
    "no name": (lambda p: made(p, [], new_key()), "got one of None"),
    "two names": (lambda p: made(p, NAME * 2, new_key()), "got one of None"),
    "forged": (forged, "is not signed with the key that it names"),
    "curve": (lambda p: made(p, NAME, ec.generate_private_key(ec.SECP256R1())), "expected an RSA key of 2048 bits"),
    "short": (lambda p: made(p, NAME, new_key(1024)), "expected an RSA key of 2048 bits"),
    "large": (lambda p: p.write_bytes(b"-" * (LARGEST + 1)), "is not a request that"),
    "empty": (lambda p: p.write_bytes(b""), "is not a request that"),
    "a folder": (lambda p: p.mkdir(), "is not a request that"),
    "missing": (lambda p: None, "there is no request"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_one_sentence_and_signs_nothing(fleet, run, tmp_path, case):
    write, why = BAD[case]
    write(tmp_path / "bad.csr")
    code, _, said = run("federation", "sign", fleet.folder, "agent-0", "bad.csr")
    assert code == 2
    assert why in said
    assert len(said.strip().splitlines()) == 1, said
    assert not (fleet.kit("agent-0") / "startup" / "client.crt").exists()


def test_no_flipped_bit_of_a_request_changes_the_key(tmp_path):
    key = new_key()
    file = made(tmp_path / "one.csr", NAME, key)
    der = x509.load_pem_x509_csr(file.read_bytes()).public_bytes(serialization.Encoding.DER)
    label = "CERTIFICATE REQUEST"
    accepted = 0
    for place in range(len(der)):
        changed = der[:place] + bytes([der[place] ^ (1 << place % 8)]) + der[place + 1 :]
        text = b64encode(changed).decode()
        file.write_text(f"-----BEGIN {label}-----\n{text}\n-----END {label}-----\n")
        try:
            assert requested_key(file, "agent-0") == key.public_key()
            accepted += 1
        except UserError:
            pass
    assert accepted == 0, "every bit is signed or part of the signature"


def test_requests_of_unknown_revoked_and_signed_agents(fleet, run, tmp_path):
    kit = copied(fleet, "agent-0", tmp_path)
    file, _ = request(kit)
    code, _, said = run("federation", "sign", fleet.folder, "agent-9", file)
    assert code == 2
    assert "the fleet has no agent 'agent-9'; did you mean" in said
    (fleet.server / "disabled_clients.json").write_text(json.dumps({"disabled_clients": ["agent-0"]}))
    code, _, said = run("federation", "sign", fleet.folder, "agent-0", file)
    assert code == 2
    assert f"agent-0 is revoked; admit it first: perfedrl federation revoke {fleet.folder} agent-0 --undo" in said
    (fleet.server / "disabled_clients.json").unlink()
    code, shown, said = run("federation", "sign", fleet.folder, "agent-0", file)
    assert code == 0, said
    assert fingerprint(private_key(kit.key).public_key()) in shown
    accept(kit, fleet.kit("agent-0") / "startup" / "client.crt")
    check_kit(kit)
    kit.key.unlink()
    code, shown, said = run("federation", "request", kit.folder)
    assert code == 0, said
    assert "next, on the server's machine: perfedrl federation sign DIR agent-0 agent-0.csr" in shown
    with pytest.raises(UserError, match=r"client\.crt does not belong to the key beside it"):
        check_kit(kit)
    code, _, said = run("federation", "sign", fleet.folder, "agent-0", file)
    assert code == 2
    assert "agent-0 has a certificate already, valid until" in said
    assert run("federation", "sign", fleet.folder, "agent-0", file, "--again")[0] == 0
    accept(kit, fleet.kit("agent-0") / "startup" / "client.crt")
    check_kit(kit)


def test_a_key_that_init_made_can_be_replaced_by_one_of_the_agent(tmp_path):
    provision.init(tmp_path / "fleet", 1)
    fleet = FleetFolder(tmp_path / "fleet")
    kit = copied(fleet, "agent-0", tmp_path)
    kit.key.unlink()
    accept(kit, sign(fleet, "agent-0", request(kit)[0], again=True)[0])
    check_kit(kit)
    assert not Kit(fleet.kit("agent-0")).key.exists()
    assert len(keys_within(fleet.folder)) == 3


def test_no_key_is_made_in_a_changed_kit(fleet, tmp_path):
    kit = copied(fleet, "agent-0", tmp_path)
    (kit.folder / "startup" / "fleet.json").write_text((kit.folder / "startup" / "fleet.json").read_text() + " ")
    with pytest.raises(UserError, match="does not match its signature"):
        request(kit)
    assert not kit.key.exists()


def test_agents_without_certificates_are_left_out_of_a_renewal(fleet, tmp_path):
    sign(fleet, "agent-0", request(copied(fleet, "agent-0", tmp_path))[0])
    renewed, left_out = renew(fleet)
    assert renewed == ["server", "operator", "agent-0"]
    assert "client.crt" in left_out["agent-1"]


def test_init_says_what_comes_next(run, tmp_path):
    code, shown, said = run("federation", "init", "fleet", "--agents", "1", "--keys-on-agents")
    assert code == 0, said
    assert "without keys: on each agent's machine use `perfedrl federation request`" in shown
    assert keys_within(tmp_path / "fleet" / "kits") == []


@pytest.mark.network
def test_a_fleet_trains_whose_server_never_saw_its_agents_keys(tmp_path):
    """One agent's certificate and the server's have been renewed since."""
    provision.init(tmp_path / "fleet", 3, port=free_port(), keys_on_agents=True)
    fleet = FleetFolder(tmp_path / "fleet")
    kits = [copied(fleet, name, tmp_path / "machines") for name in fleet.info.agents]
    for kit in kits:
        accept(kit, sign(fleet, kit.info.agent, request(kit)[0])[0])
    renew(fleet)
    accept(kits[1], fleet.kit("agent-1") / "startup" / "client.crt")
    (tmp_path / "agent.toml").write_text(real_fleet.AGENT)
    wanted = real_fleet.config("own-keys")
    with ExitStack() as running:
        running.enter_context(federation_command(["server", str(fleet.folder)], tmp_path / "server.out"))
        for kit in kits:
            join = ["join", str(kit.folder), "--agent-config", str(tmp_path / "agent.toml")]
            running.enter_context(federation_command(join, tmp_path / f"{kit.info.agent}.out"))
        run, events = real_fleet.train(fleet, wanted)
    assert real_fleet.rounds_in(events) == list(range(wanted.rounds))
    real_fleet.same_bits(run, wanted, tmp_path / "simulated")
    found = keys_within(fleet.folder)
    assert len(found) == 3, "of the authority, the server and the operator"
    assert not [kit for kit in kits if private_key(kit.key).public_key() in found]
