"""Configs: validated before anything runs, identified by their settings, and unchanged by a round trip."""

import re
from pathlib import Path

import numpy as np
import pytest
from tiny_config import BASE, changed

import perfedrl as pf
from perfedrl.experiments.config import load_config, make_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_committed_configs_are_valid_and_survive_a_round_trip(path, tmp_path):
    config = load_config(path)
    copy = tmp_path / "copy.toml"
    copy.write_text(config.to_toml())
    assert load_config(copy) == config
    assert load_config(copy).digest == config.digest


def test_spelling_out_a_default_does_not_change_the_digest():
    assert make_config(BASE).digest == make_config(changed(fleet={"discount": 0.9})).digest
    assert make_config(BASE).digest == make_config(changed(seeds=[0, 1], name="other")).digest


@pytest.mark.parametrize(
    "change",
    [{"rounds": 4}, {"seeds": 3}, {"evaluate_every": 2}, {"fleet": {"horizon": 4}}, {"algorithm": {"alpha": 2.0}}],
)
def test_a_changed_setting_changes_the_digest(change):
    assert make_config(BASE).digest != make_config(changed(**change)).digest


def test_a_digest_is_stable_across_versions():
    """A changed value means that every saved run would be trained again."""
    assert make_config(BASE).digest == "ac603e5c79"


def test_configs_with_other_step_sizes_and_seeds_share_a_program_and_with_other_batches_do_not():
    one = make_config(BASE)
    assert one.trains_with == make_config(changed(algorithm={"alpha": 3.0, "beta": 1.0}, seeds=9)).trains_with
    assert one.trains_with != make_config(changed(algorithm={"m_h": 3})).trains_with


def test_a_config_is_frozen():
    with pytest.raises(Exception, match="frozen"):
        make_config(BASE).rounds = 5


def test_a_config_names_a_users_own_factory_by_its_import_path():
    config = make_config(changed(fleet={"env": "perfedrl.envs.gridworld:gridworld"}))
    assert config.experiment.fleet.agents == 4


def test_the_content_of_an_array_file_is_part_of_the_digest(tmp_path):
    path = tmp_path / "mdps.npz"

    def write(r):
        np.savez(path, P=np.full((2, 2, 2, 2), 0.5), r=np.full((2, 2, 2), r), mu=np.full((2, 2), 0.5))

    table = {**BASE, "fleet": {"env": "arrays", "file": str(path), "horizon": 3, "discount": 0.9}}
    write(0.0)
    before = make_config(table)
    write(1.0)
    assert make_config(table).digest != before.digest
    saved = tmp_path / "saved.toml"
    saved.write_text(before.to_toml(file="mdps.npz"))
    with pytest.raises(pf.UserError, match="has changed"):
        load_config(saved)
    write(0.0)
    assert load_config(saved).digest == before.digest


BAD = [
    (changed(rouns=3), r"unknown key 'rouns'.*did you mean 'rounds'"),
    (changed(fleet={"widht": 3}), r"no parameter 'widht'.*'width'"),
    (changed(fleet={"env": "gridwold"}), r"unknown environment 'gridwold'.*'gridworld'"),
    (changed(policy={"name": "tabel"}), r"unknown policy 'tabel'.*'table'"),
    (changed(algorithm={"name": "per-fedavg"}), r"unknown algorithm 'per-fedavg'.*'per-fedavg-pg'"),
    (changed(curvature="scores"), r"unknown curvature estimator 'scores'.*'score'"),
    (changed(algorithm={"alpha": -1}), r"alpha must be a finite number >= 0; it is -1"),
    (changed(algorithm={"beta": 0}), r"beta must be a finite number > 0"),
    (changed(algorithm={"m_in": 0}), r"m_in must be at least 1; it is 0"),
    (changed(algorithm={"local_steps": 0}), r"local_steps must be at least 1"),
    (changed(algorithm={"variant": "fist-order"}), r"variant = 'fist-order'"),
    (changed(fleet={"discount": 1.0}), r"discount must lie in \[0, 1\)"),
    (changed(fleet={"horizon": -1}), r"horizon must be a whole number >= 0"),
    (changed(fleet={"width": "five"}), r"width = 'five'.*integer"),
    (changed(rounds=0), r"rounds: .*greater than or equal to 1, not 0"),
    (changed(rounds="3"), r"rounds: .*integer, not '3'"),
    (changed(rounds=True), r"rounds: .*integer"),
    (changed(rounds=10**12), r"rounds: .*less than"),
    (changed(algorithm={"alpha": "1.0"}), r"alpha = '1.0'"),
    (changed(algorithm={"m_in": True}), r"m_in = True"),
    (changed(algorithm={"m_in": 2**70}), r"m_in"),
    (changed(algorithm={"alpha": float("nan")}), r"alpha"),
    (changed(fleet={"horizon": 10**12}), r"horizon"),
    (changed(fleet={"goals": [[1]]}), r"goals"),
    (changed(fleet={"goals": []}), r"at least one training agent"),
    (changed(fleet={"env": "random-mdps", "width": 2}), r"no parameter 'width'"),
    ({**BASE, "fleet": {"env": "random-mdps", "seed": -1}}, r"seed >= 0"),
    ({**BASE, "fleet": {"env": "bandits", "rewards": [[]]}}, r"at least one state and one action"),
    ({**BASE, "fleet": {"env": "bandits", "rewards": [[0.0, float("nan")]]}}, r"agent 0: r\[0, 1\] is nan"),
    ({**BASE, "fleet": {"env": "tiny_config:word"}}, r"must make a perfedrl Fleet; it made a str"),
    ({**BASE, "algorithm": {"name": "tiny_config:word"}}, r"must subclass perfedrl.algorithms.Algorithm; it is a str"),
    (changed(policy={"name": "log-linear", "features": [[[float("nan")]] * 4] * 4}), r"features must be finite"),
    (changed(seeds=[[1], [2]]), r"seeds must be"),
    (changed(seeds=[True, 5]), r"seeds must be"),
    (changed(seeds=-1), r"seeds must be"),
    (changed(seeds=10**8), r"seeds must be"),
    (changed(seeds=[]), r"at least one seed"),
    (changed(seeds=0), r"at least one seed"),
    (changed(seeds=[1, 1]), r"twice"),
    (changed(seeds="ten"), r"seeds"),
    (changed(name="../evil"), r"name"),
    ({k: v for k, v in BASE.items() if k != "rounds"}, r"lacks 'rounds'"),
    (changed(fleet={"env": 3}), r"needs env"),
    ({**BASE, "algorithm": {"name": "fedavg-pg", "alpha": 1.0}}, r"needs the parameter 'beta'"),
    (changed(fleet={"env": "no_such_module:fleet"}), r"cannot be imported"),
]


@pytest.mark.parametrize(("table", "message"), BAD, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_configs_are_rejected_with_one_sentence(table, message):
    with pytest.raises(pf.UserError) as error:
        make_config(table)
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("content", "message"), [("name = ", "not valid TOML"), (None, "no config")])
def test_unreadable_files_are_rejected(tmp_path, content, message):
    path = tmp_path / "config.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(pf.UserError, match=message):
        load_config(path)
