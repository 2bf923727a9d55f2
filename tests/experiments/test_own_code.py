"""Own code that a config names: a changed file makes another config, which is trained and not read from disk."""

import functools
import importlib
import logging
import sys
import types
from pathlib import Path

import gymnasium
import pytest
from fixtures import write
from interruption import StopAt
from tiny_config import FEDAVG, changed

import perfedrl as pf
from perfedrl.experiments import run_list, store
from perfedrl.experiments.config import make_config, parse_config
from perfedrl.experiments.own_code import code_digests, source_digest
from perfedrl.experiments.training import Interrupted, train

ALGORITHM = "from perfedrl import FedAvgPG\n\nclass Mine(FedAvgPG):\n    pass\n"
SMALL = {**FEDAVG, "seeds": 1, "rounds": 1, "fleet": {"env": "gridworld", "width": 2, "horizon": 2}}
TABLE = {**SMALL, "algorithm": {"name": "mine_for_test:Mine", "alpha": 1.0, "beta": 0.2, "m": 2}}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for modules; they are forgotten after the test, and others that it imports are not."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in modules_in(tmp_path):
        del sys.modules[name]


def modules_in(folder):
    """The names of imported modules whose files lie below a folder."""
    files = {name: vars(module).get("__file__") for name, module in sys.modules.items()}
    return [name for name, file in files.items() if file and Path(file).is_relative_to(folder)]


def test_only_modules_of_the_test_are_forgotten(mine):
    make_config(TABLE)
    assert modules_in(mine.parent) == ["mine_for_test"]


@pytest.fixture
def mine(folder):
    (folder / "mine_for_test.py").write_text(ALGORITHM)
    return folder / "mine_for_test.py"


def edit(path, text="# changed\n"):
    path.write_text(path.read_text() + text)
    importlib.invalidate_caches()


def reload(name="mine_for_test"):
    importlib.reload(sys.modules[name])


def code(*names, **parameters):
    """The digests of the code that a table of a config names."""
    return code_digests([{"name": name, **parameters} for name in names])


def test_changed_code_is_trained_again_and_the_old_run_can_still_be_read(mine, tmp_path, caplog):
    first = train(make_config(TABLE), tmp_path / "runs")
    assert (first.from_disk, first.origin) == (False, "trained")
    again = train(make_config(TABLE), tmp_path / "runs")
    assert again.from_disk
    assert again.origin == f"read from disk (trained on {first.provenance['finished'][:16].replace('T', ' ')} UTC)"
    edit(mine)
    reload()
    with caplog.at_level(logging.WARNING, "perfedrl"):
        old = pf.load_run(first.folder)
    assert "was trained with another version of mine_for_test:Mine" in caplog.text
    with pytest.raises(
        pf.UserError, match=r"mine_for_test:Mine has changed since .* a copy .* without its table \[code"
    ):
        train(old.config, tmp_path / "runs", restart=True)
    advised = parse_config({key: value for key, value in old.config.table.items() if key != "code"})
    assert advised.digest == make_config(TABLE).digest
    changed_run = train(advised, tmp_path / "runs")
    assert not changed_run.from_disk
    assert changed_run.folder != first.folder


def test_code_that_changed_since_an_interrupted_run_is_said(mine, tmp_path, caplog):
    config = make_config({**TABLE, "rounds": 2})
    with pytest.raises(Interrupted):
        train(config, tmp_path / "runs", observers=[StopAt(1)])
    edit(mine)
    reload()
    with caplog.at_level(logging.WARNING, "perfedrl"):
        train(make_config({**TABLE, "rounds": 2}), tmp_path / "runs")
    assert f"is trained from the first round: its own code has changed since {config.folder}.partial" in caplog.text


@pytest.mark.parametrize("restart", [False, True])
def test_a_run_that_resumes_or_restarts_is_not_said_to_have_changed_code(mine, tmp_path, caplog, restart):
    train(make_config({**TABLE, "rounds": 3}), tmp_path / "runs")
    edit(mine)
    reload()
    config = make_config({**TABLE, "rounds": 3})
    with pytest.raises(Interrupted):
        train(config, tmp_path / "runs", observers=[StopAt(1)])
    with caplog.at_level(logging.WARNING, "perfedrl"):
        caplog.clear()
        assert not train(config, tmp_path / "runs", restart=restart).from_disk
        train(make_config({**TABLE, "rounds": 4}), tmp_path / "runs", restart=restart)
    assert "first round" not in caplog.text


def test_other_configs_are_not_read_to_find_earlier_code(mine, tmp_path, monkeypatch):
    """Neither all folders of a config without own code, nor those of other configs, whose modules may do anything."""
    plain, config = make_config(SMALL), make_config(TABLE)
    for folder, name in (("tiny-0123456789", "tiny"), ("tiny-other-0123456789", "tiny-other"), ("x-0123456789", "x")):
        table = {**TABLE, "name": name, "algorithm": {**TABLE["algorithm"], "name": f"gone_for_{name}:Mine"}}
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "config.toml", table)
        (tmp_path / folder / "provenance.json").write_text("{}")
    read = []

    def record(path, known):
        read.append(path.parent.name)
        raise pf.UserError("it cannot be read")

    monkeypatch.setattr(store, "read_config", record)
    assert store.with_earlier_code(tmp_path, plain) is store.with_earlier_code(tmp_path, config) is None
    assert read == ["tiny-0123456789"]


