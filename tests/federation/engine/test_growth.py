"""The processes of a fleet do not grow with the rounds."""

import psutil
import pytest
import real_fleet

pytestmark = pytest.mark.network

ROUNDS, FIRST = 300, 60


def sizes(fleet):
    """Threads, open files and megabytes of each of NVFlare's processes of a fleet, by process id."""
    found = {}
    for process in real_fleet.processes("nvflare.private", fleet.folder):
        try:
            found[process.pid] = process.num_threads(), process.num_fds(), process.memory_info().rss / 2**20
        except psutil.Error:
            continue
    return found


def test_threads_files_memory_and_logs_do_not_grow_with_the_rounds(tmp_path):
    first, last = {}, {}

    def watch(view):
        round_ = view.progress.get("round", 0)
        if round_ >= FIRST and not first:
            first.update(sizes(fleet))
        if round_ > 0.9 * ROUNDS:
            last.update(sizes(fleet))

    with real_fleet.running_fleet(tmp_path) as fleet:
        real_fleet.train(fleet, real_fleet.config("long", ROUNDS), watch=watch)
    both = first.keys() & last.keys()
    assert len(both) >= 8, "the server, three bridges and their jobs"
    for pid in both:
        (threads, files, memory), (threads_then, files_then, memory_then) = first[pid], last[pid]
        assert threads_then <= 1.2 * threads + 10
        assert files_then <= 1.2 * files + 10
        assert memory_then <= 1.5 * memory + 50
    logs = [fleet.server / "server.log", *fleet.folder.glob("kits/*/bridge.log")]
    assert max(path.stat().st_size for path in logs) < 300 * ROUNDS, "something is logged for every round"
