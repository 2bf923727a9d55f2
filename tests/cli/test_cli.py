"""The command line: commands, help texts, mistakes and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fixtures import write
from tiny_config import BASE, changed

from perfedrl.cli.runs import REGISTRIES
from perfedrl.experiments.config import make_config
from perfedrl.studies import STUDIES


def test_train_then_list_then_evaluate(run, tmp_path):
    config = write(tmp_path / "tiny.toml", changed(fleet={"held_out": [[0, 1]]}))
    code, out, _ = run("train", config)
    folder = f"tiny-{make_config(changed(fleet={'held_out': [[0, 1]]})).digest}"
    assert code == 0
    assert "held-out agents" in out
    assert "trajectories" in out
    assert (tmp_path / "runs" / folder / "params.safetensors").is_file()
    code, out, _ = run("list", "runs")
    assert code == 0
    assert folder in out
    code, out, _ = run("evaluate", f"runs/{folder}", "--json", "eval.json")
    assert code == 0
    assert "optimum" in out
    assert len(json.loads((tmp_path / "eval.json").read_text())) == 5


@pytest.mark.parametrize("kind", [*REGISTRIES, "experiments"])
def test_list_names_every_registered_part(run, kind):
    known = list(STUDIES if kind == "experiments" else REGISTRIES[kind])
    code, out, _ = run("list", kind)
    assert code == 0
    assert all(name in out for name in known)


@pytest.mark.parametrize("command", [[], ["demo"], ["train"], ["personalize"], ["evaluate"], ["reproduce"], ["list"]])
def test_every_command_has_a_help_text(run, command):
    code, out, err = run(*command, "--help")
    assert code == 0
    assert "Usage" in out + err


MISTAKES = [
    (["train", "missing.toml"], "there is no config missing.toml"),
    (["train", changed(rouns=1)], "did you mean 'rounds'"),
    (["train", changed(algorithm={"alpha": -1.0})], "alpha"),
    (["train", changed(algorithm={"beta": 0.0})], "beta"),
    (["train", changed(algorithm={"m_out": 0})], "m_out"),
    (["train", changed(algorithm={"local_steps": 0})], "local_steps"),
    (["train", changed(fleet={"discount": 1.0})], "discount"),
    (["train", changed(fleet={"horizon": -1})], "horizon"),
    (["train", changed(fleet={"env": "gridwold"})], "did you mean 'gridworld'"),
    (
        [
            "train",
            {
                **BASE,
                "fleet": {
                    "env": "arrays",
                    "horizon": 1,
                    "discount": 0.5,
                    "P": [[[[1.0, 0.0]], [[0.5, 0.4]]]],
                    "r": [[[0.0], [0.0]]],
                    "mu": [[1.0, 0.0]],
                },
            },
        ],
        "agent 0: the row of P at state 1, action 0 sums to 0.9 instead of 1",
    ),
    (["train", BASE, "--chunk", "0"], "chunk"),
    (["evaluate", "runs/nothing"], "there is no run"),
    (["train", BASE, "--runs", "config.toml"], "config.toml is a file"),
    (["reproduce", "e1", "--figures", "/dev/null"], "/dev/null is a file"),
    (["reproduce", "e1", "--json", "/"], "/ is a folder"),
    (["reproduce", "e9"], "unknown study 'e9'"),
    (["reproduce", "e1", "--seeds", "0"], "--seeds"),
    (["list", "planets"], "planets"),
    (["trian", "x"], "trian"),
    (["train", BASE, "--no-such-flag"], "--no-such-flag"),
]


@pytest.mark.parametrize(("command", "words"), MISTAKES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_mistake_is_one_sentence_with_exit_code_2_and_writes_nothing(run, tmp_path, monkeypatch, command, words):
    monkeypatch.setattr("perfedrl.simulation.simulator.advance_replicas", lambda *_, **__: pytest.fail("compiled"))
    config = tmp_path / "config.toml"
    arguments = [str(write(config, x)) if isinstance(x, dict) else x for x in command]
    code, _, err = run(*arguments)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    config.unlink(missing_ok=True)
    assert list(tmp_path.iterdir()) == [], "nothing is written"


@pytest.mark.slow
def test_reproduce_writes_claims_and_figures_and_does_not_train_finished_runs_again(run, tmp_path, monkeypatch):
    code, _, _ = run("reproduce", "e1", "e6", "--seeds", "1", "--json", "claims.json")
    assert code == 0
    claims = json.loads((tmp_path / "claims.json").read_text())
    assert {claim["experiment"] for claim in claims} == {"e1", "e6"}
    assert claims[0]["low"] is None, "one seed has no interval"
    assert set(claims[0]) == {"experiment", "claim", "paper", "measured", "low", "high", "met"}
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == [
        f"{e}.{kind}" for e in ("e1", "e6") for kind in ("csv", "pdf", "png")
    ]
    monkeypatch.setattr("perfedrl.simulation.simulator.advance_replicas", lambda *_, **__: pytest.fail("trained again"))
    code, again, _ = run("reproduce", "e6", "--seeds", "1")
    assert code == 0
    assert "claims met" in again


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_continue(tmp_path):
    """With a real process and a real signal."""
    rounds = 100_000
    config = write(tmp_path / "long.toml", changed(rounds=rounds, evaluate_every=50))
    command = [sys.executable, "-m", "perfedrl", "train", str(config), "--no-compile-cache"]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # where it is ignored, a child would ignore it too
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    partial = tmp_path / "runs" / f"tiny-{make_config(changed(rounds=rounds, evaluate_every=50)).digest}.partial"
    deadline = time.monotonic() + 600
    while not (partial / "checkpoint.safetensors").exists():
        assert time.monotonic() < deadline, "no checkpoint after ten minutes"
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert not (partial / "lock").exists()
    assert process.returncode == 130
    assert "after round" in err
    assert "run the same command to go on" in err
    assert "Traceback" not in err
    from perfedrl.experiments.store import load_checkpoint

    checkpoint = load_checkpoint(tmp_path / "runs", make_config(changed(rounds=rounds, evaluate_every=50)))
    assert checkpoint.round >= 50
    assert checkpoint.history.rounds[-1] == checkpoint.round
