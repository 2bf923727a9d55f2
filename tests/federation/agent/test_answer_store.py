"""An agent's answer store: repeated questions, stale generations, and damaged files."""

import errno
import itertools
import os

import numpy as np
import pytest

from perfedrl.errors import UserError
from perfedrl.federation.agent import answer_store
from perfedrl.federation.agent.answer_store import AnswerStore, Counted


class Counting:
    """A round whose upload counts how often it was computed from which state."""

    def __init__(self):
        self.calls = []

    def __call__(self, state):
        self.calls.append(float(state["s"]))
        return {"u": np.asarray([len(self.calls), state["s"]])}, {"s": np.asarray(state["s"] + 1)}


START = {"s": np.asarray(10.0)}


@pytest.fixture
def store(tmp_path):
    return AnswerStore(tmp_path / "own", 3)


def test_a_repeated_question_has_the_same_answer(store):
    compute = Counting()

    def ask(*args):
        return store.answer(*args, START, compute, noised=99)

    first = ask("r", 1, 0, "a")
    assert (first.upload["u"].tolist(), first.fresh) == ([1, 10], True)
    again = ask("r", 1, 0, "a")
    assert (again.upload["u"].tolist(), again.fresh) == ([1, 10], False)
    assert store.stored("r").releases == 1
    assert ask("r", 1, 0, "b").upload["u"].tolist() == [2, 10]  # another message: from the state before
    assert ask("r", 1, 1, "c").upload["u"].tolist() == [3, 11]
    assert ask("r", 1, 9, "d").upload["u"].tolist() == [4, 12]  # rounds may be missed
    restarted = AnswerStore(store.folder, 3)
    assert restarted.answer("r", 2, 9, "d", START, compute, noised=99).upload["u"].tolist() == [4, 12]
    assert compute.calls == [10, 10, 11, 12]
    for generation, round_, why in ((1, 10, "stale job"), (2, 0, "is over"), (2, 2**30, "whole number")):
        with pytest.raises(UserError, match=why):
            ask("r", generation, round_, "e")
    assert ask("other", 0, 0, "a").upload["u"].tolist() == [5, 10]
    assert store.state("r", 2, 9, START)["s"] == 12
    assert store.state("r", 2, 10, START)["s"] == 13


@pytest.mark.parametrize("lost", list(itertools.product([False, True], repeat=4)))
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_server_that_loses_its_last_checkpoint_any_number_of_times_gets_the_same_run(store, lost, evaluates):
    """The checkpoint after round k is lost once if `lost[k]`, when the agent has answered the next round already."""
    compute, checkpoints, generation, round_, losses = Counting(), [0.0], 1, 0, list(lost)
    while round_ < len(lost):
        digest = f"message {checkpoints[round_]}"
        upload = store.answer("r", generation, round_, digest, START, compute).upload["u"]
        del checkpoints[round_ + 1 :]
        checkpoints.append(checkpoints[round_] + float(upload[1]))
        round_ += 1
        if evaluates:
            assert store.state("r", generation, round_, START)["s"] == 10 + round_
        if losses[round_ - 1]:
            losses[round_ - 1] = False
            if round_ < len(lost):
                store.answer("r", generation, round_, f"message {checkpoints[round_]}", START, compute)
            store = AnswerStore(store.folder, 3)
            generation, round_ = generation + 1, round_ - 1
            store.join("r", generation, START)  # as a new job does before it asks
            if evaluates:
                assert store.state("r", generation, round_, START)["s"] == 10 + round_
    assert checkpoints == [0, 10, 21, 33, 46]
    assert compute.calls == [10, 11, 12, 13], "an answer was computed twice, or from another state"


def test_a_server_may_go_back_by_one_answer_in_a_later_job_only(store):
    compute = Counting()
    for round_ in range(4):
        store.answer("r", 1, round_, str(round_), START, compute)
    with pytest.raises(UserError, match="round 2 of r is over"):
        store.answer("r", 1, 2, "2", START, compute)
    with pytest.raises(UserError, match="round 1 of r is over"):
        store.answer("r", 2, 1, "1", START, compute)
    assert not store.answer("r", 2, 2, "2", START, compute).fresh
    assert store.answer("r", 2, 3, "3", START, compute).upload["u"].tolist() == [4, 13]
    assert store.answer("r", 3, 2, "another message", START, compute).upload["u"].tolist() == [5, 12]
    assert store.answer("r", 3, 3, "then another", START, compute).upload["u"].tolist() == [6, 13]
    assert compute.calls == [10, 11, 12, 13, 12, 13]


