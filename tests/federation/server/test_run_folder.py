"""The folder of a networked run: files are replaced atomically, and stale jobs stay locked out."""

import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save

from perfedrl.errors import UserError
from perfedrl.experiments.files import read_safetensors
from perfedrl.federation.frames import digest
from perfedrl.federation.server import run_folder
from perfedrl.federation.server.run_folder import RunFolder, RunSpec, ServerCheckpoint, StaleJob, Terms


def test_readers_see_whole_files_and_whole_log_lines(tmp_path):
    folder, stop = RunFolder(tmp_path), threading.Event()

    def write():
        k = 0
        while not stop.is_set():
            folder.write_progress({"round": k, "more": "x" * 10_000})
            k += 1

    writer = threading.Thread(target=write)
    writer.start()
    end, seen = time.monotonic() + 60.0, set()
    while len(seen) < 100:
        progress = folder.progress()
        assert set(progress) in (set(), {"round", "more"})
        seen.add(progress.get("round"))
        assert time.monotonic() < end, "nothing was written"
    stop.set()
    writer.join()
    folder.log("one", reason='é\n"')
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "to')
    assert [event["event"] for event in folder.events()] == ["one"]
    _, since = folder.events_since(0)
    folder.log("two")
    assert [event["event"] for event in folder.events()] == ["one", "two"], "an incomplete line hid the next one"
    assert [event["event"] for event in folder.events_since(since)[0]] == ["two"]
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])["reason"] == 'é\n"'


def test_a_specification_without_the_fields_of_later_versions_can_be_read(tmp_path):
    folder = RunFolder(tmp_path)
    spec = RunSpec("run-0", "config", ("agent-0", "agent-1"), Terms(min_agents=2), "runs")
    folder.write_spec(spec)
    path = tmp_path / "plan.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: content[key] for key in ("run", "config", "agents", "terms", "runs")}))
    assert folder.spec() == spec


def test_the_rounds_that_are_done_stand_in_the_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.rounds_done() == 0
    gate = {"quarantined": []}
    folder.save_checkpoint(ServerCheckpoint("r", 0, 7, np.zeros(2), None, gate, 1.0), folder.next_generation())
    assert folder.rounds_done() == 7
    folder.checkpoint_path.write_bytes(b"damaged")
    assert folder.rounds_done() == 0


def checkpoint(round_):
    return ServerCheckpoint("r", 0, round_, np.full(3, round_, np.float32), None, {"quarantined": []}, 1.5)


def damage(path, content):
    path.unlink()  # another name of the file keeps its content
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_is_used(tmp_path):
    folder, like = RunFolder(tmp_path), np.zeros(3, np.float32)
    generation = folder.next_generation()
    for round_ in (6, 7):
        folder.save_checkpoint(checkpoint(round_), generation)
    assert folder.load_checkpoint("r", like).round == 7
    whole = folder.checkpoint_path.read_bytes()
    for i in range(len(whole)):  # all, since the order of the file's metadata differs from time to time
        damage(folder.checkpoint_path, whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        found = folder.load_checkpoint("r", like)
        assert (found.round, found.server.tolist()) == (6, [6, 6, 6]), i
        assert folder.load_checkpoint("r", like).round == 6, "the good one takes the damaged one's place"
    damage(folder.checkpoint_path, whole[:-9])
    assert folder.load_checkpoint("r", like).round == 6
    assert {event["event"] for event in folder.events()} == {"damaged checkpoint"}
    folder.save_checkpoint(checkpoint(7), generation)
    assert folder.load_checkpoint("r", like).round == 7
    folder.remove_checkpoints()
    folder.save_checkpoint(checkpoint(1), generation)
    damage(folder.checkpoint_path, b"")
    with pytest.raises(UserError, match="is damaged; start the run again with --restart"):
        folder.load_checkpoint("r", like)


def test_a_checkpoint_has_the_counted_rounds_and_one_of_an_earlier_format_is_named_as_such(tmp_path, monkeypatch):
    folder, like = RunFolder(tmp_path), np.zeros(3, np.float32)
    generation, saved = folder.next_generation(), replace(checkpoint(6), counted={"agent-0": 5, "agent-2": 1})
    folder.save_checkpoint(saved, generation)
    assert folder.load_checkpoint("r", like).counted == saved.counted
    tensors, metadata = read_safetensors(folder.checkpoint_path)
    known = [name for name in run_folder.METADATA if name != "counted"]
    earlier = {name: metadata[name] for name in known} | {"format": "2"}
    content = digest(tensors, *(earlier[name] for name in known))
    damage(folder.checkpoint_path, save(tensors, metadata={**earlier, "content": content}))
    with pytest.raises(UserError, match="written by another version of perfedrl; start again with --restart"):
        folder.load_checkpoint("r", like)


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"[" * 100_000, b"", b"3"])
def test_files_that_are_not_json_are_an_error_of_one_sentence(tmp_path, content):
    folder = RunFolder(tmp_path)
    for name in ("plan.json", "fence.json"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "progress.json").write_bytes(content)
    assert folder.progress() == {}
    for read in (folder.spec, folder.generation):
        with pytest.raises(UserError, match="is damaged; start the run again with --restart"):
            read()
    (tmp_path / "environment.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match="is damaged"):
        folder.report()


def test_a_cleared_run_keeps_old_jobs_out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log("start")
    old = folder.next_generation()
    folder.clear()
    with pytest.raises(StaleJob), folder.writing(old):
        pass
    assert sorted(path.name for path in folder.path.iterdir()) == ["fence.json", "lock"]
