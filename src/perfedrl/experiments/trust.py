"""Which runs may name code: opening somebody else's run must not run code of theirs.

A config may name code outside the library as `module:attribute`, which is imported as soon as the config is read. In a
config that a user writes that is the purpose. A run's folder may come from anybody, so its config is read only if it
names no code, if the folder was signed by this user's own training on this machine, or if the user says that the code
is to be trusted: by `--trust`, or by the module's name in the environment variable PERFEDRL_TRUST.
"""

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_data_dir

from perfedrl.errors import UserError
from perfedrl.experiments.module_folders import KEY, RECORD
from perfedrl.experiments.own_code import code_names

SIGNATURE = "signature"
ALLOWED = "PERFEDRL_TRUST"
OF_A_RUN = (RECORD, "history.npz", "params.safetensors", "checkpoint.safetensors")
"""Files beside which a config is that of a run."""


def check_trusted(path: Path, table: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Reject the config of a run that names code of an unknown origin; configs outside of runs may name any code.

    `known` are names that the caller has in a config of its own.
    """
    strange = [name for name in code_names(table) if name not in known and not _is_allowed(name)]
    if strange and is_of_run(path) and not is_signed(path):
        raise UserError(
            f"{path.parent} was not trained by you on this machine, and opening it would run the code {strange[0]}; "
            f"if you trust that code, pass --trust (trust=True in Python) or name its module in {ALLOWED}"
        )


def is_of_run(path: Path) -> bool:
    """Whether a config lies in the folder of a run."""
    return any((path.parent / name).exists() for name in OF_A_RUN)


def signed(record: Mapping[str, Any], config: bytes) -> dict[str, Any]:
    """A run's provenance with a signature over the content of its config and the folders of its own modules.

    Without a folder for the key nothing is signed, and opening the run needs `--trust`.
    """
    key = _key(create=True)
    return {**record, **({SIGNATURE: _signature(key, config, record.get(KEY))} if key else {})}


def is_signed(path: Path) -> bool:
    """Whether this user's training on this machine wrote a run's config and recorded the folders of its modules."""
    try:
        record = json.loads((path.parent / RECORD).read_text(encoding="utf-8"))
        found, folders, content = str(record[SIGNATURE]), record.get(KEY), path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    key = _key(create=False)
    return key is not None and hmac.compare_digest(_signature(key, content, folders).encode(), found.encode())


def _is_allowed(name: str) -> bool:
    """Whether the user's list has the module of `module:attribute`, or a package that contains it."""
    module = name.partition(":")[0]
    listed = [item.strip() for item in os.environ.get(ALLOWED, "").split(",")]
    return any(item and (module == item or module.startswith(f"{item}.")) for item in listed)


def _signature(key: bytes, config: bytes, folders: Any) -> str:
    content = json.dumps([hashlib.sha256(config).hexdigest(), folders], sort_keys=True)
    return hmac.new(key, content.encode(), hashlib.sha256).hexdigest()


def _key(create: bool) -> bytes | None:
    """The key with which this user's runs are signed on this machine; None if there is none, or none can be made."""
    path = Path(user_data_dir("perfedrl")) / "signing_key"
    try:
        if create and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, temporary = tempfile.mkstemp(dir=path.parent)  # readable by its owner only
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(32))
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)  # unless another process was first
            except FileExistsError:
                pass
            finally:
                os.unlink(temporary)
        key = path.read_bytes()
    except OSError:
        return None
    return key if len(key) == 32 else None
