"""Runs that start from another run's parameters, which count by their content."""

import shutil

import numpy as np
import pytest
import tomli_w
from tiny_config import changed

import perfedrl as pf
from perfedrl.experiments import store
from perfedrl.experiments.config import make_config
from perfedrl.experiments.training import train
from perfedrl.federation.server.network_config import networked
from perfedrl.studies.theory import analysis

PFEDME = {"name": "pfedme", "alpha": 0.1, "beta": 0.1}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return train(make_config(changed(rounds=2)), tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A run of one seed, with other parameters."""
    return train(make_config(changed(rounds=1, seeds=[3])), tmp_path_factory.mktemp("single"))


def started(source, **changes):
    return make_config(changed(**{"name": "next", "rounds": 1, "start": str(source.folder), **changes}))


def test_a_run_starts_where_the_other_ended_and_keeps_a_copy_of_these_parameters(source, tmp_path):
    (tmp_path / "runs").mkdir()
    there = shutil.copytree(source.folder, tmp_path / "runs" / source.folder.name)
    table = changed(name="next", rounds=1, start=f"runs/{source.folder.name}")
    (tmp_path / "next.toml").write_text(tomli_w.dumps(table))
    config = pf.load_config(tmp_path / "next.toml")
    shutil.rmtree(there)
    run = train(config, tmp_path / "runs")
    np.testing.assert_array_equal(run.history.before[:, 0], source.history.before[:, -1])
    again = pf.load_run(shutil.move(run.folder, tmp_path / run.folder.name))
    np.testing.assert_array_equal(again.params, run.params)
    assert again.config.digest == config.digest
    assert (again.folder / store.START).is_file()
    np.testing.assert_array_equal(again.config.experiment.start.params, source.params)
    (tmp_path / "next.toml").write_text(again.config.to_toml(start_path=f"{again.folder.name}/{store.START}"))
    assert pf.load_config(tmp_path / "next.toml").digest == config.digest, "a copied config with the copied parameters"


def test_the_digest_covers_the_parameters_and_not_their_place(source, single, tmp_path):
    config = started(source)
    moved = shutil.copytree(source.folder, tmp_path / source.folder.name)
    assert make_config(changed(name="next", rounds=1, start=str(moved))).digest == config.digest
    assert started(single).digest != config.digest
    assert started(source, start=0).digest not in (config.digest, started(single).digest)
    with pytest.raises(pf.UserError, match="has changed since this config was made"):
        make_config({**config.table, "start": {"path": str(single.folder), "sha256": config.start.sha256}})


def test_configs_with_loaded_parameters_can_be_compared(source, single):
    one, two, other = started(source), started(source), started(single)
    assert one.start.saved is not two.start.saved
    assert one.start == two.start
    assert hash(one.start) == hash(two.start)
    assert one == two
    assert one.start != other.start
    assert one.start != 0


def test_a_folder_named_per_seed_is_not_the_start(tmp_path):
    (tmp_path / "per-seed").mkdir()
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(changed(start="per-seed")))
    assert pf.load_config(tmp_path / "tiny.toml").start == "per-seed"


def test_one_seed_is_the_start_of_all_and_several_are_the_starts_of_the_same_seeds(source, single):
    assert started(source, seeds=[1]).experiment.start_number(1) == 1
    with pytest.raises(pf.UserError, match=r"seed 5 cannot start from .*, which has the seeds 0, 1; use those"):
        started(source, seeds=[0, 5])
    experiment = started(single, seeds=[0, 5]).experiment
    assert experiment.start_number(5) == 0
    np.testing.assert_array_equal(experiment.start_params(0), single.params[0])


def test_a_start_that_does_not_fit_is_one_sentence(source, tmp_path):
    with pytest.raises(pf.UserError, match=r"shape of theta is \(4, 4\) there and \(9, 4\) here"):
        started(source, fleet={"width": 3})
    with pytest.raises(pf.UserError, match="there is no run"):
        started(source, start=str(tmp_path / "nothing"))
    with pytest.raises(pf.UserError, match="no file of parameters"):
        started(source, start=str(tmp_path / "nothing.safetensors"))
    for wrong in ({"path": 3}, {"pth": "x"}, {}, 1.5, True):
        with pytest.raises(pf.UserError, match="start must be"):
            started(source, start=wrong)


def test_a_network_and_the_theory_refuse_what_they_cannot_do(source):
    config = started(source)
    with pytest.raises(
        pf.UserError, match="agents of pfedme begin with the start parameters, which only the server has"
    ):
        networked(make_config({**config.table, "algorithm": PFEDME}))
    with pytest.raises(pf.UserError, match=r"agents of pfedme have states of their own, .* leave keep"):
        networked(make_config({**changed(keep="best"), "algorithm": PFEDME}))
    with pytest.raises(pf.UserError, match="set start to a number"):
        analysis.of_config(config)
