"""Launchers of NVFlare's job processes that keep one process warm: imported, and waiting for its job's arguments."""

import os
import re
import shlex
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobLauncherSpec, JobReturnCode, add_launcher
from nvflare.utils.job_launcher_utils import generate_client_command, generate_server_command, get_credential_env

from perfedrl.federation.engine.nvflare_process import CLIENT_JOB, SERVER_JOB, order, warm_command

REFILL = 5.0
"""Seconds after a job's start until the next process is warmed, so that it does not slow down the job's start."""
JOB, KEPT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), 60.0
"""The name of a job's folder, and the seconds for which it is kept at least."""


class WarmJob(JobHandleSpec):
    """A job's process."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self.process = process

    def terminate(self) -> None:
        """Kill the process."""
        self.process.kill()

    def poll(self) -> int:
        """The exit status in NVFlare's numbers; UNKNOWN while the process runs."""
        code = self.process.poll()
        known = {None: JobReturnCode.UNKNOWN, 0: JobReturnCode.SUCCESS, 9: JobReturnCode.ABORTED}
        return known.get(code, JobReturnCode.EXECUTION_ERROR)

    def wait(self) -> None:
        """Wait for the end of the process."""
        self.process.wait()


class WarmLauncher(JobLauncherSpec):
    """Starts the job processes of one machine.

    They are in the process group of NVFlare's own process and end with it: a waiting one because its input ends, a
    running one by the watch on its parent, and both when the group is killed.
    """

    program = ""

    def __init__(self) -> None:
        super().__init__()
        self._spare: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._folder = ""
        self._jobs: dict[str, WarmJob] = {}

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Offer this launcher for jobs; warm the first process when NVFlare's own process has started."""
        if event_type == EventType.BEFORE_JOB_LAUNCH:
            add_launcher(self, fl_ctx)
        elif event_type == EventType.SYSTEM_START:
            self._folder = os.getcwd()
            self._remove_old_folders()
            self._refill()
        elif event_type == EventType.SYSTEM_END:
            with self._lock:
                spare, self._spare = self._spare, None
            if spare is not None:
                spare.kill()

    def launch_job(self, job_meta: dict, fl_ctx: FLContext) -> WarmJob:
        """Give the waiting process its job, let another one be warmed, and remove the folders of old jobs."""
        with self._lock:
            process, self._spare = self._spare, None
        known = fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS) or {}
        _python, _m, _program, *arguments = shlex.split(self.get_command(fl_ctx), True)
        line = order(arguments, get_credential_env(known))
        if process is None or not _give(process, line):
            process = self._start()
            _give(process, line)
        timer = threading.Timer(REFILL, self._refill)
        timer.daemon = True
        timer.start()
        job = self._jobs[str(job_meta[JobConstants.JOB_ID])] = WarmJob(process)
        self._remove_old_folders()
        return job

    def get_command(self, fl_ctx: FLContext) -> str:
        """The command line with which NVFlare would start the job's process."""
        raise NotImplementedError

    def _remove_old_folders(self) -> None:
        """Remove the folders that NVFlare leaves of jobs that ended a while ago."""
        self._jobs = {name: job for name, job in self._jobs.items() if job.process.poll() is None}
        for path in Path(self._folder).iterdir():
            old = JOB.fullmatch(path.name) and path.name not in self._jobs and path.is_dir()
            if old and path.stat().st_mtime < time.time() - KEPT:
                shutil.rmtree(path, ignore_errors=True)

    def _refill(self) -> None:
        with self._lock:
            if self._spare is None or self._spare.poll() is not None:
                self._spare = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(warm_command(self.program, self._folder or os.getcwd()), stdin=subprocess.PIPE)


class WarmClientLauncher(WarmLauncher):
    """The launcher on an agent's machine."""

    program = CLIENT_JOB

    def get_command(self, fl_ctx: FLContext) -> str:
        return generate_client_command(fl_ctx)


class WarmServerLauncher(WarmLauncher):
    """The launcher on the server's machine."""

    program = SERVER_JOB

    def get_command(self, fl_ctx: FLContext) -> str:
        return generate_server_command(fl_ctx)


def _give(process: subprocess.Popen[bytes], line: bytes) -> bool:
    """Write a line to a process, and close its input; False if it has ended."""
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as file:
        file.write(line)
        return process.poll() is None
    return False
