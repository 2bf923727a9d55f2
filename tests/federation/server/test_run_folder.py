"""The folder of a networked run: files are replaced atomically, and stale jobs stay locked out."""

import json
import threading
import time

import numpy as np
import pytest

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


def test_a_cleared_run_keeps_old_jobs_out(tmp_path):
    folder = RunFolder(tmp_path)
    folder.log("start")
    old = folder.next_generation()
    folder.clear()
    with pytest.raises(StaleJob), folder.writing(old):
        pass
    assert sorted(path.name for path in folder.path.iterdir()) == ["fence.json", "lock"]
