"""New certificates for the members of a fleet, with the same names and keys, before the old ones end."""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from nvflare.lighter.utils import sign_folders

from perfedrl.errors import UserError, nearest
from perfedrl.experiments.files import write_atomically
from perfedrl.federation.engine.authority import (
    VALID_DAYS,
    Authority,
    belongs_to,
    read_certificate,
    valid_until,
)
from perfedrl.federation.engine.fleet_folder import OPERATOR, OPERATOR_ROLE, FleetFolder
from perfedrl.federation.engine.kit_checks import SIGNATURES

SERVER, OPERATOR_KIT = "server", "operator"


@dataclass(frozen=True)
class Member:
    """Who has a certificate: the server, the operator, or an agent. `subject` is the name in the certificate."""

    name: str
    subject: str
    certificate: Path
    host: str | None = None
    role: str | None = None


def members(fleet: FleetFolder) -> list[Member]:
    """All members of a fleet."""
    return [
        Member(SERVER, fleet.info.host, fleet.server / "startup" / "server.crt", host=fleet.info.host),
        Member(OPERATOR_KIT, OPERATOR, fleet.operator / "startup" / "client.crt", role=OPERATOR_ROLE),
        *(Member(name, name, fleet.kit(name) / "startup" / "client.crt") for name in fleet.info.agents),
    ]


def renew(fleet: FleetFolder, agent: str | None = None, days: float = VALID_DAYS) -> tuple[list[str], dict[str, str]]:
    """Renew the certificates of all members, or of one agent; return whose, and why others were left out.

    Keys stay: a certificate's public key is taken over into the new one, so that no private key is needed. Revoked
    agents are left out.
    """
    if agent is not None:
        check_agent(fleet, agent)
    authority, shut_out = Authority.load(fleet.folder), revoked(fleet)
    renewed, left_out = [], dict[str, str]()
    for member in members(fleet) if agent is None else [m for m in members(fleet) if m.name == agent]:
        if member.name in shut_out:
            left_out[member.name] = "it is revoked"
        elif not member.certificate.exists():
            left_out[member.name] = f"there is no {member.certificate}"
        else:
            _renew(member, authority, days)
            renewed.append(member.name)
    if agent is not None and left_out:
        raise UserError(f"{agent} gets no new certificate: {left_out[agent]}")
    return renewed, left_out


def _renew(member: Member, authority: Authority, days: float) -> None:
    """Replace one certificate, and sign what else depends on it."""
    old = read_certificate(member.certificate)
    if not belongs_to(old, member.subject, authority.certificate):
        raise UserError(f"{member.certificate} is not a certificate of {member.subject} of this fleet")
    new = authority.issue(member.subject, old.public_key(), days, member.host, member.role)
    write_atomically(member.certificate, new)
    if member.name == SERVER:
        sign_folders(str(member.certificate.parent), authority.key, signature_file=SIGNATURES)


def check_agent(fleet: FleetFolder, agent: str) -> None:
    """Check that a fleet has an agent of this name."""
    if agent not in fleet.info.agents:
        raise UserError(f"the fleet has no agent {agent!r}{nearest(agent, fleet.info.agents)}")


def revoked(fleet: FleetFolder) -> set[str]:
    """The agents that `federation revoke` shut out, from the file in which NVFlare's server keeps them."""
    path = fleet.server / "disabled_clients.json"
    try:
        return set(json.loads(path.read_text(encoding="utf-8"))["disabled_clients"])
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}, which holds the revoked agents, is damaged") from error


def ends(fleet: FleetFolder) -> dict[str, datetime]:
    """The ends of all certificates that there are, besides those of revoked agents."""
    known, shut_out = members(fleet), revoked(fleet)
    return {m.name: valid_until(m.certificate) for m in known if m.certificate.exists() and m.name not in shut_out}
