"""Opening a run runs no code of strangers: not by any command, not from Python, and not by a list of runs."""

import json
import shutil
import stat
import sys
from pathlib import Path

import pytest
import tomli_w
from fixtures import OWN_MODULE, OWN_TABLE, write
from platformdirs import user_data_dir

import perfedrl as pf
from perfedrl.experiments import trust
from perfedrl.experiments.settings import read_table

CANARY = f"open('opened', 'w').close()\n{OWN_MODULE}"
COMMANDS = {
    "evaluate": ["evaluate", "theirs"],
    "personalize": ["personalize", "theirs", "--agent", 0, "--trajectories", 2],
    "train": ["train", "theirs", "--rounds", 3],
    "inspect": ["inspect", "theirs/config.toml"],
    "theory": ["theory", "theirs/config.toml"],
    "estimators": ["estimators", "theirs/config.toml"],
    "start": ["train", "mine.toml"],
}


@pytest.fixture
def theirs(own_config, tmp_path, monkeypatch, anew):
    """A run of somebody else: its signature is of another key, and its module tells when it is imported."""
    folder = pf.train(own_config, tmp_path / "elsewhere").folder
    shutil.move(folder, tmp_path / "theirs")
    shutil.copy(own_config, tmp_path / "mine.toml")
    write(
        tmp_path / "mine.toml",
        {**OWN_TABLE, "algorithm": {"name": "fedavg-pg", "alpha": 1.0, "beta": 0.2}, "start": "theirs"},
    )
    (own_config.parent / "beside_for_test.py").write_text(CANARY)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    anew()
    return tmp_path / "theirs"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_on_a_strangers_run_imports_nothing(command, theirs, run):
    code, _, err = run(*COMMANDS[command])
    assert code == 2
    assert (
        "theirs was not trained by you on this machine, and opening it would run the code beside_for_test:Mine" in err
    )
    assert not Path("opened").exists()
    assert "beside_for_test" not in sys.modules


def test_a_list_of_runs_imports_nothing_and_shows_strangers_runs(theirs, run):
    code, out, _ = run("list", "--runs", ".")
    assert (code, "theirs" in out, "skipped" in out) == (0, True, False)
    assert not Path("opened").exists()
    with pytest.raises(pf.UserError, match="opening it would run the code"):
        pf.load_run(theirs)
    assert "beside_for_test" not in sys.modules


def test_a_run_opens_with_trust_or_where_the_users_list_has_its_module(theirs, anew, monkeypatch, caplog):
    folder = theirs.rename(theirs.parent / pf.load_config(theirs / "config.toml", trust=True).folder)
    assert Path("opened").exists()
    anew()
    assert pf.load_run(folder, trust=True).config.code_names == ["beside_for_test:Mine"]
    anew()
    for listed in ("", "beside", "beside_for_test.inner", "beside_for_test:Mine"):
        monkeypatch.setenv(trust.ALLOWED, listed)
        with pytest.raises(pf.UserError, match="opening it would run"):
            pf.load_run(folder)
    monkeypatch.setenv(trust.ALLOWED, "other, beside_for_test")
    assert pf.load_run(folder).config.code_names == ["beside_for_test:Mine"]


def test_a_changed_config_or_folder_of_modules_is_no_longer_the_users_own(own_config, tmp_path, anew):
    folder = pf.train(own_config, tmp_path / "runs").folder
    assert trust.is_signed(folder / "config.toml")
    text, record = (folder / "config.toml").read_text(), json.loads((folder / "provenance.json").read_text())
    for damaged in ({}, {"own_modules": {"beside_for_test": "/tmp"}}, {"signature": 3}, {"signature": "é"}):
        (folder / "provenance.json").write_text(json.dumps({**record, "signature": "0" * 64, **damaged}))
        assert not trust.is_signed(folder / "config.toml")
    (folder / "provenance.json").write_text(json.dumps(record))
    assert trust.is_signed(folder / "config.toml")
    (folder / "config.toml").write_text(text.replace("beside_for_test:Mine", "shutil:rmtree"))
    with pytest.raises(pf.UserError, match="would run the code shutil:rmtree"):
        pf.load_run(folder)


def test_a_callers_own_config_vouches_for_its_own_names_only(own_config, tmp_path, anew, monkeypatch):
    made = pf.train(own_config, tmp_path / "runs")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    assert pf.train(own_config, tmp_path / "runs").from_disk
    path = made.folder / "config.toml"
    table = read_table(path, "config")
    path.write_text(tomli_w.dumps({**table, "policy": {"name": "this_would_run:policy"}}))
    with pytest.raises(pf.UserError, match="would run the code this_would_run:policy"):
        pf.load_run(made.folder, made.config)


def test_the_key_is_its_owners_and_without_one_nothing_is_signed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    first = trust.signed({}, b"config")
    assert trust.signed({}, b"config") == first != trust.signed({}, b"other")
    (key,) = Path(user_data_dir("perfedrl")).iterdir()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.write_bytes(b"short")
    assert trust.signed({"a": 1}, b"config") == {"a": 1}
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert trust.signed({}, b"config") == {}


@pytest.mark.parametrize(
    ("name", "sentence"),
    {
        "subprocess:getoutput": "is a part of Python's library",
        "os:system": "is a part of Python's library",
        "collections:OrderedDict": "is a part of Python's library",
        "numpy:ndarray": "makes a ndarray; expected a class or a function that makes a perfedrl Fleet",
        "perfedrl.experiments.files:npz": "makes a bytes; expected a class or a function that makes a perfedrl Fleet",
    }.items(),
)
def test_only_factories_of_the_right_kind_are_called(name, sentence, tmp_path, run):
    config = write(tmp_path / "t.toml", {**OWN_TABLE, "fleet": {"env": name, "cmd": "touch called"}})
    code, _, err = run("train", config)
    assert (code, sentence in err, err.count("\n")) == (2, True, 1)
    assert not (tmp_path / "called").exists()
