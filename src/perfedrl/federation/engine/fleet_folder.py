"""The layout of a fleet's folder on the server's machine, and of an agent's start-up kit.

A fleet's folder contains `fleet.json` (name, host, port, agents), `authority` (the certificate authority: keep it
safe), `server` and `operator` (their kits), `kits` (the agents' kits, to be copied to their machines), `control` (runs
under way) and `runs` (finished runs).
"""

import json
import os
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from perfedrl.errors import UserError

ABOUT, OPERATOR, OPERATOR_ROLE = "fleet.json", "operator@perfedrl.fleet", "project_admin"
FORMAT = 2
"""Kits of format 1 connect by gRPC."""
STORAGE = "storage"
"""The folder of NVFlare's jobs in the server's kit, and the variable of its settings that stands for its path."""


@dataclass(frozen=True)
class FleetInfo:
    """The content of `fleet.json`, of a fleet or of an agent's kit. `agents` is empty in a kit, `agent` in a fleet."""

    fleet: str
    host: str
    port: int
    created: str
    agents: tuple[str, ...] = ()
    agent: str = ""
    number: int = -1
    format: int = FORMAT

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path, what: str) -> "FleetInfo":
        """Read it; `what` names the folder's expected kind in errors."""
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            info = FleetInfo(**{**content, "agents": tuple(content.get("agents", ()))})
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(f"{path.parent} is no {what}; create one with `perfedrl federation init`") from error
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged or was written by another version of perfedrl") from error
        if info.format != FORMAT:
            raise UserError(
                f"{path} was written by another version of perfedrl (format {info.format}, expected {FORMAT})"
            )
        return info


class FleetFolder:
    """A fleet's folder on the server's machine."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).resolve()
        self.info = FleetInfo.load(self.folder / ABOUT, "fleet")

    @property
    def server(self) -> Path:
        return self.folder / "server"

    @property
    def connection_log(self) -> Path:
        """The file in which the server says which connections it refused."""
        return self.server / "connections.log"

    @property
    def operator(self) -> Path:
        return self.folder / "operator"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def kit(self, name: str) -> Path:
        """The folder of an agent's kit."""
        return self.folder / "kits" / name

    def control(self, run: str) -> Path:
        """The folder of a run under way."""
        return control_folder(self.server, run)

    def write_storage(self) -> None:
        """Tell NVFlare where its storage is now; it takes absolute paths only, and the folder may have been moved."""
        settings, place = self.server / "local", str(self.server / STORAGE)
        (settings / f"{STORAGE}__resources.json").write_text(json.dumps({STORAGE: place}) + "\n", encoding="utf-8")


def control_folder(server: Path, run: str) -> Path:
    """The folder of a run under way, from the folder of the server's kit, in which NVFlare runs."""
    return server.parent / "control" / run


def check_path(folder: Path) -> None:
    """Check that NVFlare can start a job's process in a folder: it splits the command as a shell does."""
    if found := re.search(r"[\s'\"#\\]", str(folder)):
        raise UserError(f"NVFlare cannot start processes in {folder}, which has {found[0]!r} in its path; rename it")


class Kit:
    """One agent's start-up kit on the agent's machine, which also holds the agent's state and logs."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).resolve()
        self.info = FleetInfo.load(self.folder / "startup" / ABOUT, "agent's start-up kit")
        if not self.info.agent or self.info.number < 0:
            raise UserError(f"{self.folder} is not the kit of an agent")

    @property
    def certificate(self) -> Path:
        return self.folder / "startup" / "client.crt"

    @property
    def key(self) -> Path:
        return self.folder / "startup" / "client.key"

    @property
    def authority(self) -> Path:
        return self.folder / "startup" / "rootCA.pem"

    @property
    def request(self) -> Path:
        """The request for the certificate, if the key is made here."""
        return self.folder / f"{self.info.agent}.csr"

    @property
    def state(self) -> Path:
        """The folder of the agent's stored answers and personal state."""
        return self.folder / "agent"

    @cached_property
    def socket(self) -> Path:
        """The path of the daemon's socket: in the state's folder, or in a short folder if that path is too long."""
        own = self.state / "agent.sock"
        if len(os.fsencode(own)) < 100:
            return own
        return socket_folder(self.info) / f"{self.info.agent}.sock"


def socket_folder(info: FleetInfo) -> Path:
    """A folder with a short path for Unix sockets of a fleet's processes on this machine."""
    # Not in XDG_RUNTIME_DIR, which is removed when its user logs out.
    return Path("/tmp") / f"perfedrl-{os.getuid()}-{info.fleet[-8:]}"
