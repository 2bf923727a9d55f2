"""A fleet's certificate authority, which signs certificates and the files of kits."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID
from nvflare.lighter.constants import CtxKey
from nvflare.lighter.utils import Identity, generate_cert, load_private_key, serialize_cert

from perfedrl.errors import UserError

ORGANIZATION, STATE = "perfedrl", "*/state/cert.json"
VALID_DAYS = 360
"""The validity of a new certificate, at most that of the authority, in days."""
SOON = timedelta(days=30)
"""A certificate that ends within this time is to be renewed."""


class Authority:
    """The authority's certificate and private key."""

    def __init__(self, certificate: x509.Certificate, key: Any):
        self.certificate, self.key = certificate, key

    @staticmethod
    def load(fleet: Path) -> "Authority":
        """Read the authority in a fleet's folder."""
        try:
            (path,) = (fleet / "authority").glob(STATE)
            content = json.loads(path.read_text(encoding="utf-8"))
            certificate = x509.load_pem_x509_certificate(content[CtxKey.ROOT_CERT].encode())
            return Authority(certificate, load_private_key(content[CtxKey.ROOT_PRI_KEY]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"expected the authority of the fleet in {fleet / 'authority'}, which signs certificates; "
                "if it is kept elsewhere, copy it there for this command"
            ) from error

    def issue(
        self, name: str, public_key: Any, days: float = VALID_DAYS, host: str | None = None, role: str | None = None
    ) -> bytes:
        """Sign a certificate for a member of the fleet, in PEM; a server has a host, an operator a role."""
        now, last = datetime.now(UTC), self.certificate.not_valid_after_utc
        if last <= now:
            raise UserError(f"the authority of the fleet ended on {last:%Y-%m-%d}: make a new fleet")
        made = generate_cert(
            Identity(name, ORGANIZATION, role),
            Identity(common_name(self.certificate)),
            self.key,
            public_key,
            server_default_host=host,
            not_valid_before=now,
            not_valid_after=min(now + timedelta(days=days), last),
        )
        return serialize_cert(made)


def keep_root_only(authority: Path) -> None:
    """Remove the keys and certificates of all members from the file in which NVFlare's provisioner keeps them."""
    (path,) = authority.glob(STATE)
    content = json.loads(path.read_text(encoding="utf-8"))
    path.chmod(0o600)
    path.write_text(json.dumps({name: content[name] for name in (CtxKey.ROOT_CERT, CtxKey.ROOT_PRI_KEY)}))


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate in PEM."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"there is no certificate {path}") from error
    except (ValueError, x509.InvalidVersion) as error:
        raise UserError(f"{path} is not a certificate in PEM") from error


def belongs_to(certificate: x509.Certificate, name: str, authority: x509.Certificate) -> bool:
    """Whether an authority signed a certificate, and for this name."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return common_name(certificate) == name


def common_name(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str | None:
    """The name in a certificate or in a request for one, if there is exactly one."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else None


def valid_until(path: Path) -> datetime:
    """The end of a certificate's validity."""
    return read_certificate(path).not_valid_after_utc


def is_soon(end: datetime) -> bool:
    """Whether a certificate that ends then is to be renewed now."""
    return end - datetime.now(UTC) < SOON
