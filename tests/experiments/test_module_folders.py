"""Modules beside a config are found by every command on its run, and from Python."""

import json
import sys
from pathlib import Path

import pytest
from fixtures import write
from interruption import StopAt
from tiny_config import FEDAVG

import perfedrl as pf
from perfedrl.experiments.config import read_config
from perfedrl.experiments.module_folders import recorded_folders
from perfedrl.experiments.own_code import module_folders
from perfedrl.experiments.run_list import list_interrupted
from perfedrl.experiments.store import discard_checkpoint, locked
from perfedrl.experiments.training import Interrupted, train

RESULTS = Path(__file__).parents[2] / "results"


def test_every_command_on_a_run_finds_the_modules_beside_its_config(own_config, run, tmp_path, anew):
    assert run("train", own_config)[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    for command in (
        ["personalize", folder, "--agent", 0, "--trajectories", 2, "--out", "own.safetensors"],
        ["evaluate", folder],
        ["train", folder, "--rounds", 3],
    ):
        anew()
        code, _, err = run(*command)
        assert (code, "No module" in err) == (0, False), err
    anew()
    _, out, err = run("list")
    assert len([line for line in out.splitlines() if "t-" in line]) == 2
    assert "skipped" not in err + out


def test_python_and_the_command_line_agree(own_config, tmp_path, monkeypatch, anew):
    made = pf.train(own_config, tmp_path / "runs")
    assert made.provenance["own_modules"] == {"beside_for_test": str(own_config.parent)}
    anew()
    assert pf.load_run(made.folder).provenance == made.provenance
    anew()
    monkeypatch.chdir(tmp_path)
    assert pf.train("d/t.toml", tmp_path / "runs").from_disk


def test_a_folder_counts_only_while_the_module_is_there(own_config, tmp_path, anew):
    folder = pf.train(own_config, tmp_path / "runs").folder
    (own_config.parent / "beside_for_test.py").rename(tmp_path / "elsewhere.py")
    anew()
    with pytest.raises(pf.UserError, match="No module named 'beside_for_test'"):
        pf.load_run(folder)
    assert str(own_config.parent) not in sys.path
    record = json.loads((folder / "provenance.json").read_text())
    for damaged in ({}, {"own_modules": 3}, {"own_modules": {"beside_for_test": 3}}, {"own_modules": {"": "/"}}, []):
        (folder / "provenance.json").write_text(json.dumps(damaged))
        assert recorded_folders(folder) == {}
    (folder / "provenance.json").write_text(json.dumps({**record, "own_modules": {"beside_for_test": str(tmp_path)}}))
    (tmp_path / "elsewhere.py").rename(tmp_path / "beside_for_test.py")
    assert pf.load_run(folder, trust=True).config.code


def test_an_interrupted_run_is_listed_and_goes_on_from_its_folder(own_config, tmp_path, anew):
    with pytest.raises(Interrupted):
        train(read_config(own_config), tmp_path / "runs", observers=[StopAt(1)])
    anew()
    (item,) = list_interrupted(tmp_path / "runs")
    anew()
    finished = train(read_config(item.folder / "config.toml"), tmp_path / "runs")
    assert finished.provenance["own_modules"] == {"beside_for_test": str(own_config.parent)}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [finished.folder.name]


def test_a_discarded_checkpoint_leaves_nothing_behind(own_config, tmp_path):
    unfinished = read_config(own_config)
    with pytest.raises(Interrupted):
        train(unfinished, tmp_path / "runs", observers=[StopAt(1)])
    with locked(tmp_path / "runs", unfinished):
        discard_checkpoint(tmp_path / "runs", unfinished)
    assert list((tmp_path / "runs").iterdir()) == []


def test_runs_of_the_library_and_of_installed_packages_record_no_folder(tmp_path):
    made = train(read_config(write(tmp_path / "t.toml", FEDAVG)), tmp_path)
    assert "own_modules" not in made.provenance
    assert str(tmp_path) not in sys.path, "nothing is looked for beside a config that names no code"
    installed = [{"name": "numpy:zeros"}, {"name": "perfedrl.algorithms:FedAvgPG"}, {"name": "http.client:HTTPError"}]
    assert module_folders(installed) == {}


def test_committed_results_name_no_folder_of_a_machine():
    for path in RESULTS.rglob("provenance.json"):
        assert "own_modules" not in json.loads(path.read_text()), path
