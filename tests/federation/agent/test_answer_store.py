"""What an agent remembers of a run on its own disk: answers, generations, and damage."""

import errno

import numpy as np
import pytest

from perfedrl.errors import UserError
from perfedrl.federation.agent import answer_store as memories
from perfedrl.federation.agent.answer_store import Memory


class Counting:
    """A round whose upload counts how often it was computed from which state."""

    def __init__(self):
        self.calls = []

    def __call__(self, state):
        self.calls.append(float(state["s"]))
        return {"u": np.asarray([len(self.calls), state["s"]])}, {"s": np.asarray(state["s"] + 1)}


START = {"s": np.asarray(10.0)}


@pytest.fixture
def memory(tmp_path):
    return Memory(tmp_path / "own", 3)


def test_a_question_asked_again_has_the_same_answer(memory):
    compute = Counting()
    ask = lambda *args: memory.answer(*args, START, compute, private=True)  # noqa: E731
    first = ask("r", 1, 0, "a")
    assert (first.upload["u"].tolist(), first.fresh, first.releases) == ([1, 10], True, 1)
    again = ask("r", 1, 0, "a")
    assert (again.upload["u"].tolist(), again.fresh, again.releases) == ([1, 10], False, 1)
    assert ask("r", 1, 0, "b").upload["u"].tolist() == [2, 10]  # another message: from the state before
    assert ask("r", 1, 1, "c").upload["u"].tolist() == [3, 11]
    assert ask("r", 1, 9, "d").upload["u"].tolist() == [4, 12]  # rounds may be missed
    assert Memory(memory.folder, 3).answer("r", 2, 9, "d", START, compute).upload["u"].tolist() == [4, 12]
    assert compute.calls == [10, 10, 11, 12]
    for generation, round_, why in ((1, 10, "stale job"), (2, 8, "is over"), (2, 2**30, "whole number")):
        with pytest.raises(UserError, match=why):
            ask("r", generation, round_, "e")
    assert ask("other", 0, 0, "a").upload["u"].tolist() == [5, 10]
    assert memory.state("r", 2, 9, START)["s"] == 12
    assert memory.state("r", 2, 10, START)["s"] == 13


def test_a_generation_is_stale_from_the_moment_that_a_later_one_prepares(memory):
    memory.join("r", 4, START)
    with pytest.raises(UserError, match="stale"):
        memory.answer("r", 3, 0, "a", START, Counting())
    assert memory.answer("r", 4, 0, "a", START, Counting()).fresh


def test_what_is_personal_is_for_its_user_only(memory):
    memory.answer("r", 1, 0, "a", START, Counting())
    assert memory.folder.stat().st_mode & 0o777 == 0o700
    assert memory.path("r").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("run", ["", "../x", "a/b", ".hidden", "a\n", "x" * 101, "ä"])
def test_a_runs_id_cannot_lead_elsewhere(memory, run):
    with pytest.raises(UserError, match="run's id"):
        memory.answer(run, 1, 0, "a", START, Counting())


def test_a_damaged_file_is_said_to_be_so(memory):
    memory.answer("r", 1, 0, "a", START, Counting())
    path = memory.path("r")
    data = path.read_bytes()
    for damaged in (b"", data[:-1], data[:-3] + b"xyz", data.replace(b'"round":"0"', b'"round":"1"')):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged"):
            memory.answer("r", 1, 0, "a", START, Counting())
    path.write_bytes(data)
    with pytest.raises(UserError, match="agent number 3; this is agent number 4"):
        Memory(memory.folder, 4).answer("r", 1, 0, "a", START, Counting())


def test_a_full_disk_leaves_what_was_there(memory, monkeypatch):
    compute = Counting()
    memory.answer("r", 1, 0, "a", START, compute)
    data = memory.path("r").read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memories.os, "fsync", full)
    with pytest.raises(UserError, match="cannot be written: no space left"):
        memory.answer("r", 1, 1, "b", START, compute)
    monkeypatch.undo()
    assert memory.path("r").read_bytes() == data
    assert [path.name for path in memory.folder.iterdir()] == ["run-r.safetensors"]
    assert memory.answer("r", 1, 1, "b", START, compute).upload["u"].tolist() == [3, 11]
