"""The command line: commands, help texts, mistakes and Ctrl-C."""

import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from fixtures import write
from tiny_config import BASE, changed

import perfedrl
from perfedrl.cli import application, console
from perfedrl.cli.runs import REGISTRIES
from perfedrl.experiments.config import make_config, read_config
from perfedrl.studies import STUDIES

ROOT = Path(__file__).parents[2]


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
    code, out, _ = run("personalize", f"runs/{folder}", "--agent", "4", "--trajectories", "2", "--json", "own.json")
    own = json.loads((tmp_path / "own.json").read_text())
    assert (code, own["agent"], own["cost"]) == (0, "agent 4 (held out)", 2)
    assert set(own["before"]["return"]) == {"mean", "low", "high"}
    assert (tmp_path / own["file"]).is_file()
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


@pytest.mark.parametrize(
    "command",
    [
        *([], ["demo"], ["check"], ["diagnose"], ["train"], ["personalize"], ["evaluate"], ["reproduce"], ["list"]),
        *(["federation", "renew"], ["federation", "request"], ["federation", "sign"]),
    ],
)
def test_every_command_has_a_help_text(run, command):
    code, out, err = run(*command, "--help")
    assert code == 0
    assert "Usage" in out + err


def test_a_command_alone_shows_its_help_and_no_error(run):
    for command in ((), ("federation",)):
        code, out, err = run(*command)
        assert code == 2
        assert "Usage" in out + err
        assert "error" not in out + err


def test_the_help_text_imports_no_command():
    """Importing all commands takes seconds; their summaries are read from their sources."""
    script = "import sys, perfedrl.cli; sys.argv = ['perfedrl', '--help']\n"
    script += "try: perfedrl.cli.main()\nexcept SystemExit: print([x for x in ('jax', 'scipy') if x in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"
    whole = typer.main.get_command(application()).commands
    listed = typer.main.get_command(application("--help")).commands
    assert list(listed) == list(whole)
    for name, command in whole.items():
        assert command.help.partition("\n\n")[0] == listed[name].help.partition("\n\n")[0]


