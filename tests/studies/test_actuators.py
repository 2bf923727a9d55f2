"""The study of actuator fleets: equal budgets, unseen agents of both signs, and claims about shares by hand."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from perfedrl.experiments.config import load_config
from perfedrl.simulation.history import Deployment
from perfedrl.studies.actuators.figures import actuators
from perfedrl.studies.actuators.study import (
    BUDGET,
    FEDAVG,
    FEDPPO,
    FLEETS,
    PROMP,
    SPECIALISTS,
    UNSEEN,
    claims,
    configs,
)

CONFIGS = Path(__file__).parents[2] / "configs"
EACH_FLEET = pytest.mark.parametrize("fleet", FLEETS.values(), ids=FLEETS)
METHODS = (PROMP, FEDAVG, FEDPPO)


def test_the_committed_config_is_the_studys_with_two_seeds():
    assert load_config(CONFIGS / "actuators.toml") == FLEETS["cart-poles"].config(PROMP, 2, False)


@EACH_FLEET
def test_all_methods_train_with_the_same_number_of_trajectories(fleet):
    made = {method: fleet.config(method, 2, False) for method in (*METHODS, SPECIALISTS)}
    assert len({config.rounds * config.experiment.algorithm.trajectories_per_round for config in made.values()}) == 1
    assert len({str(made[method].fleet) for method in METHODS}) == 1
    assert len({str((made[method].policy, made[method].advantage)) for method in made}) == 1


@EACH_FLEET
def test_specialists_are_the_unseen_agents_which_have_both_signs(fleet):
    alone, trained = (fleet.config(method, 2, False).experiment.fleet for method in (SPECIALISTS, PROMP))
    for name in ("gain", "lag", "dead_zone"):
        own = trained.held_out.settings[name]
        np.testing.assert_array_equal(alone.train.settings[name], np.abs(own) if fleet.turned else own)
    for part in (trained.train, trained.held_out):
        assert np.sign(part.gain).sum() == 0


def run_with(before, after, alone):
    """A run whose agents all have these scores at the end, and 10 at the start."""
    same = lambda *x: np.stack([np.full((2, UNSEEN), float(y)) for y in x], axis=1)  # noqa: E731
    scores = same(before, after)
    scores[:, :, -1] -= 8 * (np.arange(2) * 2 - 1)[:, None]  # the last agent differs by 8 from the others, seed by seed
    outcomes = {"held_out_before.score": same(10, before), "held_out_after.score": same(10, after)}
    history = SimpleNamespace(outcomes={**outcomes, "after.score": same(10, alone)}, trajectories=np.asarray([0, 100]))
    deployed = Deployment(np.asarray([0, BUDGET]), {"score": scores}, np.zeros((0, 2, UNSEEN, 0)))
    return SimpleNamespace(history=history, deployed=deployed, config=SimpleNamespace(seeds=(0, 1)))


def test_shares_are_measured_from_untrained_policies_to_the_specialists(untyped):
    runs = {}
    for name in FLEETS:
        runs |= {(name, PROMP): run_with(12, 190, 0), (name, FEDAVG): run_with(20, 50, 0)}
        runs |= {(name, FEDPPO): run_with(30, 120, 0), (name, SPECIALISTS): run_with(0, 0, 210)}
    found = claims(runs)
    assert len(found) == 8 * len(FLEETS)
    np.testing.assert_allclose([x.measured for x in found[:5]], [0.9, 0.05, 0.2, 0.1, 0.55])
    assert [x.met for x in found[:5]] == [True, True, True, True, True]
    np.testing.assert_allclose([x.measured for x in found[5:8]], [210, 190, 186])
    labels = {series.label: series.values[:, -1].tolist() for series in actuators(runs)[0].series}
    assert labels["ProMP, one step"] == [190, 190]
    assert labels["FedPPO, one step"] == [120, 120]


def test_quick_configs_are_small():
    made = configs(1, True)
    assert all(config.rounds == 1 and config.fleet["horizon"] == 9 for config in made.values())
    assert len({config.folder for config in made.values()}) == 4 * len(FLEETS)
