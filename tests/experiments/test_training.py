"""Training and runs on disk: complete or absent, resumed bitwise, not trained twice, and checked when read."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tomli_w
from interruption import Rounds, StopAt
from tiny_config import changed

import perfedrl as pf
from perfedrl.errors import UserError
from perfedrl.experiments import run_list, store
from perfedrl.experiments import training as runner
from perfedrl.experiments.config import make_config
from perfedrl.experiments.training import Interrupted, train

TABLE = changed(rounds=6, evaluate_every=2, fleet={"held_out": [(0, 1)]})
OTHER = {**TABLE, "algorithm": {**TABLE["algorithm"], "alpha": 0.5}}
CONFIG = make_config(TABLE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(CONFIG, tmp_path_factory.mktemp("runs"))


def assert_same(one, two):
    for name, x in one.history.arrays().items():
        np.testing.assert_array_equal(x, two.history.arrays()[name], err_msg=name)
    np.testing.assert_array_equal(one.params, two.params)


def test_a_run_folder_has_all_files_and_the_provenance(finished):
    assert sorted(path.name for path in finished.folder.iterdir()) == sorted(store.FILES)
    assert finished.folder.name == f"tiny-{CONFIG.digest}"
    about = json.loads((finished.folder / "provenance.json").read_text())
    assert {"format", "perfedrl", "jax", "python", "device", "commit", "seconds", "finished"} <= set(about)
    assert finished.history.rounds.tolist() == [0, 2, 4, 6]
    assert finished.params.shape == (2, 4, 4)


def test_reading_a_run_back_gives_the_same_run(finished):
    again = pf.load_run(finished.folder)
    assert again.config == CONFIG
    assert_same(again, finished)


def test_a_run_is_shown_in_a_few_lines(finished):
    shown = repr(finished)
    assert len(shown.splitlines()) <= 3
    assert len(shown) < 500
    for words in (finished.folder.name, "per-fedavg-pg on gridworld", "6 rounds, 2 seeds", "4 agents and 1 held out"):
        assert words in shown


def test_a_finished_run_is_not_trained_again(finished, monkeypatch):
    monkeypatch.setattr(runner._Group, "train", lambda *_, **__: pytest.fail("trained again"))
    assert_same(train(CONFIG, finished.folder.parent), finished)


def test_restart_trains_again_to_the_same_result(finished, tmp_path):
    root = tmp_path / "runs"
    shutil.copytree(finished.folder.parent, root)
    before = (root / CONFIG.folder / "provenance.json").stat().st_mtime_ns
    assert_same(train(CONFIG, root, restart=True), finished)
    assert (root / CONFIG.folder / "provenance.json").stat().st_mtime_ns > before


def test_ctrl_c_writes_a_checkpoint_and_a_resumed_run_is_bitwise_the_same(finished, tmp_path):
    with pytest.raises(Interrupted, match="after round 4 of 6"):
        train(CONFIG, tmp_path, observers=[StopAt(4)])
    assert [path.name for path in tmp_path.iterdir()] == [f"{CONFIG.folder}.partial"]
    checkpoint = store.load_checkpoint(tmp_path, CONFIG)
    assert checkpoint.round == 4
    assert checkpoint.history.rounds.tolist() == [0, 2, 4]
    rounds = Rounds()
    resumed = train(CONFIG, tmp_path, observers=[rounds])
    assert rounds.seen == [4, 6], "the rounds before the interrupt are not trained again"
    assert_same(resumed, finished)
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG.folder]


def test_a_checkpoint_with_other_arrays_is_rejected(tmp_path, monkeypatch):
    with pytest.raises(Interrupted):
        train(CONFIG, tmp_path, observers=[StopAt(4)])
    checkpoint = store.load_checkpoint(tmp_path, CONFIG)
    other = tuple(x[..., None] for x in checkpoint.leaves)
    monkeypatch.setattr(runner, "load_checkpoint", lambda *_: dataclasses.replace(checkpoint, leaves=other))
    with pytest.raises(UserError, match="--restart"):
        train(CONFIG, tmp_path)


@pytest.mark.slow
def test_configs_that_share_a_program_train_together_to_the_same_results(finished, tmp_path):
    other = make_config({**OTHER, "seeds": 3})
    before = runner.Simulation.advance
    calls = []

    def counting(self, *args):
        calls.append(len(self.seeds))
        return before(self, *args)

    runner.Simulation.advance = counting
    try:
        together = train([CONFIG, other], tmp_path)
    finally:
        runner.Simulation.advance = before
    assert calls == [5, 5, 5], "one group of 2 + 3 replicas, three evaluations"
    assert_same(together[0], finished)
    assert_same(together[1], train(other, tmp_path / "alone"))


@pytest.mark.slow
def test_an_interrupted_group_resumes_as_a_group(tmp_path):
    other = make_config(OTHER)
    with pytest.raises(Interrupted):
        train([CONFIG, other], tmp_path, observers=[StopAt(2)])
    resumed = train([CONFIG, other], tmp_path)
    whole = train([CONFIG, other], tmp_path / "whole")
    for one, two in zip(resumed, whole, strict=True):
        assert_same(one, two)


def test_an_interrupted_restart_resumes_without_restart(finished, tmp_path):
    root = tmp_path / "runs"
    shutil.copytree(finished.folder.parent, root)
    with pytest.raises(Interrupted):
        train(CONFIG, root, restart=True, observers=[StopAt(4)])
    rounds = Rounds()
    assert_same(train(CONFIG, root, observers=[rounds]), finished)
    assert rounds.seen == [4, 6]


def test_a_run_that_another_process_trains_is_rejected(tmp_path):
    with store.locked(tmp_path, CONFIG), pytest.raises(pf.UserError, match="another process is training"):
        train(CONFIG, tmp_path)
    assert list(tmp_path.iterdir()) == [], "the lock is removed"


def test_restart_leaves_the_checkpoint_of_a_run_that_another_process_trains(tmp_path):
    other = make_config(OTHER)
    with pytest.raises(Interrupted):
        train(CONFIG, tmp_path, observers=[StopAt(4)])
    with store.locked(tmp_path, other), pytest.raises(pf.UserError, match=f"is training {other.folder}"):
        train([CONFIG, other], tmp_path, restart=True)
    assert store.load_checkpoint(tmp_path, CONFIG).round == 4, "nothing is deleted before everything is locked"
    with store.locked(tmp_path, CONFIG):
        with pytest.raises(pf.UserError, match=f"is training {CONFIG.folder}"):
            train(CONFIG, tmp_path, restart=True)
        assert (tmp_path / f"{CONFIG.folder}.partial" / store.LOCK).exists(), "the lock is its owner's"
    assert store.load_checkpoint(tmp_path, CONFIG).round == 4


def test_a_lock_file_that_its_owner_removed_is_not_the_lock(tmp_path, monkeypatch):
    """The owner ends between the moments at which the second process opens the file and locks it."""
    folder, flock, opened = store.partial_folder(tmp_path, CONFIG), store.fcntl.flock, []

    def late(file, how):
        if not opened:
            (folder / store.LOCK).unlink()
        opened.append(file)
        flock(file, how)

    monkeypatch.setattr(store.fcntl, "flock", late)
    with store.locked(tmp_path, CONFIG):
        assert len(opened) == 2
        assert (folder / store.LOCK).exists()


def test_the_lock_of_the_next_process_outlives_a_finished_run(tmp_path):
    folder = store.partial_folder(tmp_path, CONFIG)
    with store.locked(tmp_path, CONFIG):
        (folder / store.LOCK).unlink()  # as a finished run does
        (folder / store.LOCK).write_bytes(b"")
    assert (folder / store.LOCK).exists()


def test_a_run_folder_has_a_copy_of_the_arrays_that_it_was_trained_on(tmp_path):
    arrays = {"P": np.full((2, 2, 2, 2), 0.5), "r": np.ones((2, 2, 2)), "mu": np.full((2, 2), 0.5)}
    np.savez(tmp_path / "mdps.npz", **arrays)
    fleet = {"env": "arrays", "file": "mdps.npz", "horizon": 2, "discount": 0.5}
    (tmp_path / "config.toml").write_text(tomli_w.dumps({**TABLE, "rounds": 2, "fleet": fleet}))
    run = train(pf.load_config(tmp_path / "config.toml"), tmp_path / "runs")
    np.savez(tmp_path / "mdps.npz", **{**arrays, "r": np.full((2, 2, 2), 100.0)})
    assert pf.evaluate(pf.load_run(run.folder))[0].before.mean == pytest.approx(1.75)
    shutil.move(run.folder, tmp_path / run.folder.name)
    assert pf.load_run(tmp_path / run.folder.name).config.digest == run.config.digest


def test_a_run_folder_with_another_config_is_rejected(finished, tmp_path):
    folder = shutil.copytree(finished.folder, tmp_path / CONFIG.folder)
    (folder / "config.toml").write_text(make_config(OTHER).to_toml())
    with pytest.raises(pf.UserError, match="not the config of this run"):
        pf.load_run(folder)


def test_a_damaged_run_is_trained_again_with_restart(finished, tmp_path):
    root = tmp_path / "runs"
    shutil.copytree(finished.folder.parent, root)
    (root / CONFIG.folder / "history.npz").write_bytes(b"garbage")
    with pytest.raises(pf.UserError, match="with --restart"):
        train(CONFIG, root)
    assert_same(train(CONFIG, root, restart=True), finished)


def test_a_restart_keeps_files_that_are_not_the_runs(finished, tmp_path):
    root = tmp_path / "runs"
    shutil.copytree(finished.folder.parent, root)
    (root / CONFIG.folder / "notes.txt").write_text("keep me")
    (root / CONFIG.folder / "best.safetensors").write_bytes(b"of an earlier run")
    train(CONFIG, root, restart=True)
    assert sorted(path.name for path in (root / CONFIG.folder).iterdir()) == sorted([*store.FILES, "notes.txt"])
    assert not list(root.glob(".replaced-*"))


def test_a_file_in_the_place_of_a_run_is_not_replaced(tmp_path):
    (tmp_path / CONFIG.folder).write_text("keep me")
    with pytest.raises(pf.UserError, match="is a file; the run's folder needs its name"):
        train(CONFIG, tmp_path)
    assert (tmp_path / CONFIG.folder).read_text() == "keep me"


def test_a_config_may_be_named_by_its_file(finished, tmp_path):
    (tmp_path / "tiny.toml").write_text(CONFIG.to_toml())
    assert train(tmp_path / "tiny.toml", finished.folder.parent).from_disk


def test_interrupted_runs_are_listed_with_their_round(tmp_path, run):
    with pytest.raises(Interrupted):
        train(CONFIG, tmp_path / "runs", observers=[StopAt(2)])
    code, out, _ = run("list")
    assert code == 0
    assert f"interrupted: {CONFIG.folder}.partial, round 2 of {CONFIG.rounds}; train its config to go on" in out
    train(CONFIG, tmp_path / "runs")
    assert "interrupted" not in run("list")[1]


def test_a_run_that_is_training_now_is_not_called_interrupted(tmp_path, run):
    with pytest.raises(Interrupted):
        train(CONFIG, tmp_path / "runs", observers=[StopAt(2)])
    with store.locked(tmp_path / "runs", CONFIG):
        (item,) = run_list.list_interrupted(tmp_path / "runs")
        assert (item.training, item.round, item.rounds) == (True, 2, CONFIG.rounds)
        out = run("list")[1]
        assert f"training: {CONFIG.folder}.partial, round 2 of {CONFIG.rounds}\n" in out
        assert "interrupted" not in out
    (item,) = run_list.list_interrupted(tmp_path / "runs")
    assert not item.training
    (item.folder / store.LOCK).write_bytes(b"")
    assert not store.is_locked(item.folder), "the lock file of a process that was killed"


@pytest.mark.parametrize("error", [UserError("the disk is read-only"), KeyboardInterrupt()])
def test_a_run_of_a_group_that_is_saved_gets_no_checkpoint(tmp_path, monkeypatch, error):
    """The second of two runs cannot be saved; the first one is finished."""
    save, saved = runner.save_run, []

    def save_once(root, config, *args, **options):
        if saved:
            raise error
        saved.append(config.folder)
        return save(root, config, *args, **options)

    monkeypatch.setattr(runner, "save_run", save_once)
    other = make_config(OTHER)
    with pytest.raises((UserError, Interrupted)):
        train([CONFIG, other], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CONFIG.folder, f"{other.folder}.partial"])
    assert store.has_checkpoint(tmp_path, other)


def test_compiled_programs_are_cached_on_disk(tmp_path):
    """A second process finds every program in the cache; fresh processes, since JAX sets up its cache only once.

    Programs are cached however fast they compile, since a time limit would depend on the load of the machine.
    """
    code = (
        "import sys, jax, perfedrl as pf; hits = []\n"
        "jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))\n"
        "pf.train(pf.load_config(sys.argv[1]), sys.argv[2])\n"
        "print(hits.count('/jax/compilation_cache/cache_hits'), hits.count('/jax/compilation_cache/cache_misses'))"
    )
    (tmp_path / "config.toml").write_text(CONFIG.to_toml())
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def run(runs):
        command = [sys.executable, "-c", code, tmp_path / "config.toml", tmp_path / runs]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()

    run("first")
    hits, misses = map(int, run("second"))
    assert any((tmp_path / "cache" / "perfedrl" / "compiled").iterdir())
    assert hits >= 2
    assert misses == 0


@pytest.mark.slow
def test_chunks_of_agents_do_not_change_a_run(finished, tmp_path):
    assert_same(train(CONFIG, tmp_path, chunk=3), finished)


@pytest.mark.parametrize("name", store.FILES)
def test_an_incomplete_run_is_rejected(finished, tmp_path, name):
    folder = shutil.copytree(finished.folder, tmp_path / CONFIG.folder)
    (folder / name).unlink()
    with pytest.raises(pf.UserError, match=f"not a complete run: {name} missing"):
        pf.load_run(folder)


@pytest.mark.parametrize("name", ["history.npz", "params.safetensors", "provenance.json", "config.toml"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 64])
def test_a_damaged_run_is_rejected(finished, tmp_path, name, content):
    folder = shutil.copytree(finished.folder, tmp_path / CONFIG.folder)
    (folder / name).write_bytes(content)
    with pytest.raises(pf.UserError):
        pf.load_run(folder)


def test_a_run_of_a_newer_version_is_rejected(finished, tmp_path):
    folder = shutil.copytree(finished.folder, tmp_path / CONFIG.folder)
    about = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").write_text(json.dumps({**about, "format": store.FORMAT + 1}))
    with pytest.raises(pf.UserError, match=r"newer perfedrl.*upgrade"):
        pf.load_run(folder)


def test_the_error_for_a_missing_run_suggests_the_nearest_name(finished):
    with pytest.raises(pf.UserError, match=f"did you mean '{CONFIG.folder}'"):
        pf.load_run(finished.folder.parent / CONFIG.folder.replace("tiny", "tony"))


def test_parameters_that_do_not_fit_the_policy_are_rejected(finished, tmp_path):
    from safetensors.numpy import save_file

    folder = shutil.copytree(finished.folder, tmp_path / CONFIG.folder)
    save_file({"weights": np.zeros(3)}, folder / "params.safetensors")
    with pytest.raises(pf.UserError, match="do not fit the policy"):
        pf.load_run(folder)


def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    store.write_atomically(path, b"old")

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        store.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_evaluation_of_a_run_is_exact(finished):
    rows = pf.evaluate(finished)
    assert [(row.agent, row.part) for row in rows] == [(i, "training") for i in range(4)] + [(4, "held-out")]
    after = [row.after.mean for row in rows[:4]]
    np.testing.assert_allclose(after, finished.history.after[:, -1].mean(axis=0), rtol=0, atol=1e-12)
    assert all(row.after.mean <= row.optimum for row in rows)
    unadapted = pf.evaluate(finished, alpha=0.0)
    assert all(row.before == row.after for row in unadapted)
    with pytest.raises(pf.UserError, match="alpha"):
        pf.evaluate(finished, alpha=-1.0)