def test_the_version_is_shown(run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.strip() == f"perfedrl {perfedrl.__version__}"


def test_a_warning_is_printed_once(run, tmp_path):
    _, _, err = run("inspect", write(tmp_path / "tiny.toml", changed(algorithm={"beta": 1e30})))
    assert err.count("beta = 1e+30") == 1


def test_lists_are_written_as_json_too(run, tmp_path):
    config = write(tmp_path / "tiny.toml", BASE)
    assert run("train", config)[0] == 0
    for kind, first in (("runs", "tiny-"), ("algorithms", "afedpg"), ("envs", "acrobot"), ("experiments", "e1")):
        code, out, _ = run("list", kind, "--json", f"{kind}.json")
        assert code == 0
        assert f"wrote {kind}.json" in out
        rows = json.loads((tmp_path / f"{kind}.json").read_text())
        assert any((row.get("run") or row["name"]).startswith(first) for row in rows), kind
    assert {"name": "m", "default": 30} in next(
        row["parameters"]
        for row in json.loads((tmp_path / "algorithms.json").read_text())
        if row["name"] == "fedavg-pg"
    )


def test_every_command_that_writes_json_says_so(run, tmp_path):
    assert run("train", write(tmp_path / "tiny.toml", changed(fleet={"held_out": [[0, 1]]})))[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    steps = "evaluate", folder, "--steps", "1", "--trajectories", "2"
    for command, code in (((*steps,), 0), (("check", "CartPole-v1"), 0), (("check", "faulty_envs:ArrayReward"), 2)):
        found, out, err = run(*command, "--json", "content.json")
        assert found == code, err
        assert out.strip().splitlines()[-1] == "wrote content.json"
        assert json.loads((tmp_path / "content.json").read_text())


def test_a_run_of_a_network_is_not_continued_in_simulation(run, tmp_path):
    config = write(tmp_path / "tiny.toml", BASE)
    assert run("train", config)[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    about = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps({**about, "federation": {"run": "tiny-0", "agents": []}}))
    for options in (("--rounds", "5"), ("--restart",)):
        code, _, err = run("train", f"runs/{folder.name}", *options)
        assert code == 2
        assert f"runs/{folder.name} was trained over a network, and its agents are not here; train its config" in err
    assert list((tmp_path / "runs").iterdir()) == [folder]
    code, out, err = run("train", write(tmp_path / "longer.toml", changed(rounds=5)))
    assert code == 0
    assert f"{folder.name} is not continued: it was trained over a network, and its agents are not here" in err
    assert "trained on from the end" not in out


def test_a_full_disk_is_named_with_the_file(run, tmp_path, monkeypatch):
    config = write(tmp_path / "tiny.toml", BASE)

    def full(handle):
        if stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("perfedrl.experiments.files.os.fsync", full)
    code, _, err = run("train", config)
    assert code == 2
    assert re.search(r"error: runs/tiny-\w+\.partial/\S+: No space left on device", err), err


def help_texts(command, path=()):
    """The help of a command and of all commands below it, by their names."""
    yield " ".join(path), command.help or ""
    for name, below in getattr(command, "commands", {}).items():
        yield from help_texts(below, (*path, name))


def test_help_texts_name_configs_and_runs_that_exist():
    texts = dict(help_texts(typer.main.get_command(application())))
    assert {"inspect", "train", "federation train"} <= set(texts)
    runs_of = {read_config(path).name for path in (ROOT / "configs").glob("*.toml")}
    for command, text in texts.items():
        for path in re.findall(r"configs/[\w*./]+\.toml", text):
            assert list(ROOT.glob(path)), f"{command}: {path}"
        for name in re.findall(r"runs/([\w-]+)-0123456789", text):
            assert name in runs_of, f"{command}: {name}"


def agent_with(**privacy) -> list:
    """The command of an agent whose file has this table [privacy]."""
    table = {"fleet": {"env": "gridworld"}, "privacy": {"least_noise": 4.0, "epsilon": 3.0, **privacy}}
    return ["agent", table, "--socket", "own/agent.sock", "--state", "own", "--number", "0"]


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
    (["train", {**BASE, "fleet": {"env": "arc", "goals": 10**8}}], "goals must be at most 1000000"),
    (["train", BASE, "--chunk", "0"], "chunk"),
    (["estimators", {**BASE, "fleet": {"env": "gymnasium", "id": "CartPole-v1"}, "policy": {"name": "mlp"}}], "in JAX"),
    (["evaluate", "."], "is not the folder of a run"),
    (["list", "--json", "-"], "- is not the name of a file"),
    (["evaluate", "runs/nothing"], "there is no run"),
    (["train", BASE, "--runs", "config.toml"], "config.toml is a file"),
    (["reproduce", "e1", "--figures", "/dev/null"], "/dev/null is a file"),
    (["reproduce", "e1", "--json", "/"], "/ is a folder"),
    (["reproduce", "e9"], "unknown study 'e9'"),
    (["reproduce", "e1", "--seeds", "0"], "--seeds"),
    (["list", "planets"], "planets"),
    (["federation", "renew", "."], "is no fleet; create one with `perfedrl federation init`"),
    (["federation", "request", "."], "is no agent's start-up kit; create one with `perfedrl federation init`"),
    (["federation", "sign", ".", "agent-0", "a.csr"], "is no fleet; create one with `perfedrl federation init`"),
    (["trian", "x"], "trian"),
    (["train", BASE, "--no-such-flag"], "--no-such-flag"),
    (agent_with(least_noise=-1.0), "privacy.least_noise: input should be greater than 0"),
    (agent_with(delta=1.0), "privacy.delta: input should be less than 1"),
    (agent_with(noise=4.0), "privacy.noise"),
]


def test_names_with_colons_are_not_printed_as_pictures():
    for printer in (console.out, console.err):
        assert printer.render_str("agent 0 (my:robot: 3)").plain == "agent 0 (my:robot: 3)"


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


def test_files_that_are_not_utf_8_and_marks_at_the_beginning(run, tmp_path):
    (tmp_path / "latin.toml").write_bytes('name = "Grüße"'.encode("latin-1"))
    assert "since it is not text in UTF-8" in run("train", "latin.toml")[2]
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbf" + b"rouns = 3\r\n")
    assert "unknown key 'rouns'; did you mean 'rounds'" in run("train", "windows.toml")[2]


def test_modules_beside_a_config_are_found_from_another_folder(run, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "beside_for_test.py").write_text("from perfedrl import gridworld as world\n")
    table = changed(fleet={"env": "beside_for_test:world"})
    config = write(tmp_path / "there" / "config.toml", table)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, out, err = run("inspect", str(config))
    assert (code, err) == (0, "")
    assert "goal" in out


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
