"""The processes of a fleet's machines, and checks of ports, kits and certificates before they start."""

import asyncio
import errno
import hashlib
import os
import secrets
import socket
import ssl
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from perfedrl.errors import UserError
from perfedrl.federation.connections.dialer import INSTANCE, NotAdmitted, Target, probe
from perfedrl.federation.connections.streams import BROKEN, client_context
from perfedrl.federation.engine import nvflare_process
from perfedrl.federation.engine.authority import ORGANIZATION, read_certificate
from perfedrl.federation.engine.bridge import SOCKET
from perfedrl.federation.engine.driver import CONNECTION_LOG, SOCKETS
from perfedrl.federation.engine.fleet_folder import FleetFolder, FleetInfo, Kit, socket_folder
from perfedrl.federation.engine.nvflare_process import CLIENT, SERVER
from perfedrl.federation.engine.nvflare_settings import HEARTBEAT
from perfedrl.federation.private_sockets import check_socket_path
from perfedrl.federation.restarting_process import RestartingProcess

FEW_ARENAS = {"MALLOC_ARENA_MAX": "2"}
"""NVFlare's threads take a MiB for every message; with an arena for each thread most of that would stay taken."""


def server_process(fleet: FleetFolder) -> RestartingProcess:
    """NVFlare's server, restarted when it ends."""
    command = _command(SERVER, fleet.server, "fed_server.json")
    engine = {**engine_environment(fleet.info), CONNECTION_LOG: str(fleet.connection_log)}
    return RestartingProcess(command, fleet.server / "server.log", environment(**engine), fleet.server)


def client_process(kit: Kit) -> RestartingProcess:
    """NVFlare's client of one agent, restarted when it ends; it connects once the daemon answers.

    Environment variables name the daemon's socket, and this copy of the kit.
    """
    more = f"uid={kit.info.agent}", f"heart_beat_interval={HEARTBEAT}"
    command = _command(CLIENT, kit.folder, "fed_client.json", *more, after=kit.socket)
    own = {SOCKET: str(kit.socket), INSTANCE: instance_of(kit), **engine_environment(kit.info)}
    return RestartingProcess(command, kit.folder / "bridge.log", environment(**own), kit.folder)


def daemon_process(kit: Kit, agent_config: Path | None, env: str | None) -> RestartingProcess:
    """The agent's daemon, restarted when it ends."""
    own = ["--socket", str(kit.socket), "--state", str(kit.state), "--number", str(kit.info.number)]
    file = [] if agent_config is None else [str(agent_config.resolve())]
    command = [sys.executable, "-m", "perfedrl", "agent", *file, *own, *([] if env is None else ["--env", env])]
    return RestartingProcess(command, kit.folder / "agent.log", environment(), Path.cwd())


def environment(**more: str) -> Mapping[str, str]:
    """Environment variables of a child process: unbuffered logs, and no proxies between machines of the fleet."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", "no_grpc_proxy": "*", **more}


def engine_environment(info: FleetInfo) -> dict[str, str]:
    """Environment variables with which NVFlare finds perfedrl's connections, and a folder for its Unix sockets."""
    folder = socket_folder(info)
    check_socket_path(folder / "engine.sock")
    drivers = str(Path(__file__).parent / "drivers")
    return {"NVFLARE_COMM_DRIVER_PATH": drivers, SOCKETS: str(folder), **FEW_ARENAS}


def _command(program: str, folder: Path, start: str, *more: str, after: Path | None = None) -> list[str]:
    options = ["-m", str(folder), "-s", start, "--set", "secure_train=true", *more, f"org={ORGANIZATION}"]
    return nvflare_process.command(program, *options, "config_folder=config", after=after)


def instance_of(kit: Kit) -> str:
    """A secret name of this copy of a kit, kept outside of it until the machine restarts.

    An agent that was killed has it again and need not wait until the server has forgotten its old processes; a copy of
    the kit in another place has another one.
    """
    folder = socket_folder(kit.info)
    check_socket_path(folder / "engine.sock")
    path = folder / f"instance-{hashlib.sha256(os.fsencode(kit.folder)).hexdigest()[:16]}"
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="ascii") as file:
        name = file.read()
        if not name:
            name = secrets.token_hex(16)
            file.write(name)
    return name


def check_port(host: str, port: int) -> None:
    """Check that a port can be listened on."""
    loopback = host in ("localhost", "127.0.0.1")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1" if loopback else "0.0.0.0", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {port} is in use: is a server running already?") from error
            raise UserError(f"port {port} cannot be listened on: {error.strerror}") from error


def check_clock(certificate: Path) -> None:
    """Check that a certificate is valid now, by this machine's clock."""
    cert, now = read_certificate(certificate), datetime.now(UTC)
    if now < cert.not_valid_before_utc:
        raise UserError(
            f"this machine's clock says {now:%Y-%m-%d %H:%M:%S} UTC, which is before the certificate was made "
            f"({cert.not_valid_before_utc:%Y-%m-%d %H:%M:%S}): set the clock"
        )
    if now > cert.not_valid_after_utc:
        raise UserError(
            f"the certificate {certificate.name} expired on {cert.not_valid_after_utc:%Y-%m-%d}: "
            "`perfedrl federation renew` makes a new one on the server's machine"
        )


def check_server(kit: Kit) -> bool:
    """Whether the kit's server answers; an error if another server does, False if none listens yet."""
    host, port = kit.info.host, kit.info.port
    context = client_context(str(kit.authority), str(kit.certificate), str(kit.key))
    try:
        asyncio.run(probe(Target(host, port, context), instance_of(kit)))
        return True
    except NotAdmitted as error:
        raise UserError(f"the server refuses this kit: {error}") from error
    except ssl.SSLCertVerificationError as error:
        raise UserError(_reason(error, host)) from error
    except ssl.SSLError as error:
        raise UserError(f"the server at {host}:{port} rejects this kit's certificate: {error.reason}") from error
    except socket.gaierror as error:
        raise UserError(f"the server's host name {host!r} cannot be resolved on this machine") from error
    except BROKEN:
        return False


def _reason(error: ssl.SSLCertVerificationError, host: str) -> str:
    """Explain why the server's certificate was rejected."""
    known = {
        10: "the server's certificate has expired: `perfedrl federation renew` makes a new one on its machine",
        9: "the server's certificate is not valid yet by this machine's clock: set the clock",
        62: f"the server's certificate is not for the host name {host!r}",
        64: f"the server's certificate is not for the address {host!r}",
    }
    other = "the server that answers belongs to another fleet: its certificate is from another authority"
    return known.get(error.verify_code, other)