def test_a_generation_is_stale_once_a_later_one_has_joined(store):
    store.join("r", 4, START)
    with pytest.raises(UserError, match="stale"):
        store.answer("r", 3, 0, "a", START, Counting())
    assert store.answer("r", 4, 0, "a", START, Counting()).fresh


def test_files_are_readable_by_their_user_only(store):
    store.answer("r", 1, 0, "a", START, Counting())
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert store.path("r").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("run", ["", "../x", "a/b", ".hidden", "a\n", "x" * 101, "ä"])
def test_a_runs_id_cannot_leave_the_folder(store, run):
    with pytest.raises(UserError, match="run's id"):
        store.answer(run, 1, 0, "a", START, Counting())


def test_a_damaged_file_is_reported(store):
    store.answer("r", 1, 0, "a", START, Counting())
    path = store.path("r")
    data = path.read_bytes()
    for damaged in (b"", data[:-1], data[:-3] + b"xyz", data.replace(b'"round":"0"', b'"round":"1"')):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="damaged"):
            store.answer("r", 1, 0, "a", START, Counting())
    path.write_bytes(data)
    with pytest.raises(UserError, match="agent number 3; this is agent number 4"):
        AnswerStore(store.folder, 4).answer("r", 1, 0, "a", START, Counting())


def test_a_file_of_an_earlier_format_is_named_as_such(store, monkeypatch):
    with monkeypatch.context() as earlier:  # format 2 did not have these
        earlier.setattr(answer_store, "FORMAT", 2)
        earlier.setattr(answer_store, "COUNTS", tuple(x for x in answer_store.COUNTS if not x.endswith("since")))
        store.answer("r", 1, 0, "a", START, Counting())
    with pytest.raises(UserError, match=r"another version of perfedrl \(format 2, here 3\)"):
        store.answer("r", 1, 1, "b", START, Counting())


def test_an_agent_without_the_counted_state_starts_anew_or_cannot_go_on(store):
    store.answer("r", 1, 4, "a", START, Counting())
    lost = AnswerStore(store.folder.parent / "new", 3)
    with pytest.raises(UserError, match=r"counted the agent's upload of round 4, and .* does not have the state after"):
        lost.answer("r", 1, 5, "b", START, Counting(), counted=Counted(4, required=True))
    assert lost.answer("r", 1, 5, "b", START, Counting(), counted=Counted(4)).upload["u"].tolist() == [1, 10]
    assert store.answer("r", 1, 5, "b", START, Counting(), counted=Counted(4)).upload["u"].tolist() == [1, 11]
    assert store.answer("r", 1, 6, "c", START, Counting(), counted=Counted(4)).upload["u"].tolist() == [1, 11]
    assert store.state("r", 1, 7, START, Counted(4))["s"] == 11
    assert store.state("r", 1, 7, START, Counted(6))["s"] == 12


def test_an_answer_waits_until_it_is_received_and_for_its_own_job_alone(store):
    """Another job may have another message in the same round, if the server lost its last checkpoint in between."""
    store.answer("r", 1, 4, "a", START, Counting())
    assert store.waiting("r", 1, 6, Counted(3)).round == 4
    assert store.waiting("r", 1, 4, Counted(3)) is None, "the question that it answers"
    assert store.waiting("r", 1, 6, Counted(4)) is None, "it was received"
    assert store.waiting("r", 2, 6, Counted(3)) is None, "another job"
    assert store.waiting("other", 1, 6, Counted(3)) is None


def test_a_full_disk_leaves_the_old_file_intact(store, monkeypatch):
    compute = Counting()
    store.answer("r", 1, 0, "a", START, compute)
    data = store.path("r").read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="cannot be written: no space left"):
        store.answer("r", 1, 1, "b", START, compute)
    monkeypatch.undo()
    assert store.path("r").read_bytes() == data
    assert [path.name for path in store.folder.iterdir()] == ["run-r.safetensors"]
    assert store.answer("r", 1, 1, "b", START, compute).upload["u"].tolist() == [3, 11]
