"""Checks of an agent's start-up kit before the agent joins: signed files, and a certificate that fits its key."""

import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from nvflare.lighter.utils import load_private_key_file, sign_content, verify_content

from perfedrl.errors import UserError
from perfedrl.federation.engine.authority import belongs_to, read_certificate
from perfedrl.federation.engine.fleet_folder import Kit

SIGNATURES, KIT_SIGNATURES = "signature.json", "kit_signatures.json"
"""The signatures of a folder for NVFlare, and those of a kit's folder `startup`.

If a folder `startup` has the first, NVFlare wants every file to be signed there, also the private key and the
certificate. A kit has the second, so that its key can be made where the authority does not see it, and its certificate
can be replaced alone: the authority's signature in the certificate covers the name and the public key.
"""
UNSIGNED = ("client.key", "client.crt")


def sign_kit(kit: Path, key: Any) -> None:
    """Sign all files of an agent's kit but its key and its certificate."""
    (kit / "startup" / SIGNATURES).unlink(missing_ok=True)
    for folder, name, unsigned in ((kit / "startup", KIT_SIGNATURES, UNSIGNED), (kit / "local", SIGNATURES, ())):
        signed = {path.name: sign_content(path.read_bytes(), key) for path in _files(folder, name, unsigned)}
        (folder / name).write_text(json.dumps(signed) + "\n", encoding="utf-8")


def check_kit(kit: Kit) -> None:
    """Check a kit's files, and that its certificate is of its fleet, its agent and its key."""
    check_signatures(kit)
    if not kit.certificate.exists():
        raise UserError(
            f"{kit.folder} has no certificate yet: make a request with `perfedrl federation request {kit.folder}`, "
            "which the fleet's operator signs"
        )
    own = f"copy startup/client.crt of {kit.info.agent} again from the fleet's folder"
    if not belongs_to(read_certificate(kit.certificate), kit.info.agent, read_certificate(kit.authority)):
        raise UserError(f"{kit.certificate} is not a certificate of {kit.info.agent} of this fleet; {own}")
    if private_key(kit.key).public_key() != read_certificate(kit.certificate).public_key():
        raise UserError(f"{kit.certificate} does not belong to the key beside it; {own}")


def check_signatures(kit: Kit) -> None:
    """Check that no file of a kit was changed."""
    for part, name, unsigned in (("startup", KIT_SIGNATURES, UNSIGNED), ("local", SIGNATURES, ())):
        if not _intact(kit.folder / part, name, unsigned, kit.authority):
            raise UserError(
                f"{kit.folder / part} does not match its signature: get the kit again from the fleet's operator"
            )


def private_key(path: Path) -> Any:
    """Read a private key in PEM."""
    try:
        return load_private_key_file(path)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not a private key in PEM; get the kit again from the fleet's operator") from error


def _intact(folder: Path, name: str, unsigned: tuple[str, ...], authority: Path) -> bool:
    """Whether a folder has all files that are signed, unchanged, and no other file."""
    try:
        signatures = json.loads((folder / name).read_text(encoding="utf-8"))
        files, key = _files(folder, name, unsigned), read_certificate(authority).public_key()
        for path in files:
            verify_content(path.read_bytes(), signatures[path.name], key)
        return len(files) == len(signatures)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidSignature):
        return False


def _files(folder: Path, name: str, unsigned: tuple[str, ...]) -> list[Path]:
    """The files of a folder that are signed, or must be; `name` is the file of the signatures."""
    return [path for path in sorted(folder.iterdir()) if path.name not in (name, *unsigned)]
