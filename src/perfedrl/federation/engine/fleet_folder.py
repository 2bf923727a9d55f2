"""A fleet's folder on the server's machine, and an agent's start-up kit: what lies where.

In a fleet's folder: `fleet.json` (name, host, port, agents), `authority` (the certificates' authority: keep it safe),
`server` and `operator` (their kits), `kits` (the agents', to be carried to their machines), `control` (runs under way)
and `runs` (finished ones).
"""

import json
import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from perfedrl.errors import UserError

ABOUT, OPERATOR = "fleet.json", "operator@perfedrl.fleet"
FORMAT = 1


@dataclass(frozen=True)
class About:
    """What a fleet, or an agent's kit, says of itself. `agents` is empty in a kit, `agent` in a fleet."""

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
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path, what: str) -> "About":
        """Read it; `what` is what the folder should be."""
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            about = About(**{**content, "agents": tuple(content.get("agents", ()))})
        except FileNotFoundError as error:
            raise UserError(f"{path.parent} is no {what}; `perfedrl federation init` makes one") from error
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged or of another version of perfedrl") from error
        if about.format != FORMAT:
            raise UserError(f"{path} was written by another version of perfedrl (format {about.format})")
        return about


class FleetFolder:
    """A fleet, as its server's machine has it."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).resolve()
        self.about = About.load(self.folder / ABOUT, "fleet")

    @property
    def server(self) -> Path:
        return self.folder / "server"

    @property
    def operator(self) -> Path:
        return self.folder / "operator"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def kit(self, name: str) -> Path:
        """An agent's kit."""
        return self.folder / "kits" / name

    def control(self, run: str) -> Path:
        """The folder of a run under way."""
        return self.folder / "control" / run


class Kit:
    """One agent's start-up kit, on the agent's machine; the agent keeps its own things in it."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).resolve()
        self.about = About.load(self.folder / "startup" / ABOUT, "agent's start-up kit")
        if not self.about.agent or self.about.number < 0:
            raise UserError(f"{self.folder} is the kit of no agent")

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
        """Where the agent keeps its personal state."""
        return self.folder / "agent"

    @cached_property
    def socket(self) -> Path:
        """Where the agent's daemon listens: beside its state, or, where that path is too long for one, elsewhere."""
        own = self.state / "agent.sock"
        if len(os.fsencode(own)) < 100:
            return own
        short = Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")) / f"perfedrl-{os.getuid()}-{self.about.fleet[-8:]}"
        return short / f"{self.about.agent}.sock"
