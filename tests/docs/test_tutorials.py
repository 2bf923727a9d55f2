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
from printed_pages import FILE, pattern

from perfedrl.algorithms import Algorithm
from perfedrl.envs import BaseTask
from perfedrl.federation.agent.config import load_agent_config, read_plan
from perfedrl.report.episode_strip import can_draw

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
    assert [page.names["policy"].act(state, deterministic=True) for state in range(5)] == [0, 0, 1, 1, 2]
    assert follows(page.folder, "machines.toml")


@pytest.mark.parametrize("page", ["../algorithms/own"], indirect=True)
def test_an_algorithm_of_ones_own_runs_from_python_and_from_a_config(page):
    """The page's class is complete: `simulate`, `perfedrl train`, inside a wrapper, and `perfedrl compare` take it."""
    (run,) = (page.folder / "runs").glob("halfway-*")
    assert "halfway:Halfway" in (run / "config.toml").read_text()
    check_comparison(page)


def check_comparison(page):
    """Check that the page compared a class by its convention, and a `Method` that says all itself, at one budget."""
    said = page.commands["perfedrl compare halves.toml"]
    for line in ("halves: 1 of 3 methods, fedavg-pg", "halves: 3 of 3 methods, one_step:ONE_STEP, about"):
        assert line in said
    configs = {p.parent.name.rpartition("-")[0]: p.read_text() for p in page.folder.glob("runs/halves-*/config.toml")}
    tables = {name: tomllib.loads(text)["algorithm"] for name, text in configs.items()}
    own, one_step = tables["halves-halfway.Halfway"], tables["halves-one_step.ONE_STEP"]
    assert (own["local_steps"], own["m"]) == (2, 10)
    assert (one_step["local_steps"], one_step["m"], one_step["alpha"]) == (1, 20, 0.5)
    (results,) = (page.folder / "comparisons").iterdir()
    entries = {path.stem: json.loads(path.read_text()) for path in results.iterdir()}
    assert entries["halfway.Halfway"]["trajectories"] == [0, 40] == entries["one_step.ONE_STEP"]["trajectories"]
    assert set(entries["one_step.ONE_STEP"]["settings"]) == {"beta"}
    html = (page.folder / "comparison.html").read_text()
    assert "halfway, one local step" in html
    assert "pink: your own" in html


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
@pytest.mark.parametrize("page", ["acting"], indirect=True)
def test_a_newcomer_acts_with_softmax_and_gaussian_policies(page):
    assert page.names["steps"] > 10
    assert (page.names["inflow"].shape, page.names["inflow"].dtype) == ((1,), np.float32)
    assert 0 <= page.names["inflow"][0] <= 45
    assert page.names["further"].spaces.actions.center == (22.5,)


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
