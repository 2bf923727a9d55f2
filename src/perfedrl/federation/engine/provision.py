"""Create a fleet's certificates and signed start-up kits with NVFlare's provisioner."""

import contextlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvflare.lighter.constants import CtxKey, ParticipantType
from nvflare.lighter.ctx import ProvisionContext
from nvflare.lighter.entity import Participant, Project
from nvflare.lighter.impl.cert import CertBuilder
from nvflare.lighter.impl.static_file import StaticFileBuilder
from nvflare.lighter.impl.workspace import WorkspaceBuilder
from nvflare.lighter.provisioner import Provisioner
from nvflare.lighter.utils import sign_folders

from perfedrl.errors import UserError
from perfedrl.federation.engine.authority import ORGANIZATION, keep_root_only
from perfedrl.federation.engine.driver import SCHEME, UNIX
from perfedrl.federation.engine.fleet_folder import ABOUT, OPERATOR, OPERATOR_ROLE, STORAGE, FleetInfo, check_path
from perfedrl.federation.engine.kit_checks import SIGNATURES, sign_kit
from perfedrl.federation.engine.logs import log_config
from perfedrl.federation.engine.message_limits import ENVELOPE, LARGEST
from perfedrl.federation.frames import LIMIT

AUTHORITY_DAYS = 3650
BRIDGE, WORKFLOW = "perfedrl.federation.engine.bridge.AgentBridge", "perfedrl.federation.engine.workflow.Rounds"
LAUNCHER, LAUNCHERS = "process_launcher", "perfedrl.federation.engine.warm_launcher"
GUARD = {"id": "server_guard", "path": "perfedrl.federation.engine.server_guard.ServerGuard", "args": {}}
RIGHTS = {
    **dict.fromkeys(("submit_job", "clone_job", "manage_job", "download_job", "view", "operate"), "any"),
    **dict.fromkeys(("shell_commands", "byoc", "server-predeployed-flwr"), "none"),
}
"""The operator's rights on a machine of the fleet: no shell commands and no code of its own."""
UNUSED = ("readme.txt", "startup/start.sh", "startup/sub_start.sh", "startup/stop_fl.sh", "local/privacy.json.sample")
"""NVFlare's own scripts in a kit, removed since `perfedrl federation join` replaces them."""
MOST_AGENTS = 10_000
REPEAT = {"streaming_retry_wait": 1.0, "streaming_retry_timeout": 10.0}
"""Seconds after which an unconfirmed message is sent again, and for how long; a receiver remembers it as long."""
CHECK_JOB = 0.5
"""Seconds between two checks of a job's process whether it is to end."""
HEARTBEAT_REPLY = 5.0
"""Seconds in which the server must answer a heartbeat; NVFlare waits for 30, also for a server that was restarted."""
HEARTBEAT_TIMEOUT = 600
"""Seconds after which the server drops a client without heartbeats."""


def init(
    folder: str | Path, agents: int, host: str = "localhost", port: int = 8002, keys_on_agents: bool = False
) -> FleetInfo:
    """Create a fleet's folder: an authority, and the kits of the server, the operator and each agent.

    The folder appears only when it is complete; an existing folder must be empty. With `keys_on_agents` the agents'
    kits have neither keys nor certificates, which `signing_requests` makes later.
    """
    folder = Path(folder).resolve()
    check(folder, agents, host, port)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        info = _make(draft, agents, host, port, AgentlessCertBuilder if keys_on_agents else CertBuilder)
        if folder.exists():
            folder.rmdir()
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return info


def check(folder: Path, agents: int, host: str, port: int) -> None:
    """Check the settings of a new fleet."""
    check_path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: a fleet needs a new folder")
    if not 1 <= agents <= MOST_AGENTS:
        raise UserError(f"expected 1 to {MOST_AGENTS} agents, got {agents}")
    if not 1 <= port <= 65535:
        raise UserError(f"the port must be from 1 to 65535, got {port}")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?", host):
        raise UserError(f"expected the server's host name as the agents' machines know it, got {host!r}")


def _make(draft: Path, agents: int, host: str, port: int, certificates: type[CertBuilder]) -> FleetInfo:
    """Create everything in a draft folder, which is renamed later: no file in it holds its path."""
    names = tuple(f"agent-{i}" for i in range(agents))
    fleet = f"fleet-{secrets.token_hex(4)}"
    made, key = _provision(draft / "authority", fleet, names, host, port, certificates(AUTHORITY_DAYS))
    shutil.move(made / host, draft / "server")
    shutil.move(made / OPERATOR, draft / "operator")
    for name in names:
        shutil.move(made / name, draft / "kits" / name)
    shutil.rmtree(made)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    common: dict[str, Any] = {"fleet": fleet, "host": host, "port": port, "created": created}
    for number, name in enumerate(names):
        kit = draft / "kits" / name
        FleetInfo(**common, agent=name, number=number).save(kit / "startup" / ABOUT)
        _client_resources(kit)
        sign_kit(kit, key)
    _server_resources(draft / "server", agents)
    for part in ("startup", "local"):
        sign_folders(str(draft / "server" / part), key, signature_file=SIGNATURES)
    info = FleetInfo(**common, agents=names)
    info.save(draft / ABOUT)
    for path in (draft, draft / "authority", draft / "operator", draft / "server", draft / "kits"):
        path.chmod(0o700)
    return info


