"""Every system call of every writer fails in every way: old or new content is readable, and the next try succeeds."""

import itertools
from pathlib import Path

import jax
import numpy as np
import pytest
from fault_injection import KINDS, FaultPlan, Killed, wrong_clock
from tiers import some_slow

from perfedrl.cli import in_one_sentence
from perfedrl.experiments import store
from perfedrl.experiments.config import read_config
from perfedrl.experiments.files import write_atomically
from perfedrl.federation.agent.answer_store import AnswerStore
from perfedrl.federation.server.run_folder import RunFolder, ServerCheckpoint

SAVED_RUN = Path(__file__).parents[2] / "results" / "grid-first-order-alpha1-85923c18a7"


class AnyFile:
    """A file that is replaced."""

    def __init__(self, folder):
        self.path = folder / "deep" / "file"

    def write(self, version):
        write_atomically(self.path, bytes([version]) * 10)

    def read(self):
        content = self.path.read_bytes() if self.path.exists() else None
        assert content is None or content == content[:1] * 10
        return content and content[0]


class CheckpointOfServer:
    """The server's checkpoint, by a new job each time."""

    def __init__(self, folder):
        self.folder = RunFolder(folder / "control" / "run")

    def write(self, version):
        server, gate = np.full(3, version, np.float32), {"quarantined": []}
        checkpoint = ServerCheckpoint("r", 0, version, server, None, gate, 1.5)
        self.folder.save_checkpoint(checkpoint, self.folder.next_generation())

    def read(self):
        found = self.folder.load_checkpoint("r", np.zeros(3, np.float32))
        assert found is None or found.server.tolist() == [found.round] * 3
        assert "damaged checkpoint" not in [event["event"] for event in self.folder.events()]
        return found and found.round


class AnswerOfAgent:
    """An agent's answer of a round, and the state after it."""

    def __init__(self, folder):
        self.folder = folder / "agent"

    def write(self, version):
        def compute(state):
            return {"u": np.asarray(version)}, {"s": np.asarray(version)}

        AnswerStore(self.folder, 0).answer("r", 1, version, f"message {version}", {"s": np.asarray(0)}, compute)

    def read(self):
        found = AnswerStore(self.folder, 0).stored("r")
        assert found is None or found.upload["u"] == found.after["s"] == found.round
        return found and found.round


class PersonalPolicy:
    """An agent's own policy."""

    def __init__(self, folder):
        self.store = AnswerStore(folder / "agent", 0)
        self.path = self.store.path("r", "personal")

    def write(self, version):
        self.store.write(self.path, bytes([version]) * 10)

    read = AnyFile.read


class FinishedRun:
    """A run's folder, which replaces the one before it."""

    config = read_config(SAVED_RUN / "config.toml")
    run = store.load_run(SAVED_RUN, config)

    def __init__(self, folder):
        self.root = folder / "runs"

    def write(self, version):
        message = jax.tree.map(lambda x: np.full_like(x, version), self.run.message)
        run = self.run
        store.save_run(self.root, self.config, run.history, run.deployment, message, {**run.provenance, "v": version})

    def read(self):
        if not store.has_run(self.root, self.config):
            return None
        found = store.load_run(self.root / self.config.folder, self.config)
        versions = {float(x) for leaf in jax.tree.leaves(found.message) for x in np.unique(leaf)}
        assert versions == {found.provenance["v"]}, "files of two runs"
        return found.provenance["v"]


class UnfinishedRun:
    """The checkpoint of a run that is simulated."""

    def __init__(self, folder):
        self.root = folder / "runs"

    def write(self, version):
        leaves = (np.full(3, version, np.float32),)
        checkpoint = store.Checkpoint(version, leaves, FinishedRun.run.history, 1.5)
        with store.locked(self.root, FinishedRun.config):
            store.save_checkpoint(self.root, FinishedRun.config, checkpoint)

    def read(self):
        found = store.load_checkpoint(self.root, FinishedRun.config)
        assert found is None or found.leaves[0].tolist() == [found.round] * 3
        return found and found.round


WRITERS = (AnyFile, CheckpointOfServer, AnswerOfAgent, PersonalPolicy, FinishedRun, UnfinishedRun)


FAST = [(writer, kind) for writer in WRITERS for kind in KINDS if writer is not FinishedRun or kind == "kill"]


def cases_of(writer, folder, kind):
    """Each call with which a first or a second version is written, as (version, number), where it can fail so."""
    made = writer(folder)
    for version in (1, 2):
        with FaultPlan().below(folder) as plan:
            made.write(version)
        for n, call in enumerate(plan.calls):
            empty = (call.kind, Path(call.path).name) == ("close", "lock")  # a file without content has none to lose
            if call.kind == "write" or (kind not in ("short", "torn") and not empty):
                yield version, n


@pytest.mark.parametrize(("writer", "kind"), some_slow(list(itertools.product(WRITERS, KINDS)), FAST))
def test_any_failing_call_leaves_old_or_new_content_and_the_next_try_succeeds(tmp_path, writer, kind):
    for version, n in cases_of(writer, new(tmp_path / "counted"), kind):
        folder = new(tmp_path / f"{version}-{n}")
        made, plan = writer(folder), FaultPlan({n: kind})
        if version == 2:
            made.write(1)
        said = failure(made, version, plan, folder)
        about = f"{plan}, {plan.struck}, version {version}: {said}"
        assert plan.struck, about
        assert said is None or ("\n" not in said and not said.startswith("the system")), about
        found = made.read()
        assert found == version or (said is not None and found == (None if version == 1 else 1)), about
        made.write(version)
        assert made.read() == version, about


def failure(made, version, plan, folder):
    """What is said when a version is written; None if it is written."""
    try:
        with plan.below(folder):
            made.write(version)
    except Killed:
        return "killed"
    except Exception as error:
        said = in_one_sentence(error)
        if said is None:
            raise
        return said
    return None


def new(folder):
    folder.mkdir()
    return folder


def test_a_kill_at_a_named_point_is_found_by_its_name(tmp_path):
    made = AnyFile(tmp_path)
    made.write(1)
    plan = FaultPlan(at="rename file")
    with pytest.raises(Killed), plan.below(tmp_path):
        made.write(2)
    assert plan.struck == ["kill at rename file"]
    assert made.read() == 1
    left = [path.name for path in made.path.parent.iterdir() if path != made.path]
    assert len(left) == 1, "a killed process removes nothing"


@pytest.mark.parametrize("writer", WRITERS)
def test_a_wrong_clock_changes_nothing_that_is_read(tmp_path, writer):
    made = writer(tmp_path)
    with wrong_clock((-1e8, 1e8, 0.0)):
        for version in (1, 2, 3):
            made.write(version)
            assert made.read() == version
