"""The folder of a networked run: what is read is never torn, and what was replaced stays shut out."""

import json
import threading
import time

import pytest

from perfedrl.federation.server.run_folder import Control, Stale


def test_what_is_shown_is_json_that_a_reader_never_finds_torn(tmp_path):
    control, stop = Control(tmp_path), threading.Event()

    def write():
        k = 0
        while not stop.is_set():
            control.show({"round": k, "more": "x" * 10_000})
            k += 1

    writer = threading.Thread(target=write)
    writer.start()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        assert set(control.progress()) in (set(), {"round", "more"})
    stop.set()
    writer.join()
    control.say("one", reason='é\n"')
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"event": "to')
    assert [event["event"] for event in control.events()] == ["one"]
    _, since = control.news(0)
    control.say("two")
    assert [event["event"] for event in control.events()] == ["one", "two"], "a torn line swallowed the next"
    assert [event["event"] for event in control.news(since)[0]] == ["two"]
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])["reason"] == 'é\n"'


def test_beginning_again_does_not_let_old_jobs_in(tmp_path):
    control = Control(tmp_path)
    control.say("start")
    old = control.next_generation()
    control.clear()
    with pytest.raises(Stale), control.writing(old):
        pass
    assert sorted(path.name for path in control.folder.iterdir()) == ["fence.json", "lock"]
