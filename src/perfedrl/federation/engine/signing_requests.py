"""Keys that are made on the agents' machines: requests for certificates travel, private keys do not."""

import hashlib
from base64 import b64encode
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from nvflare.lighter.utils import generate_keys, serialize_pri_key

from perfedrl.errors import UserError
from perfedrl.experiments.files import write_atomically
from perfedrl.federation.engine.authority import VALID_DAYS, Authority, common_name, valid_until
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit
from perfedrl.federation.engine.kit_checks import check_signatures, private_key
from perfedrl.federation.engine.renewal import check_agent, revoked

KEY_BITS = 2048
"""The size of an RSA key; NVFlare's messages have room for signatures of this size only."""
LARGEST = 2**16
"""The most bytes of a request."""


def request(kit: Kit) -> tuple[Path, str]:
    """Make an agent's key, unless there is one, and a request for its certificate; return its path and fingerprint.

    The request holds the agent's name and public key, and is signed with the private key.
    """
    check_signatures(kit)
    if not kit.key.exists():
        write_atomically(kit.key, serialize_pri_key(generate_keys()[0]), mode=0o600)
    key = private_key(kit.key)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, kit.info.agent)])
    made = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    write_atomically(kit.request, made.public_bytes(serialization.Encoding.PEM))
    return kit.request, fingerprint(key.public_key())


def sign(fleet: FleetFolder, agent: str, file: Path, again: bool = False, days: float = VALID_DAYS) -> tuple[Path, str]:
    """Sign the certificate that an agent requests; return its path in the fleet's folder, and the key's fingerprint.

    Only the public key is taken from the request; name, validity and extensions are those of `Authority.issue`.
    """
    check_agent(fleet, agent)
    if agent in revoked(fleet):
        raise UserError(f"{agent} is revoked; admit it first: perfedrl federation revoke {fleet.folder} {agent} --undo")
    key, kit = requested_key(file, agent), Kit(fleet.kit(agent))
    if kit.certificate.exists() and not again:
        raise UserError(
            f"{agent} has a certificate already, valid until {valid_until(kit.certificate):%Y-%m-%d}; "
            "--again signs one for another key"
        )
    write_atomically(kit.certificate, Authority.load(fleet.folder).issue(agent, key, days))
    if kit.key.exists() and private_key(kit.key).public_key() != key:
        kit.key.unlink()  # the key that `init` made is of no use any more
    return kit.certificate, fingerprint(key)


def requested_key(file: Path, agent: str) -> Any:
    """The public key in an agent's request, whose sender has proved that it has the private key."""
    try:
        with open(file, "rb") as opened:
            content = opened.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError("it is too large")
        found = x509.load_pem_x509_csr(content)
        name, key, proved = common_name(found), found.public_key(), found.is_signature_valid
    except FileNotFoundError as error:
        raise UserError(f"there is no request {file}") from error
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise UserError(f"{file} is not a request that `perfedrl federation request` made") from error
    if name != agent:
        raise UserError(f"expected a request of {agent}, got one of {name!r} in {file}")
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size != KEY_BITS:
        raise UserError(f"expected an RSA key of {KEY_BITS} bits in {file}; make it with `perfedrl federation request`")
    if not proved:
        raise UserError(f"{file} is not signed with the key that it names; make it again on the machine of {agent}")
    return key


def fingerprint(public_key: Any) -> str:
    """A public key in 43 characters, to be compared by people."""
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return b64encode(hashlib.sha256(public_key.public_bytes(*form)).digest()).decode().rstrip("=")
