"""Power cuts, kills and lost messages: a run of a server and two agents always ends with the undisturbed result.

`power_cut_model` goes through every interleaving with a number of faults: one in `make test`, two in `make test-all`,
and a damaged checkpoint beside them. Code that is broken on purpose is found out.
"""

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from crashing_disk import Disk
from power_cut_model import Exploration, violated
from system_calls import SystemCall, intercepted
from tiers import some_slow

from perfedrl.experiments import files
from perfedrl.federation.agent import answer_store
from perfedrl.federation.agent.answer_store import AnswerStore, StoredAnswer
from perfedrl.federation.server import run_folder


@pytest.mark.parametrize("faults", some_slow([1, 2], fast=[1]))
def test_no_interleaving_of_faults_loses_doubles_or_wedges_a_round(tmp_path, faults):
    exploration = Exploration(tmp_path, faults, damages=1)
    exploration.run()
    assert exploration.worlds > 400
    assert exploration.finished > 100, "few worlds were gone through to the end"


def without_sync_of_files(path, content, mode):
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(temporary, mode)
    files.rename_durably(temporary, path)


def one_answer_only(record, _):
    return record


def plain_mkdir(path, mode=0o777):
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def never_durable(path, content, durable=False):
    real_replace(path, content)


real_replace, real_save = run_folder._replace, AnswerStore._save
DEFERRED = []


def save_later(*arguments):
    DEFERRED.append(arguments)


def save_now():
    while DEFERRED:
        real_save(*DEFERRED.pop())


BREAKAGES = {
    "folders are not synced": [(files, "sync_folder", lambda _: None)],
    "files are not synced": [(files, "replace_file", without_sync_of_files)],
    "one answer is kept instead of two": [(StoredAnswer, "as_of", one_answer_only)],
    "an answer is stored after it is sent": [(AnswerStore, "_save", save_later)],
    "a new folder is not synced": [(answer_store, "make_folder", plain_mkdir)],
    "the generation is not synced": [(run_folder, "_replace", never_durable)],
}
FAST = ["folders are not synced", "one answer is kept instead of two", "an answer is stored after it is sent"]
FOUND = {"folders are not synced": ("doubled", "lost", "wedged"), "files are not synced": ("lost", "wedged")}
FOUND |= {"one answer is kept instead of two": ("wedged",), "an answer is stored after it is sent": ("doubled", "lost")}
FOUND |= {"a new folder is not synced": ("doubled", "lost"), "the generation is not synced": ("wedged",)}


@pytest.mark.parametrize("breakage", some_slow(BREAKAGES, fast=FAST))
def test_code_that_is_broken_on_purpose_is_found_out(tmp_path, breakage):
    with ExitStack() as stack:
        for target, name, broken in BREAKAGES[breakage]:
            stack.enter_context(mock.patch.object(target, name, broken))
        found = violated(tmp_path, faults=1, after_sending=save_now)
    assert found.startswith(FOUND[breakage]), found


def disk_after(*calls):
    disk = Disk()
    for call in calls:
        disk = disk.after(call)
    return disk


def left(disk):
    """What a power cut may leave, as sorted lists of names and contents."""
    return sorted({tuple(sorted(after.files.items())) for after in disk.after_power_cut()})


def test_a_power_cut_loses_what_is_not_synced_in_any_combination():
    create, write = SystemCall("create", "t"), SystemCall("write", "t", data=b"abcd")
    rename, sync, sync_folder = SystemCall("rename", "t", "f"), SystemCall("sync", "t"), SystemCall("sync", ".")
    contents = (b"", b"\0\0\0\0", b"ab", b"abcd")
    assert left(disk_after(create, write)) == [(), *((("t", x),) for x in contents)]
    assert left(disk_after(create, write, sync)) == [(), (("t", b"abcd"),)]
    assert left(disk_after(create, write, sync, rename)) == [(), (("f", b"abcd"),), (("t", b"abcd"),)]
    assert left(disk_after(create, write, rename, sync_folder)) == [(("f", x),) for x in contents]
    assert left(disk_after(create, write, sync, rename, sync_folder)) == [(("f", b"abcd"),)]
    old = create, write, sync, rename, sync_folder
    new = create, SystemCall("write", "t", data=b"new"), sync, rename
    assert left(disk_after(*old, *new)) == [
        (("f", b"abcd"),),
        (("f", b"abcd"), ("t", b"new")),
        (("f", b"new"),),
    ]
    inside = SystemCall("mkdir", "d"), SystemCall("create", "d/x"), SystemCall("sync", "d")
    assert left(disk_after(*inside)) == [(), (("d", None), ("d/x", b""))], "a folder's own name is not safe yet"


def test_all_calls_that_change_something_below_a_folder_are_seen(tmp_path):
    seen = []

    def perform(call, carry_out):
        seen.append((call.kind, call.path, call.target))
        return carry_out()

    (tmp_path / "in").mkdir()
    with intercepted(tmp_path / "in", perform):
        (tmp_path / "outside").write_text("x")
        files.write_atomically(tmp_path / "in" / "d" / "f", b"content")
        Path(tmp_path / "in" / "d" / "f").read_bytes()
    kinds = [kind for kind, _, _ in seen if kind != "close"]
    assert kinds == ["sync", "mkdir", "sync", "create", "write", "sync", "chmod", "rename", "sync"][-len(kinds) :]
    assert ("sync", ".", "") in seen, "the new folder is written through"
    assert ("sync", "d", "") in seen
    assert seen[-3][2] == "d/f"
