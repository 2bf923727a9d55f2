"""Agents' kits: what is signed, and the certificate that must fit fleet, agent and key."""

import shutil

import pytest

from perfedrl.errors import UserError
from perfedrl.federation.engine import provision
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit
from perfedrl.federation.engine.kit_checks import check_kit


@pytest.fixture(scope="module")
def fleets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits")
    for name in ("own", "other"):
        provision.init(folder / name, 2)
    return FleetFolder(folder / "own"), FleetFolder(folder / "other")


@pytest.fixture
def kit(fleets, tmp_path):
    """A copy of the first kit, as on the agent's machine."""
    shutil.copytree(fleets[0].kit("agent-0"), tmp_path / "agent-0")
    return Kit(tmp_path / "agent-0")


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_every_file_of_a_kit_is_protected(kit):
    """Any change of any file, its loss, and any file more are noticed."""
    check_kit(kit)
    for name in names(kit.folder):
        path = kit.folder / name
        content = path.read_bytes()
        for changed in (content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], b"", b"{}"):
            path.write_bytes(changed)
            with pytest.raises(UserError):
                check_kit(kit)
        path.unlink()
        with pytest.raises(UserError):
            check_kit(kit)
        path.write_bytes(content)
        check_kit(kit)
    for part in ("startup", "local"):
        more = kit.folder / part / "more__resources.json"
        more.write_text("{}")
        with pytest.raises(UserError, match=f"{part} does not match its signature: get the kit again"):
            check_kit(kit)
        more.unlink()
    check_kit(kit)


def test_a_certificate_of_another_agent_fleet_or_key_is_rejected(kit, fleets):
    own, other = fleets
    for certificate in (own.kit("agent-1") / "startup" / "client.crt", other.kit("agent-0") / "startup" / "client.crt"):
        shutil.copy(certificate, kit.certificate)
        with pytest.raises(UserError, match=r"client\.crt is not a certificate of agent-0 of this fleet"):
            check_kit(kit)
    shutil.copy(own.kit("agent-0") / "startup" / "client.crt", kit.certificate)
    check_kit(kit)
    shutil.copy(own.kit("agent-1") / "startup" / "client.key", kit.key)
    with pytest.raises(UserError, match=r"client\.crt does not belong to the key beside it"):
        check_kit(kit)
