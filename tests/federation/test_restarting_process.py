"""A process that is restarted: its log stays small, and who reads or writes it does not notice."""

from perfedrl.federation import restarting_process
from perfedrl.federation.restarting_process import RestartingProcess, rotate


def test_a_large_log_is_moved_and_its_writers_and_readers_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(restarting_process, "LARGEST_LOG", 20)
    log = tmp_path / "server.log"
    log.write_text("of an earlier start\n")
    process = RestartingProcess([], log, {}, tmp_path)
    with open(log, "ab", buffering=0) as child:
        child.write(b"first\n")
        assert process.new_lines() == ["first"]
        rotate(log)
        child.write(b"second\n")
        assert log.read_text() == "second\n"
        assert (tmp_path / "server.log.1").read_text() == "of an earlier start\nfirst\n"
        assert process.new_lines() == ["second"]
        assert process.log_tail() == "second"
        rotate(log)
        assert log.read_text() == "second\n", "a small log stays"
    rotate(tmp_path / "none.log")
