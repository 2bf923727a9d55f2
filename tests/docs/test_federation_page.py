"""docs/federation.md as a reader follows it: its files are valid, and its commands run in their order.

A comment above a block of commands says if they keep running, each in a terminal of its own, or are not run here.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from printed_pages import FILE, pattern

from perfedrl.experiments.config import read_config
from perfedrl.federation.agent.config import load_agent_config, read_plan
from perfedrl.federation.environment_report import agents_of
from perfedrl.federation.server.network_config import networked
from perfedrl.federation.server.run_folder import Terms

PAGE = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
STEPS = PAGE.split("## Step by step")[1].split("\n## ")[0]
BLOCK = re.compile(r"(?:^<!-- (.+?) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STAYS, ELSEWHERE = "keeps running", "not run: needs other machines"
PORT = "8002"


def blocks(kind):
    """The blocks of one kind among the steps, with their comments."""
    return [(mark, content) for mark, language, content in BLOCK.findall(STEPS) if language == kind]


@pytest.fixture
def files(tmp_path):
    """The folder of a reader who has made the page's files."""
    for _, content in blocks("toml"):
        (tmp_path / FILE.match(content)[1]).write_text(content)
    for line in commands():
        if line.startswith("sed "):
            subprocess.run(line, shell=True, cwd=tmp_path, check=True)
    return tmp_path


def commands(*marks):
    """The commands of the blocks with these comments, in order; without comments by default."""
    return [line for mark, content in blocks("sh") if mark in (marks or ("",)) for line in content.splitlines()]


def test_every_file_of_the_page_is_valid_and_fits_the_others(files):
    wanted = networked(read_config(files / "poles.toml"))
    agents = [load_agent_config(path) for path in sorted(files.glob("agent-*.toml"))]
    (made,) = re.findall(r"init fleet --agents (\d+)", STEPS)
    assert len(agents) == int(made) == agents_of(wanted) + 1
    Terms(agents_of(wanted), personalize=20)
    for number, agent in enumerate(agents):
        own = read_plan(wanted.to_toml(), agent, number).experiment
        assert own.algorithm.trajectories_per_round == 40
    lengths = [agent.tasks(0)[0].settings["length"] for agent in agents]
    assert lengths == [0.3, 0.5, 0.8, 1.2]
    simulated = wanted.experiment.fleet
    assert [simulated.task(i).settings["length"] for i in range(simulated.agents)] == lengths[:3]


def test_every_command_of_the_page_is_run_or_says_why_not():
    assert {mark for mark, _ in blocks("sh")} == {"", STAYS, ELSEWHERE}
    elsewhere = [
        line
        for mark, language, content in BLOCK.findall(PAGE.replace(STEPS, ""))
        if language == "sh" and mark != ELSEWHERE
        for line in content.splitlines()
    ]
    assert [line.partition("  ")[0] for line in elsewhere] == [
        'pip install "perfedrl[federation,gym]"',
        "perfedrl federation demo",
    ]
    joined = [line.split()[3] for line in commands(STAYS) if " join " in line]
    assert [line.split()[3] for line in commands() if " stop fleet/kits" in line] == joined


class Terminals:
    """A reader's terminals: commands that keep running write to files, and end when they are stopped."""

    def __init__(self, folder, port):
        self.folder, self.port, self.running = folder, port, {}
        (folder / "bin").mkdir()
        program = folder / "bin" / "perfedrl"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m perfedrl "$@"\n')
        program.chmod(0o755)
        self.env = {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}

    def run(self, line):
        done = subprocess.run(
            line.replace(PORT, self.port), shell=True, cwd=self.folder, env=self.env, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"

    def open(self, line):
        log = self.folder / f"terminal-{len(self.running)}.log"
        with open(log, "wb") as file:
            self.running[line] = log, subprocess.Popen(
                f"exec {line}", shell=True, cwd=self.folder, env=self.env, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip

    def expect(self, line, printed):
        """Wait until a running command has printed a line; an agent says within a second what it did."""
        log, process = self.running[line]
        deadline = time.monotonic() + 300
        while not re.search(rf"^{pattern(printed)}$", log.read_text(), re.MULTILINE):
            going_on = process.poll() is None and time.monotonic() < deadline
            assert going_on, f"{printed!r} is not in:\n{log.read_text()}"
            time.sleep(0.1)

    def close(self):
        """Wait for the ends of all commands; kill those that go on."""
        ended = {}
        for line, (_, process) in self.running.items():
            try:
                ended[line] = process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                ended[line] = "killed"
        return ended


@pytest.mark.network
def test_the_page_runs_as_printed(tmp_path):
    from perfedrl.federation.engine.local_fleet import free_port

    terminals = Terminals(tmp_path, str(free_port()))
    try:
        for mark, language, content in BLOCK.findall(STEPS):
            if language == "toml":
                (tmp_path / FILE.match(content)[1]).write_text(content)
            elif language == "text":
                for line in content.splitlines():
                    terminals.expect(commands(STAYS)[1], line)
            elif language == "python":
                (tmp_path / "act.py").write_text(content)
                terminals.run(f"{sys.executable} act.py")
            elif mark != ELSEWHERE:
                for line in content.splitlines():
                    (terminals.open if mark == STAYS else terminals.run)(line)
        (done,) = (tmp_path / "fleet" / "runs").iterdir()
        assert done.name.startswith("poles-")
        assert len(list((tmp_path / "fleet" / "kits").glob("agent-*/agent/personal-*.safetensors"))) == 4
    finally:
        ended = terminals.close()
    assert set(ended.values()) == {0}, ended
