"""The path from a config to a run: each experiment is built once, and every command uses that object."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from fixtures import write
from tiny_config import BASE, changed

import perfedrl as pf
from perfedrl.experiments import build as building
from perfedrl.experiments import config as configs
from perfedrl.experiments.config import make_config, parse_config
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.worker import Worker
from perfedrl.simulation.experiment import Experiment
from perfedrl.studies import reproduction
from perfedrl.studies.base import Study
from perfedrl.studies.measurement_cache import MeasurementCache

EVALUATED = changed(seeds=1, rounds=2, evaluation={"name": "monte-carlo", "trajectories": 2, "episodes": 3})
FLEET = {"env": "gridworld", "width": 2, "horizon": 3}


@pytest.fixture
def builds(monkeypatch):
    """The number of times that each config's experiment was built."""
    counted = Counter()

    def build(config):
        counted[config.digest] += 1
        return building.build(config)

    monkeypatch.setattr(configs, "build", build)
    return counted


@dataclass(frozen=True, eq=False)
class Extended(Experiment):
    """An experiment with one more field."""

    extra: str = "kept"


@pytest.fixture
def extended(monkeypatch):
    """Make configs build experiments with one more field; an experiment copied field by field is an error."""
    check = Experiment.__post_init__

    def check_whole(self):
        assert isinstance(self, Extended), "an experiment was copied field by field"
        assert self.extra == "kept"
        check(self)

    monkeypatch.setattr(Experiment, "__post_init__", check_whole)
    monkeypatch.setattr(building, "Experiment", Extended)


def test_training_and_reading_a_run_each_build_its_experiment_once(builds, run, tmp_path):
    path = write(tmp_path / "tiny.toml", EVALUATED)
    assert run("train", path)[0] == 0
    assert list(builds.values()) == [1]
    assert run("train", path)[0] == 0
    assert list(builds.values()) == [2], "the second command, usually another process, builds it once more"


@pytest.mark.parametrize("command", ["inspect", "evaluate", "evaluate --steps 1", "personalize --agent 0"])
def test_commands_build_a_config_once(builds, run, tmp_path, command):
    path = write(tmp_path / "tiny.toml", EVALUATED)
    name, *options = command.split()
    target = path if name == "inspect" else pf.train(make_config(EVALUATED), tmp_path / "runs").folder
    builds.clear()
    code, _, error = run(name, target, *options)
    assert code == 0, error
    assert list(builds.values()) == [1]


def test_reproducing_studies_builds_each_distinct_config_once(builds, tmp_path):
    def two(seeds, quick):
        return {"one": parse_config(EVALUATED), "other": parse_config({**EVALUATED, "rounds": 3})}

    def shared(seeds, quick):
        return {"same": parse_config(EVALUATED)}

    seen = []
    studies = [
        Study(name=name, title=name, configs=make, claims=lambda runs: seen.append(runs) or [], figures=lambda _: [])
        for name, make in (("two", two), ("shared", shared))
    ]
    trained = pf.train(reproduction.all_configs(studies, 1), tmp_path)
    reproduction.claims_and_figures(studies, 1, False, trained, MeasurementCache(tmp_path), measuring)
    assert sorted(builds.values()) == [1, 1]
    assert seen[0]["one"] is seen[1]["same"]


@contextmanager
def measuring(_name):
    """A context for studies that measure nothing."""
    yield lambda _: None


def test_a_new_field_of_the_experiment_reaches_every_command(extended, run, tmp_path):
    path, runs = write(tmp_path / "tiny.toml", EVALUATED), tmp_path / "runs"
    trained = make_config(EVALUATED)
    assert trained.experiment.extra == "kept"
    assert run("train", path, "--runs", runs)[0] == 0
    folder = next(runs.iterdir())
    for command in (
        ("inspect", path),
        ("evaluate", folder),
        ("evaluate", folder, "--alpha", 0.5),
        ("evaluate", folder, "--steps", 1, "--trajectories", 2),
        ("personalize", folder, "--agent", 0, "--trajectories", 4),
    ):
        code, out, error = run(*command)
        assert code == 0, (command, out, error)


@pytest.mark.slow
def test_a_new_field_of_the_experiment_reaches_the_longer_commands(extended, run, tmp_path):
    path = write(tmp_path / "tiny.toml", EVALUATED)
    folder = pf.train(make_config(EVALUATED), tmp_path / "runs").folder
    for command in (
        ("estimators", path, "--replicates", 2, "--agents", 1, "--stage", "end", "--m", 2),
        ("evaluate", folder, "--steps", 1, "--trajectories", 2, "--scratch", 1.0),
        ("theory", path),
    ):
        code, out, error = run(*command)
        assert code == 0, (command, out, error)


def test_a_new_field_of_the_experiment_reaches_a_networked_agent(extended):
    plan = make_config(EVALUATED)
    work = Worker(make_agent_config({"fleet": FLEET}), 0).training(plan.to_toml())
    assert work.config.experiment.extra == "kept"


WEIGHTED = changed(aggregation={"name": "mean", "weights": [1.0, 3.0, 1.0, 1.0]}, control_variate="round")
STEPPED = {**WEIGHTED, "control_variate": "step", "algorithm": {"name": "fedavg-pg", "alpha": 0.5, "beta": 0.3, "m": 4}}


@pytest.mark.parametrize("config", [WEIGHTED, STEPPED], ids=["rounds", "steps"])
def test_every_command_accepts_weights_together_with_a_control_variate(run, tmp_path, config):
    path = write(tmp_path / "weighted.toml", config)
    code, _, error = run("inspect", path)
    assert code == 0, error
    finished = pf.train(make_config(config), tmp_path / "runs")
    for options in ((), ("--alpha", 0.5), ("--steps", 1)):
        code, _, error = run("evaluate", finished.folder, *options)
        assert code == 0, (options, error)
    assert np.isfinite(pf.assess(finished, steps=1).outcomes["return"]).all()


def test_the_run_that_training_returns_equals_the_one_on_disk(tmp_path):
    config = make_config(EVALUATED)
    held = pf.train(config, tmp_path)
    read = pf.load_run(held.folder)
    assert held.config is config
    assert read.config == held.config
    np.testing.assert_array_equal(read.message, held.message)
    for name, values in held.history.arrays().items():
        np.testing.assert_array_equal(values, read.history.arrays()[name])
    assert dict(read.provenance) == dict(held.provenance)


def test_the_old_name_of_the_experiment_still_works_with_a_warning():
    config = make_config(BASE)
    with pytest.warns(DeprecationWarning, match=r"Config\.experiment"):
        assert config.parts is config.experiment
