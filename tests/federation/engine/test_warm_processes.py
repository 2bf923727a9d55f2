"""NVFlare's processes: started through our own entry, kept ready, quiet, and without folders of old jobs."""

import io
import json
import logging
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobProcessArgs, JobReturnCode
from nvflare.fuel.utils import log_utils

from perfedrl.federation.engine import nvflare_process, processes, warm_launcher
from perfedrl.federation.engine.logs import CHATTY, log_config
from perfedrl.federation.engine.nvflare_process import CLIENT_JOB, PARTS, SERVER
from perfedrl.federation.engine.warm_launcher import KEPT, WarmClientLauncher

READER = [sys.executable, "-c", "import sys; sys.exit(0 if sys.stdin.readline() else 3)"]
"""A process that ends well if it is given a line."""
JOB_ID = "2dff7ddc-9fa1-4ddd-9632-67bf97b3dc31"


@pytest.fixture
def programs(monkeypatch):
    """Programs that only remember how they were called."""
    ran = []

    def fake(program):
        def parse_arguments():
            return SimpleNamespace(workspace="w", job_id="j", argv=sys.argv[1:], variable=os.environ.get("GIVEN"))

        return SimpleNamespace(__name__=program, parse_arguments=parse_arguments, main=None)

    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for name in ("shorten_waits", "use_one_thread"):
        monkeypatch.setattr(nvflare_process, name, lambda name=name: ran.append(name))
    monkeypatch.setattr(nvflare_process.importlib, "import_module", fake)
    monkeypatch.setattr(
        nvflare_process.MainProcessMonitor, "run", lambda _, folder, args, **__: ran.append((folder, args))
    )
    return ran


def test_a_warm_process_imports_first_and_then_waits_for_its_job(programs, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(nvflare_process.order(["-m", "x y"], {"GIVEN": "token"}).decode()))
    monkeypatch.setenv("GIVEN", "")
    watched = []
    monkeypatch.setattr(nvflare_process, "end_with", watched.append)
    nvflare_process.main(["--warm", CLIENT_JOB, "kit", "17"])
    assert watched == [17]
    *settings, (folder, arguments) = programs
    assert settings == ["shorten_waits", "use_one_thread"]
    assert folder == os.path.join("w", "j")
    assert (arguments.argv, arguments.variable) == (["-m", "x y"], "token")
    programs.clear()
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert nvflare_process.main(["--warm", CLIENT_JOB, "kit", "17"]) == 0
    assert programs == [], "a process whose parent has ended runs nothing"


def test_a_warm_process_ends_with_its_parent():
    """Its parent starts it, says its process id and ends; the input stays open, as in another process that has it."""
    script = "from perfedrl.federation.engine import nvflare_process as n; import os, subprocess, sys; "
    start = "print(subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())]).pid, flush=True)"
    waits = script + "import time; n.end_with(int(sys.argv[1])); time.sleep(600)"
    parent = subprocess.run([sys.executable, "-c", script + start, waits], capture_output=True, text=True, check=True)
    child = int(parent.stdout)
    end = time.monotonic() + 120
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.1)


def test_the_server_runs_in_its_own_folder(programs):
    nvflare_process.main([SERVER, "-m", "folder"])
    assert programs[:2] == ["shorten_waits", "use_one_thread"]
    assert programs[2][0] == "w"


def test_a_bridges_job_is_kept_warm_without_jax():
    parts = ", ".join([CLIENT_JOB, *PARTS[CLIENT_JOB], "perfedrl.federation.engine.nvflare_process"])
    code = f"import {parts}, sys; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """A launcher whose processes only wait for a line; the test says when the next one is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warm_launcher, "warm_command", lambda *_: READER)
    launcher = WarmClientLauncher()
    launcher.timers = []
    monkeypatch.setattr(
        warm_launcher.threading,
        "Timer",
        lambda _, call: launcher.timers.append(call) or SimpleNamespace(start=lambda: 0),
    )
    yield launcher
    launcher.handle_event(EventType.SYSTEM_END, FLContext())


def launch(launcher):
    context = FLContext()
    names = {JobProcessArgs.EXE_MODULE: ("-m", CLIENT_JOB), JobProcessArgs.AUTH_TOKEN: ("-t", "token")}
    context.set_prop(FLContextKey.JOB_PROCESS_ARGS, names, private=True)
    return launcher.launch_job({"job_id": JOB_ID}, context)


def test_a_job_gets_the_waiting_process_and_another_is_warmed_later(launcher):
    launcher.handle_event(EventType.SYSTEM_START, FLContext())
    spare = launcher._spare
    job = launch(launcher)
    assert job.process is spare
    assert launcher._spare is None
    job.wait()
    assert job.poll() == JobReturnCode.SUCCESS
    launcher.timers.pop()()
    assert launcher._spare.poll() is None
    launcher._spare.kill()
    launcher._spare.wait()
    job = launch(launcher)
    job.wait()
    assert job.poll() == JobReturnCode.SUCCESS, "a waiting process that was killed is replaced"
    job = launch(launcher)
    job.terminate()
    job.wait()
    assert job.poll() in (JobReturnCode.SUCCESS, JobReturnCode.EXECUTION_ERROR)


def test_the_folders_of_old_jobs_are_removed(launcher, tmp_path):
    old, new, running = (f"{i}{JOB_ID[1:]}" for i in range(3))
    for name in (old, new, running, "agent"):
        (tmp_path / name / "app").mkdir(parents=True)
        if name != new:
            os.utime(tmp_path / name, (time.time() - 2 * KEPT,) * 2)
    launcher._jobs[running] = SimpleNamespace(process=SimpleNamespace(poll=lambda: None))
    launcher.handle_event(EventType.SYSTEM_START, FLContext())
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([new, running, "agent"])


def test_a_restarted_agent_has_its_name_again_and_a_copy_of_its_kit_has_another(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "socket_folder", lambda _: tmp_path / "run" / "fleet")
    kit, copy = (SimpleNamespace(folder=tmp_path / name, info=None) for name in ("kit", "copy"))
    first = processes.instance_of(kit)
    assert len(first) == 32
    assert processes.instance_of(kit) == first
    assert processes.instance_of(copy) != first
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run" / "fleet").iterdir()} == {0o600}


def test_nvflare_writes_each_line_once_and_none_for_a_round():
    with open(log_utils.__file__.replace("log_utils.py", log_utils.DEFAULT_LOG_JSON)) as file:
        default = file.read()
    assert len(json.loads(default)["loggers"]["root"]["handlers"]) == 5
    config = log_config(default)
    assert config["loggers"]["root"]["handlers"] == list(config["handlers"]) == ["consoleHandler"]
    for name in CHATTY:
        __import__(name)
        assert config["loggers"][name]["level"] == "WARNING"
    logging.config.DictConfigurator(config)
