"""Tutorials that cannot go stale: every block of a page runs, in order, and what it says is printed is printed."""

import importlib
import json
import re
import shlex
import sys
import tomllib
from contextlib import redirect_stdout
from glob import glob
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tomli_w
from contract_members import public_members

from perfedrl.algorithms import Algorithm
from perfedrl.envs import BaseTask
from perfedrl.federation.agent.config import load_agent_config, read_plan
from perfedrl.report.episode_strip import can_draw

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+\.(?:py|toml))\n")


class Page:
    """A page in a folder of its own: blocks that begin with a file's name are files, the others are run."""

    def __init__(self, name, folder, run):
        self.text, self.folder, self.run = (FOLDER / f"{name}.md").read_text(), folder, run
        self.names, self.commands, self.printed = {"__name__": "__tutorial__"}, {}, ""

    def follow(self):
        """Do what the page says, from its first block to its last."""
        for kind, content in BLOCK.findall(self.text):
            {"python": self.python, "toml": self.file, "console": self.console, "text": self.exactly}[kind](content)
        return self

    def python(self, content):
        if FILE.match(content):
            self.file(content)
            return
        with redirect_stdout(StringIO()) as out:
            exec(compile(content, "tutorial", "exec"), self.names)
        self.printed = out.getvalue()

    def file(self, content):
        (self.folder / FILE.match(content)[1]).write_text(content)

    def console(self, content):
        """Run the commands of the block; the lines below a command are lines of what it says."""
        for line in content.splitlines():
            if line.startswith("$ perfedrl "):
                words = [w for word in shlex.split(line)[2:] for w in (sorted(glob(word)) if "*" in word else [word])]
                code, *said = self.run(*words)
                assert code == 0, said
                self.commands[line[2:]] = self.printed = "\n".join(said)
            else:
                self.expect(line)

    def expect(self, line):
        """A line that was printed."""
        assert re.search(rf"^{pattern(line)}\s*$", self.printed, re.MULTILINE), f"{line!r} is not in:\n{self.printed}"

    def exactly(self, content):
        """All that was printed, and nothing else."""
        assert re.fullmatch(pattern(content), self.printed), self.printed


def pattern(text):
    """An ellipsis stands for anything in a line."""
    return ".*".join(re.escape(part) for part in text.split("…"))


@pytest.fixture
def page(request, tmp_path, monkeypatch, run, untyped):
    """A page that was followed in a fresh folder, as by a user: nothing checks types there."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield Page(request.param, tmp_path, run).follow()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def follows(folder, config):
    """Whether the agent of a page's agent.toml takes part in what the page's config describes."""
    agent, plan = load_agent_config(folder / "agent.toml"), tomllib.loads((folder / config).read_text())
    return read_plan(tomli_w.dumps(plan | {"seeds": 1}), agent).name == plan["name"]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["arrays"], indirect=True)
def test_a_newcomer_with_arrays_gets_a_personal_policy(page):
    rows = [row for row in json.loads((page.folder / "machines.json").read_text()) if row["part"] == "held-out"]
    before, after, optimum = (
        np.mean([row[what]["mean"] if what != "optimum" else row[what] for row in rows])
        for what in ("before", "after", "optimum")
    )
    assert before < 0 < 0.9 * optimum < after < optimum
    assert "We saw -1.5 before and 6.2 after" in page.text
    assert (before, after) == (pytest.approx(-1.5, abs=1.0), pytest.approx(6.2, abs=0.3))
    assert page.names["probability"].argmax(axis=1).tolist() == [0, 0, 1, 1, 2]
    assert follows(page.folder, "machines.toml")


@pytest.mark.parametrize("page", ["../algorithms/own"], indirect=True)
def test_an_algorithm_of_ones_own_runs_from_python_and_from_a_config(page):
    """The page's class is complete: it is trained by `simulate` and, inside a wrapper, by `perfedrl train`."""
    (run,) = (page.folder / "runs").iterdir()
    assert run.name.startswith("halfway-")
    assert "halfway:Halfway" in (run / "config.toml").read_text()


def test_the_page_of_ones_own_algorithm_lists_every_member_that_has_a_default():
    section = (FOLDER / "../algorithms/own.md").read_text().split("## 3.")[1]
    optional = public_members(Algorithm) - Algorithm.__abstractmethods__
    assert {name for name in optional if f"`{name}" not in section} == set()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["jax"], indirect=True)
def test_a_newcomer_with_jax_gets_a_personal_policy(page):
    (found,) = json.loads((page.folder / "boats.json").read_text())
    docked = np.mean(found["outcomes"]["success"], axis=(0, 2))
    assert docked == pytest.approx([0.58, 0.9, 0.83], abs=0.1)
    assert "58 % of them dock before any step, 90 % after one and 83 % after two" in page.text
    assert (page.folder / "boats-episode.png").exists()
    assert follows(page.folder, "boats.toml")


@pytest.mark.slow
@pytest.mark.parametrize("page", ["gymnasium"], indirect=True)
def test_a_newcomer_with_gymnasium_gets_a_personal_policy(page):
    (found,) = json.loads((page.folder / "thermostat.json").read_text())
    score = np.asarray(found["outcomes"]["score"])
    assert score.mean(axis=(0, 2)) == pytest.approx([7.7, 8.9, 9.3], abs=0.4)
    assert score.min(axis=2).mean(axis=0) == pytest.approx([4.7, 8.1, 8.7], abs=0.8)
    assert (score.argmin(axis=2)[:, 0] == 2).all(), "the last of those held out likes it coolest"
    assert abs(page.names["env"].room - 18.2) < 3
    assert follows(page.folder, "thermostat.toml")


def test_paths_are_drawn_of_agents_that_say_how_large_their_world_is():
    class WithGoal(BaseTask):
        goal = np.zeros(2)

    class WithGoalInABox(WithGoal):
        box = 1.0

    path = SimpleNamespace(obs=np.zeros((5, 2)))
    assert can_draw(WithGoalInABox(), path)
    assert not can_draw(WithGoal(), path)


def test_the_fleet_of_the_federation_page_can_train_its_config(tmp_path):
    """As many agents as the config trains, and an agent's file that follows it."""
    page = (FOLDER.parent / "federation.md").read_text()
    ((content,), (agents,), (config,)) = (
        re.findall(pattern, page, re.DOTALL)
        for pattern in (
            r"```toml\n# agent.toml\n(.*?)```",
            r"federation init fleet --agents (\d+)",
            r"train fleet (\S+)",
        )
    )
    (tmp_path / "agent.toml").write_text(content)
    (tmp_path / "config.toml").write_text((FOLDER.parents[1] / config).read_text())
    assert follows(tmp_path, "config.toml")
    assert tomllib.loads((tmp_path / "config.toml").read_text())["fleet"]["goals"] == int(agents)
