"""`python -m perfedrl.federation.engine.nvflare_process PROGRAM ...`: run one of NVFlare's programs with our settings.

With `--warm PROGRAM FOLDER PARENT` it imports the program and waits for one line of JSON on standard input, with the
program's arguments and environment variables; the folder only shows in the list of processes whose process it is. It
ends with its parent, whose process id it is given, and if the input ends before that line. With `--after SOCKET PROGRAM
...` it waits until an agent's daemon answers there.
"""

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from nvflare.fuel.f3.mpm import MainProcessMonitor

from perfedrl.federation.agent.daemon_client import AgentUnreachable, call
from perfedrl.federation.engine.nvflare_settings import shorten_waits
from perfedrl.federation.engine.stream_cleanup import use_one_thread
from perfedrl.federation.frames import Frame

PACKAGE = "nvflare.private.fed.app"
SERVER, SERVER_JOB = f"{PACKAGE}.server.server_train", f"{PACKAGE}.server.runner_process"
CLIENT, CLIENT_JOB = f"{PACKAGE}.client.client_train", f"{PACKAGE}.client.worker_process"
PARTS = {SERVER_JOB: ("perfedrl.federation.engine.workflow",), CLIENT_JOB: ("perfedrl.federation.engine.bridge",)}
"""The modules that a job's process will need beside the program."""
LAST_MOMENTS = 0.2
"""Seconds that a process gives its pending activities when it ends; NVFlare's default is 3."""


def command(program: str, *arguments: str, after: Path | None = None) -> list[str]:
    """The command line of a program."""
    return [*_PYTHON, *([] if after is None else ["--after", str(after)]), program, *arguments]


def warm_command(program: str, folder: str) -> list[str]:
    """The command line of a process that waits for its arguments."""
    return [*_PYTHON, "--warm", program, folder, str(os.getpid())]


_PYTHON = [sys.executable, "-u", "-m", "perfedrl.federation.engine.nvflare_process"]


def order(arguments: list[str], environment: dict[str, str]) -> bytes:
    """The line that a warm process waits for."""
    return json.dumps([arguments, environment]).encode() + b"\n"


def main(arguments: list[str]) -> Any:
    """Run the program that the arguments name; return its exit status."""
    match arguments:
        case ["--warm", program, _, parent]:
            end_with(int(parent))
            module = load(program)
            line = sys.stdin.readline()
            if not line:
                return 0
            given, environment = json.loads(line)
            os.environ.update(environment)
        case ["--after", socket, program, *given]:
            module = load(program)
            wait_for_daemon(Path(socket))
        case [program, *given]:
            module = load(program)
    return run(module, given)


def end_with(parent: int) -> None:
    """End this process when its parent has ended.

    NVFlare's own watch begins when the job does, and takes whatever process is the parent then for its own.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="watch on the parent", daemon=True).start()


def load(program: str) -> ModuleType:
    """Import a program and the parts that it will need."""
    module = importlib.import_module(program)
    for part in PARTS.get(program, ()):
        importlib.import_module(part)
    return module


def run(module: ModuleType, arguments: list[str]) -> Any:
    """Run a program as NVFlare does, but with our settings."""
    shorten_waits()
    use_one_thread()
    sys.argv = [module.__name__, *arguments]
    options = module.parse_arguments()
    job = () if module.__name__ in (SERVER, CLIENT) else (options.job_id,)
    folder = os.path.join(options.workspace, *job)
    return MainProcessMonitor.run(module.main, folder, shutdown_grace_time=LAST_MOMENTS, args=options)


def wait_for_daemon(socket: Path) -> None:
    """Wait until an agent's daemon answers."""
    while True:
        try:
            call(socket, Frame("health"), timeout=60.0)
            return
        except AgentUnreachable:
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
