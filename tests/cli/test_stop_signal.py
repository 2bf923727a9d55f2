"""Ctrl-C and SIGTERM: every command that trains or measures stops with a sentence and a checkpoint."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from fixtures import write
from rich.console import Console
from tiny_config import BASE, changed

from perfedrl.cli import federation, runs
from perfedrl.cli.stop_signal import STOP
from perfedrl.experiments.config import make_config
from perfedrl.experiments.store import load_checkpoint
from perfedrl.experiments.training import CheckpointWriter

TABLE = changed(rounds=6, evaluate_every=2)


def terminate(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def stoppable(run, monkeypatch):
    """A command line in this process that can be stopped: leaving at once is a SystemExit here."""

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(STOP, "received", None)
    monkeypatch.setattr(os, "_exit", leave)
    return run


def test_sigterm_writes_a_checkpoint_and_says_how_to_continue(stoppable, tmp_path, monkeypatch):
    config, before = write(tmp_path / "tiny.toml", TABLE), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(CheckpointWriter, "on_round", lambda _, state: state.round == 4 and terminate())
    code, _, err = stoppable("train", config)
    assert code == 143
    assert "SIGTERM: stopped tiny after round 4 of 6; run the same command to go on from there" in err
    assert load_checkpoint(tmp_path / "runs", make_config(TABLE)).round == 4
    assert signal.getsignal(signal.SIGTERM) == before, "the handler is the command's alone"


def test_an_interrupted_run_is_in_the_list_as_json_too(stoppable, tmp_path, monkeypatch):
    config = write(tmp_path / "tiny.toml", TABLE)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(CheckpointWriter, "on_round", lambda _, state: state.round == 4 and terminate())
        assert stoppable("train", config)[0] == 143
    monkeypatch.setattr(STOP, "received", None)
    assert stoppable("train", write(tmp_path / "short.toml", changed(name="short")))[0] == 0
    assert stoppable("list", "--json", "runs.json")[0] == 0
    rows = json.loads((tmp_path / "runs.json").read_text())
    assert [(row["state"], row["round"], row["rounds"]) for row in rows] == [("finished", 3, 3), ("interrupted", 4, 6)]
    assert [row["return_after"] is None for row in rows] == [False, True]


def test_an_exception_that_was_lost_stops_training_at_the_next_pause(stoppable, tmp_path, monkeypatch):
    config = write(tmp_path / "tiny.toml", TABLE)

    def lost(_, state):
        if state.round == 2:
            STOP.received = signal.SIGTERM

    monkeypatch.setattr(CheckpointWriter, "on_round", lost)
    code, _, err = stoppable("train", config)
    assert (code, "after round 4 of 6" in err) == (143, True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_whose_exception_is_lost_before_training_stops_it_too(stoppable, tmp_path, monkeypatch, number, code):
    """JAX frees memory in a callback of the garbage collector, where Python drops exceptions."""
    config = write(tmp_path / "tiny.toml", TABLE)

    def lose(phase, info):
        gc.callbacks.remove(lose)
        os.kill(os.getpid(), number)

    load = runs.load_config

    def load_config(path, **trust):
        gc.callbacks.append(lose)
        gc.collect()
        return load(path, **trust)

    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # also where the shell ignores Ctrl-C
    monkeypatch.setattr(runs, "load_config", load_config)
    found, _, err = stoppable("train", config)
    assert found == code
    assert "stopped" in err
    assert "round 0" not in err
    assert "Exception ignored" not in err
    assert not (tmp_path / "runs").exists()


def test_a_signal_that_becomes_another_exception_is_no_defect(stoppable, tmp_path, monkeypatch):
    def load_config(_, **__):
        STOP.received = signal.SIGTERM
        raise SystemError("an import was interrupted")

    monkeypatch.setattr(runs, "load_config", load_config)
    code, _, err = stoppable("train", write(tmp_path / "tiny.toml", TABLE))
    assert (code, err.strip()) == (143, "SIGTERM: stopped")


def test_a_network_training_stops_with_a_sentence(stoppable, monkeypatch):
    monkeypatch.setattr(federation, "train_and_show", lambda *_: watched())

    def watched():
        with federation.handled(), federation.live_line("run the same command to continue"):
            terminate()

    code, _, err = stoppable("federation", "train", "fleet", "config.toml")
    assert code == 143
    assert err.strip() == "SIGTERM: stopped; run the same command to continue"


@pytest.mark.parametrize("terminal", [False, True], ids=["lines", "bars"])
def test_a_network_training_stops_although_the_exception_of_the_signal_was_lost(stoppable, monkeypatch, terminal):
    """NVFlare drops it; it is raised again when the training is shown the next time."""
    monkeypatch.setattr(federation, "err", Console(force_terminal=terminal, stderr=True))
    monkeypatch.setattr(federation, "train_and_show", lambda *_: watched())
    shown = []

    def watched():
        with federation.handled(), federation.live_line("run the same command to continue") as watch:
            for _ in range(3):
                watch(SimpleNamespace(doing="training", progress={}, connected=set(), expected=(), news=[]))
                shown.append(True)
                with suppress(KeyboardInterrupt):
                    terminate()

    code, _, err = stoppable("federation", "train", "fleet", "config.toml")
    assert (code, len(shown)) == (143, 1)
    assert "SIGTERM: stopped; run the same command to continue" in err


COMMANDS = [
    (["demo"], "studies.train_configs", "what was saved before is kept, and the same command does the rest"),
    (["reproduce", "e1"], "studies.train_configs", "what was saved before is kept, and the same command does the rest"),
    (["train", BASE, "--restart"], "runs.train_configs", "the same command without --restart does the rest"),
    (["compare", "plan.toml"], "compare.load_plans", "SIGTERM: stopped"),
    (["estimators"], "estimators.compare_estimators", "SIGTERM: stopped"),
    (["theory", BASE], "theory.analysis.of_config", "SIGTERM: stopped"),
    (["evaluate", "run"], "runs.store.load_run", "SIGTERM: stopped"),
    (["personalize", "run", "--agent", "0"], "runs.store.load_run", "SIGTERM: stopped"),
]


@pytest.mark.parametrize(("command", "work", "words"), COMMANDS, ids=lambda x: x[0] if isinstance(x, list) else "")
def test_every_command_stops_with_a_sentence(stoppable, tmp_path, monkeypatch, command, work, words):
    monkeypatch.setattr(f"perfedrl.cli.{work}", terminate)
    arguments = [str(write(tmp_path / "tiny.toml", x)) if isinstance(x, dict) else x for x in command]
    code, _, err = stoppable(*arguments)
    assert code == 143
    assert err.strip().splitlines()[-1].startswith("SIGTERM: stopped")
    assert words in err


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_worker_ends_by_sigterm_as_usual():
    """Environments in processes of their own are ended by SIGTERM; they must not stop as the command does."""
    with STOP.handled():
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        worker.start()
        worker.terminate()
        worker.join()
    assert worker.exitcode == -signal.SIGTERM
    assert STOP.received is None


@pytest.mark.slow
def test_a_real_process_keeps_its_checkpoint(tmp_path):
    table = changed(rounds=100_000, evaluate_every=50)
    config, checked = write(tmp_path / "long.toml", table), make_config(table)
    command = [sys.executable, "-m", "perfedrl", "train", str(config), "--no-compile-cache"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 600
    while load_checkpoint(tmp_path / "runs", checked) is None:
        assert time.monotonic() < deadline, "no checkpoint after ten minutes"
        assert process.poll() is None
        time.sleep(0.1)
    second = subprocess.run([*command, "--restart"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (second.returncode, "another process is training" in second.stderr) == (2, True)
    process.terminate()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 143
    assert "SIGTERM: stopped tiny after round" in err
    assert load_checkpoint(tmp_path / "runs", checked).round >= 50