def test_an_unfinished_folder_that_another_process_renames_is_passed_over(mine, tmp_path, monkeypatch):
    config = make_config({**TABLE, "rounds": 2})
    with pytest.raises(Interrupted):
        train(config, tmp_path, observers=[StopAt(1)])
    edit(mine)
    reload()
    later, stat = make_config({**TABLE, "rounds": 2}), Path.stat
    assert store.with_earlier_code(tmp_path, later).name == f"{config.folder}.partial"

    def renamed(path, **options):
        if path.name == store.CHECKPOINT or path.suffix == store.PARTIAL:
            raise FileNotFoundError(path)
        return stat(path, **options)

    found = list(tmp_path.glob(f"*{store.PARTIAL}/{store.CHECKPOINT}"))
    monkeypatch.setattr(store.Path, "glob", lambda *_: [path.parent for path in found])
    monkeypatch.setattr(store.Path, "stat", renamed)
    assert store.with_earlier_code(tmp_path, later) is None
    monkeypatch.setattr(store.Path, "glob", lambda *_: found)
    assert run_list.list_interrupted(tmp_path) == []


def test_the_command_says_whether_it_trained_and_when(mine, run, tmp_path):
    config = write(tmp_path / "tiny.toml", TABLE)
    assert "\ntrained; saved in runs/tiny-" in run("train", config)[1]
    assert "\nread from disk (trained on 20" in run("train", config)[1]
    edit(mine)
    reload()
    _, out, err = run("train", config)
    assert "\ntrained; saved in runs/tiny-" in out
    assert "tiny is trained from the first round: its own code has changed since tiny-" in err


def test_code_that_was_edited_but_not_imported_again_is_not_the_code_that_runs(mine):
    before = make_config(TABLE)
    edit(mine)
    assert make_config(TABLE).digest == before.digest
    reload()
    assert make_config(TABLE).digest != before.digest


def test_runs_of_earlier_versions_which_did_not_count_own_code_can_be_read(mine, tmp_path):
    made = train(make_config(TABLE), tmp_path)
    older = tmp_path / f"tiny-{made.config.digest_without_code}"
    text = (made.folder / "config.toml").read_text()
    made.folder.rename(older)
    (older / "config.toml").write_text(text[: text.index("[code]")])
    assert pf.load_run(older, trust=True).config.algorithm == made.config.algorithm


def test_a_package_counts_with_all_its_files_and_a_module_with_those_beside_it_that_it_imports(folder):
    package = folder / "robots_for_test"
    (package / "deep").mkdir(parents=True)
    for path in (package / "__init__.py", package / "arms.py", package / "deep" / "joints.py", folder / "aside.py"):
        path.write_text("")
    (folder / "single_for_test.py").write_text("import aside\nfrom robots_for_test.arms import x\nimport numpy\n")
    (folder / "unrelated.py").write_text("")
    names = "robots_for_test.arms:Arm", "single_for_test:Env"

    def digests():
        from perfedrl.experiments import own_code

        own_code._read.clear()
        return tuple(code(*names).values())

    package_before, single_before = digests()
    edit(folder / "unrelated.py")
    assert digests() == (package_before, single_before)
    edit(folder / "aside.py")
    assert digests()[0] == package_before
    assert digests()[1] != single_before
    edit(package / "deep" / "joints.py")
    assert digests()[0] != package_before


def test_parts_of_the_library_and_of_gymnasium_are_not_own_code():
    assert make_config(changed(fleet={"env": "perfedrl.envs.gridworld:gridworld"})).code is None
    assert code_digests([{"env": "gymnasium", "id": "CartPole-v1"}]) == {}


def test_an_address_is_not_a_module_of_the_standard_library():
    table = {"env": "gymnasium", "id": "CartPole-v1", "options": {"server": "http://example.org/a", "at": "code:1"}}
    assert code_digests([table]) == {}


def test_a_registered_environment_counts_by_the_module_of_its_entry_point(folder):
    (folder / "envs_for_test.py").write_text("from gymnasium.envs.classic_control import CartPoleEnv as Cart\n")
    gymnasium.register("ForTest-v0", entry_point="envs_for_test:Cart", max_episode_steps=5)
    try:
        registered = code_digests([{"env": "gymnasium", "id": "ForTest-v0"}])
        named = code_digests([{"env": "gymnasium", "id": ["envs_for_test:Cart"], "outcomes": "nothing:here"}])
        assert set(registered.values()) == set(named.values())
        assert (*registered, *named) == ("ForTest-v0", "envs_for_test:Cart")
    finally:
        del gymnasium.registry["ForTest-v0"]


class Maker:
    """An entry point that is an object."""

    def __call__(self, **arguments):
        return gymnasium.make("CartPole-v1").unwrapped


@pytest.mark.parametrize("point", [functools.partial(Maker, 1), Maker(), Maker, lambda: None])
def test_entry_points_of_every_kind_count_by_their_module(point):
    gymnasium.register("ForTest-v0", entry_point=point, max_episode_steps=5)
    try:
        assert code_digests([{"env": "gymnasium", "id": "ForTest-v0"}]) == {"ForTest-v0": source_digest(__name__)}
    finally:
        del gymnasium.registry["ForTest-v0"]


def test_code_without_source_is_said_and_does_not_change_the_digest(tmp_path, monkeypatch, caplog):
    module = types.ModuleType("typed_for_test")
    exec(ALGORITHM, vars(module))
    monkeypatch.setitem(sys.modules, "typed_for_test", module)
    config = make_config({**TABLE, "algorithm": {**TABLE["algorithm"], "name": "typed_for_test:Mine"}})
    assert config.digest == config.digest_without_code
    with caplog.at_level(logging.WARNING, "perfedrl"):
        train(config, tmp_path)
    assert "the source of typed_for_test:Mine is not found" in caplog.text
