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

ABOUT, OPERATOR = "fleet.json", "operator@perfedrl.fleet"
FORMAT = 2
"""Kits of format 1 connect by gRPC."""


@dataclass(frozen=True)
class FleetInfo:
    """The content of `fleet.json`, of a fleet or of an agent's kit. `agents` is empty in a kit, `agent` in a fleet."""

    fleet: str
    host: str
    port: int
    created: str
    valid_until: str
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
        return self.folder / "control" / run


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
    place = os.environ.get("XDG_RUNTIME_DIR", "/tmp")
    plain = re.fullmatch(r"/[A-Za-z0-9._/-]{1,40}", place)  # the path is part of URLs
    return Path(place if plain else "/tmp") / f"perfedrl-{os.getuid()}-{info.fleet[-8:]}"