def _provision(
    workspace: Path, fleet: str, names: tuple[str, ...], host: str, port: int, certificates: CertBuilder
) -> tuple[Path, Any]:
    """Let NVFlare create all kits; return their folder and the authority's key."""
    project = Project(fleet, "a perfedrl fleet")
    project.set_server(host, ORGANIZATION, {"fed_learn_port": port, "admin_port": port})
    for name in names:
        project.add_client(name, ORGANIZATION, {})
    project.add_admin(OPERATOR, ORGANIZATION, {"role": OPERATOR_ROLE})
    builders = [WorkspaceBuilder(), StaticFileBuilder(config_folder="config", scheme=SCHEME)]
    log = _ProvisionerLog()
    with contextlib.redirect_stderr(io.StringIO()):  # the provisioner prints a traceback beside its error
        made = Provisioner(str(workspace), [*builders, certificates]).provision(project, logger=log)
    if made.get(CtxKey.BUILD_ERROR):
        raise UserError(f"NVFlare could not create the kits: {' '.join(log.errors)}")
    keep_root_only(workspace)
    return Path(made[CtxKey.CURRENT_PROD_DIR]), made[CtxKey.ROOT_PRI_KEY]


def _client_resources(kit: Path) -> None:
    """Restrict an agent's machine to perfedrl's bridge, and turn off its log streaming."""
    resources = _defaults(kit)
    resources |= {"class_allow_list": [BRIDGE], "allow_log_streaming": False}
    resources["client"]["maint_msg_timeout"] = HEARTBEAT_REPLY
    resources["components"] = _parts(resources, "site_log_streamer", f"{LAUNCHERS}.WarmClientLauncher")
    _write_local(kit, resources, _comm(LIMIT + ENVELOPE))


def _server_resources(kit: Path, agents: int) -> None:
    """Restrict the server to perfedrl's workflow, and let it store jobs where `write_storage` says."""
    text = json.dumps(_defaults(kit)).replace("/tmp/nvflare", f"{{{STORAGE}}}")
    resources = json.loads(text)
    resources["class_allow_list"] = [WORKFLOW]
    resources["components"] = [*_parts(resources, "log_receiver", f"{LAUNCHERS}.WarmServerLauncher"), GUARD]
    resources["servers"][0] |= {"max_num_clients": max(100, agents), "heart_beat_timeout": HEARTBEAT_TIMEOUT}
    resources["servers"][0]["check_engine_frequency"] = CHECK_JOB
    _write_local(kit, resources, _comm(LARGEST))


def _parts(resources: dict[str, Any], unused: str, launcher: str) -> list[dict[str, Any]]:
    """NVFlare's own components of a machine, without an unused one and with our launcher of jobs."""
    parts = [part for part in resources["components"] if part["id"] not in (unused, LAUNCHER)]
    return [*parts, {"id": LAUNCHER, "path": launcher, "args": {}}]


def _comm(most: int) -> dict[str, Any]:
    """Limit the messages that belong together to some bytes, and connect job processes by Unix sockets.

    The process of a job on the server raises the limit to the largest answer of its run.
    """
    internal = {"scheme": UNIX, "resources": {"connection_security": "clear"}}
    return {"streaming_max_blob_size": most, "internal": internal, **REPEAT}


def _defaults(kit: Path) -> dict[str, Any]:
    """NVFlare's default resources of a kit."""
    return json.loads((kit / "local" / "resources.json.default").read_text(encoding="utf-8"))


def _write_local(kit: Path, resources: dict[str, Any], comm: dict[str, Any]) -> None:
    """Write a machine's settings and remove unused files."""
    rights = {"format_version": "1.0", "permissions": {OPERATOR_ROLE: RIGHTS}}
    logs = log_config((kit / "local" / "log_config.json.default").read_text(encoding="utf-8"))
    contents = {"resources.json": resources, "comm_config.json": comm, "authorization.json": rights}
    contents["log_config.json"] = logs
    for name, content in contents.items():
        (kit / "local" / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in UNUSED:
        (kit / name).unlink()


class AgentlessCertBuilder(CertBuilder):
    """Makes no keys and certificates of agents; their kits get the authority's certificate only."""

    def _build_write_cert_pair(self, participant: Participant, base_name: str, ctx: ProvisionContext) -> None:
        if participant.type == ParticipantType.CLIENT:
            (Path(ctx.get_kit_dir(participant)) / "rootCA.pem").write_bytes(self.serialized_cert)
        else:
            super()._build_write_cert_pair(participant, base_name, ctx)


class _ProvisionerLog:
    """Collects the errors of NVFlare's provisioner, and passes on its warnings."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def debug(self, message: str) -> None:
        logging.getLogger(__name__).debug(message)

    info = debug

    def warning(self, message: str) -> None:
        logging.getLogger(__name__).warning(message)

    def error(self, message: str) -> None:
        self.errors.append(message)
