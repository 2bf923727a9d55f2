"""The experiments on Gymnasium fleets: fair by construction, and claims that are met only where intervals are apart."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from perfedrl.experiments.config import load_config
from perfedrl.experiments.store import Run
from perfedrl.report.plots import rows
from perfedrl.simulation.history import Deployment
from perfedrl.studies.gym_fleets import study as gym_fleets_study
from perfedrl.studies.gym_fleets.figures import unseen
from perfedrl.studies.gym_fleets.study import FEDAVG, META, ONCE, SPLIT, STUDIES

pytest.importorskip("gymnasium")

CONFIGS = Path(__file__).parents[2] / "configs"
STUDY = pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)


@pytest.mark.parametrize(
    ("file", "name", "seeds"), [("gym_cart_poles", "cart-poles", 5), ("gym_pendulums", "pendulums", 2)]
)
def test_the_committed_configs_are_the_experiments(file, name, seeds):
    """The pendulums' with two of its eight seeds, which train in minutes."""
    assert load_config(CONFIGS / f"{file}.toml") == STUDIES[name].configs(seeds, False)[META]


@STUDY
def test_both_methods_train_under_one_budget(study):
    meta, fedavg = (study.configs(1, False)[key] for key in (META, FEDAVG))
    assert meta.rounds == fedavg.rounds
    assert meta.fleet == fedavg.fleet
    steps, trajectories = (
        {getattr(c.experiment.algorithm, name) for c in (meta, fedavg)}
        for name in ("local_steps", "trajectories_per_round")
    )
    assert len(steps) == len(trajectories) == 1


@STUDY
def test_from_scratch_the_unseen_agents_have_as_many_trajectories_as_one_personalization(study):
    configs = study.configs(1, False)
    held_out = [task.recipe.values for task in configs[META].experiment.fleet.held_out]
    for key in (ONCE, SPLIT):
        fleet = configs[key].experiment.fleet
        assert [task.recipe.values for task in fleet.train] == held_out
        assert configs[key].rounds * configs[key].experiment.algorithm.trajectories_per_round == study.budget
    assert configs[META].evaluation["few_shot"] == (0, study.budget)


def run_of(**content):
    """A run that holds nothing else."""
    run = object.__new__(Run)
    run.__dict__.update(folder=Path("run"))
    run.__dict__.update(content)
    return run


def runs_with(before, after, scratch):
    """Runs of three agents that measured these scores."""
    same = lambda x: np.repeat(np.asarray(x, float)[:, None], 3, axis=1)  # noqa: E731
    config = SimpleNamespace(seeds=tuple(range(len(before))))
    scores = {"score": np.stack([same(before), same(after)], axis=1)}
    deployed = Deployment(np.asarray([0, 20]), scores, np.zeros((0, 2, 3, 0)))
    alone = np.stack([same(scratch), same(scratch)], axis=1)
    history = SimpleNamespace(outcomes={"before.score": alone, "after.score": alone})
    trained, local = run_of(config=config, deployment=deployed), run_of(history=history)
    return {META: trained, FEDAVG: trained, ONCE: local, SPLIT: local}


@STUDY
@pytest.mark.parametrize(
    ("after", "met"), [([50, 51, 52], [True] * 3), ([21, 31, 41], [False] * 3), ([30, 31, 32], [True, False, False])]
)
def test_a_claim_is_met_where_the_intervals_do_not_overlap(study, after, met):
    runs = runs_with(before=[19, 20, 21], after=after, scratch=[29, 30, 31])
    assert [claim.met for claim in gym_fleets_study.claims(study, runs)] == met


@STUDY
def test_the_figure_shows_every_method_before_and_after(study):
    (plot,) = unseen(study, runs_with([1, 2], [3, 4], [5, 6]))
    assert len(rows(plot)[1]) == 8
    assert plot.axis.ticks == (0.0, study.budget)
