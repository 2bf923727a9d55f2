"""Choosing studies: groups leave out studies whose optional packages are missing, named studies are refused."""

import sys

import pytest

from perfedrl.errors import UserError
from perfedrl.studies import GROUPS, STUDIES
from perfedrl.studies.reproduction import all_configs, choose

MISSING = [("all", "privacy", "dp_accounting", "dp-accounting", "federation")]
MISSING += [("families", name, "gymnasium", "gymnasium", "gym") for name in ("cart-poles", "pendulums")]


def test_names_and_groups_stand_for_each_study_once():
    told = []
    names = [study.name for study in choose(["e6", "mechanisms", "fednpg", "e6"], told.append)]
    assert names == ["e6", *GROUPS["mechanisms"]]
    assert told == []


def test_groups_have_disjoint_names():
    assert len(STUDIES) == sum(map(len, GROUPS.values()))
    assert not set(STUDIES) & set(GROUPS)


@pytest.mark.parametrize(("group", "name", "module", "package", "extra"), MISSING)
def test_a_group_leaves_out_a_study_whose_package_is_missing(group, name, module, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    told = []
    chosen = choose([group], told.append)
    assert name not in [study.name for study in chosen]
    (sentence,) = [one for one in told if name in one]
    assert sentence == f'left out: {name} needs {package}, which is not installed: pip install "perfedrl[{extra}]"'
    assert len(chosen) + len(told) == len(GROUPS[group])
    assert all_configs(chosen, seeds=1, quick=True), "the configs of the others do not need the package"


@pytest.mark.parametrize(("group", "name", "module", "package", "extra"), MISSING)
def test_a_named_study_whose_package_is_missing_is_refused(group, name, module, package, extra, monkeypatch, run):
    monkeypatch.setitem(sys.modules, module, None)
    for names in ([name], [group, name]):
        with pytest.raises(UserError, match=rf"{name} needs {package}.*perfedrl\[{extra}\]"):
            choose(names, pytest.fail)
    code, out, err = run("reproduce", name)
    assert (code, out) == (2, "")
    assert f"{name} needs {package}" in err


def test_the_command_says_which_study_of_a_group_it_leaves_out(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    code, _, err = run("reproduce", "families", "--saved", "--runs", tmp_path)
    assert code == 2, "there are no saved runs of the third study"
    assert err.count("left out: ") == 2
    assert "gymnasium environments" not in err.lower(), "no config of a Gymnasium fleet was made"
