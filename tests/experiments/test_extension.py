"""Longer runs: a finished run goes on from its end, to the bits of a run that was trained for all rounds at once."""

import logging

import jax
import numpy as np
import pytest
from fixtures import write
from interruption import Rounds, StopAt
from tiny_config import changed

from perfedrl.experiments import store
from perfedrl.experiments.config import make_config
from perfedrl.experiments.evaluate import evaluate
from perfedrl.experiments.training import Interrupted, train

STATELESS = make_config(changed(rounds=6, evaluate_every=2, fleet={"held_out": [(0, 1)]}))
STATEFUL = make_config(
    changed(
        rounds=6,
        evaluate_every=2,
        keep="best",
        fleet={"held_out": [(0, 1)]},
        server={"optimizer": "momentum", "rate": 2.0},
    )
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that were trained for all rounds at once."""
    root = tmp_path_factory.mktemp("whole")
    return {config.folder: train(config, root) for config in (STATELESS, STATEFUL)}


def assert_same(one, two):
    pairs = [(one.history.arrays(), two.history.arrays()), (one.message, two.message)]
    pairs.append((one.at_end.message, two.at_end.message))
    for a, b in pairs:
        jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("config", [STATELESS, STATEFUL], ids=["parameters", "optimizer and best"])
@pytest.mark.parametrize("rounds", [4, 3], ids=["at an evaluation", "between evaluations"])
def test_a_longer_run_goes_on_from_a_finished_one_and_has_the_bits_of_one_run(whole, tmp_path, config, rounds):
    short = train(config.with_rounds(rounds), tmp_path)
    assert (short.folder / store.STATE).exists() == (config is STATEFUL)
    seen = Rounds()
    longer = train(config, tmp_path, observers=[seen])
    assert seen.seen == ([4, 6] if rounds == 4 else [3, 4, 6]), "the first rounds are not trained again"
    assert_same(longer, whole[config.folder])
    assert_same(store.load_run(longer.folder), whole[config.folder])
    assert longer.origin == f"trained on from the end of {short.folder.name}"
    assert longer.provenance["seconds"] > short.provenance["seconds"]
    assert short.folder.exists()


@pytest.mark.slow
def test_an_interrupted_extension_resumes_to_the_same_bits(whole, tmp_path):
    train(STATEFUL.with_rounds(2), tmp_path)
    with pytest.raises(Interrupted):
        train(STATEFUL, tmp_path, observers=[StopAt(4)])
    seen = Rounds()
    longer = train(STATEFUL, tmp_path, observers=[seen])
    assert seen.seen == [4, 6]
    assert_same(longer, whole[STATEFUL.folder])
    assert longer.provenance["extends"] == STATEFUL.with_rounds(2).folder


def test_restart_and_runs_without_their_state_begin_with_the_first_round(whole, tmp_path):
    short = train(STATEFUL.with_rounds(4), tmp_path)
    seen = Rounds()
    assert_same(train(STATEFUL, tmp_path, restart=True, observers=[seen]), whole[STATEFUL.folder])
    assert seen.seen[0] == 0
    (short.folder / store.STATE).unlink()  # as in a run of an earlier version
    (tmp_path / STATEFUL.folder).rename(tmp_path / "aside")
    seen = Rounds()
    assert_same(train(STATEFUL, tmp_path, observers=[seen]), whole[STATEFUL.folder])
    assert seen.seen[0] == 0


def test_a_damaged_shorter_run_is_not_continued(whole, tmp_path, caplog):
    short = train(STATELESS.with_rounds(4), tmp_path)
    (short.folder / "params.safetensors").write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING, "perfedrl"):
        longer = train(STATELESS, tmp_path)
    assert f"{short.folder.name} is not continued: " in caplog.text
    assert longer.origin == "trained"
    assert_same(longer, whole[STATELESS.folder])


def test_only_a_run_of_the_same_config_is_extended(tmp_path):
    train(STATELESS.with_rounds(4), tmp_path)
    (tmp_path / "tiny-notes").mkdir()
    (tmp_path / "tiny-damaged").mkdir()
    (tmp_path / "tiny-damaged" / "config.toml").write_text("rounds = ")
    other = make_config({**STATELESS.table, "algorithm": {**STATELESS.algorithm, "beta": 0.2}})
    seen = Rounds()
    train(other, tmp_path, observers=[seen])
    assert seen.seen[0] == 0


def test_rounds_of_a_list_of_evaluations_follow_the_number_of_rounds():
    listed = make_config(changed(rounds=6, evaluate_every=[1, 4, 6]))
    assert listed.with_rounds(9).evaluate_every == (1, 4, 6, 9)
    assert listed.with_rounds(4).evaluate_every == (1, 4)


def test_the_command_extends_a_run_by_its_config_or_its_folder(run, tmp_path):
    config = write(tmp_path / "tiny.toml", changed(rounds=2))
    folder = f"tiny-{make_config(changed(rounds=2)).digest}"
    run("train", config, "--runs", "elsewhere")
    code, out, _ = run("train", f"elsewhere/{folder}", "--rounds", "3")
    assert (code, f"trained on from the end of {folder}; saved in" in out) == (0, True)
    longer = make_config(changed(rounds=3)).folder
    assert (tmp_path / "elsewhere" / longer).is_dir(), "beside the run"
    code, out, _ = run("train", config, "--runs", "elsewhere", "--rounds", "4")
    assert f"trained on from the end of {longer}" in out
    code, _, err = run("train", config, "--rounds", "0")
    assert (code, "rounds" in err) == (2, True)


LEARNERS = {
    "promp": {"name": "promp", "alpha": 1.0, "beta": 0.1, "m_in": 2, "m_out": 2, "learn_alpha": "per-parameter"},
    "per-fedavg-pg": {"name": "per-fedavg-pg", "alpha": 1.0, "beta": 0.1, "m_in": 2, "m_h": 2, "m_out": 2}
    | {"optimizer": "adam"},
}


@pytest.mark.parametrize("name", LEARNERS)
def test_a_run_that_is_not_extensible_has_all_but_the_optimizers_state(tmp_path, name):
    table = {**changed(rounds=2, evaluate_every=2, fleet={"held_out": [(0, 1)]}), "algorithm": LEARNERS[name]}
    whole, small = (train(make_config({**table, "extensible": x}), tmp_path) for x in (True, False))
    assert small.folder != whole.folder
    assert whole.config.digest == make_config(table).digest, "the default is no part of the digest"
    saved = store.read_safetensors(small.folder / "params.safetensors")[0]
    assert not [leaf for leaf in saved if leaf.startswith("moments")]
    again = store.load_run(small.folder)
    algorithm = again.config.experiment.algorithm
    for read in (algorithm.shared, algorithm.deployment_step_size):
        jax.tree.map(np.testing.assert_array_equal, read(again.message), read(whole.message))
    assert jax.tree.map(np.shape, again.message) == jax.tree.map(np.shape, whole.message)
    assert evaluate(again) == evaluate(store.load_run(whole.folder))
    seen = Rounds()
    train(small.config.with_rounds(4), tmp_path, observers=[seen])
    assert seen.seen[0] == 0, "nothing to go on from"
