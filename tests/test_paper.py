"""The paper's experiments: configs as in its table, claims computed as it states them, figures from saved runs."""

from pathlib import Path

import numpy as np
import pytest

from perfedrl.experiments.config import load_config
from perfedrl.experiments.paper import ALPHAS, EXPERIMENTS, VARIANTS, all_configs, near, share, tabular
from perfedrl.experiments.stats import at_cost, mean_interval
from perfedrl.experiments.store import Run
from perfedrl.history import History
from perfedrl.report.figures import FIGURES, draw, figure_of


def fake_run(config, level: float) -> Run:
    """A run whose return after adaptation rises linearly to a level."""
    rounds = np.arange(0, 81, 2)
    per_round = config.parts.algorithm.trajectories_per_round
    shape = (len(config.seeds), len(rounds), 8)
    after = np.broadcast_to((0.3 + (level - 0.3) * rounds / 80)[None, :, None], shape)
    nobody = np.zeros((*shape[:2], 0))
    history = History(
        np.asarray(config.seeds), rounds, rounds * per_round, rounds * 800, after * 0.6, after, nobody, nobody
    )
    return Run(Path("nowhere"), config, history, None, {})


@pytest.fixture
def runs():
    configs = EXPERIMENTS["e3"].configs(3)
    level = {"exact": 0.15, "first-order": 0.12, "fedavg-pg": 0.09}
    return {(v, a): fake_run(config, 0.5 + level[v] * a) for (v, a), config in configs.items()}


def test_the_committed_config_is_the_papers():
    path = Path(__file__).parents[1] / "configs" / "gridworld.toml"
    assert load_config(path) == tabular("exact", 2.0, 10)


def test_budgets_match__table_hyperparameters():
    per_round = {v: tabular(v, 2.0, 1).parts.algorithm.trajectories_per_round for v in VARIANTS}
    assert per_round == {"exact": 150, "first-order": 100, "fedavg-pg": 150}


def test_experiments_share_runs():
    configs = all_configs(list(EXPERIMENTS.values()), 10)
    assert len(configs) == len({config.folder for config in configs}) == 3 * len(ALPHAS)
    assert len({config.trains_with for config in configs}) == 3, "one compilation per variant"


def test_a_claim_is_met_within_its_tolerance_only():
    assert near("e", "c", 0.5, np.asarray([0.52, 0.53])).met
    assert not near("e", "c", 0.5, np.asarray([0.54, 0.55])).met
    assert share("e", "c", np.asarray([True, True])).met
    assert not share("e", "c", np.asarray([True, False])).met


def test_claims_read_the_right_numbers(runs):
    measured = {claim.claim: claim for e in EXPERIMENTS.values() for claim in e.claims(runs)}
    assert measured["F after adaptation, exact"].measured == pytest.approx(0.8)
    assert measured["f before adaptation, exact"].measured == pytest.approx(0.48)
    assert measured["F at 8000 trajectories per agent, exact"].measured == pytest.approx(0.3 + 0.5 * 8000 / 12000)
    assert measured["F at 8000 trajectories per agent, first-order"].measured == pytest.approx(0.74)
    assert measured["F at alpha = 3, FedAvg-PG"].measured == pytest.approx(0.77)
    assert measured["steps of alpha at which exact draws further ahead of FedAvg-PG"].met
    assert measured["rounds from 8 on at which exact >= first-order"].met


def test_intervals_by_hand():
    mean, low, high = mean_interval(np.asarray([1.0, 2.0, 3.0]))
    assert (mean, low, high) == pytest.approx((2, 2 - 4.302653 / np.sqrt(3), 2 + 4.302653 / np.sqrt(3)), abs=1e-6)
    assert mean_interval(np.asarray([1.0])).low == -np.inf
    np.testing.assert_allclose(at_cost(np.asarray([[0.0, 1.0]]), np.asarray([0, 10]), 5), [0.5])


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn_with_their_numbers_beside_them(name, runs, tmp_path):
    written = draw(name, EXPERIMENTS[name].title, runs, tmp_path)
    assert [path.name for path in written] == [f"{name}.png", f"{name}.pdf", f"{name}.csv"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert written[1].read_bytes().startswith(b"%PDF")
    rows = written[2].read_text().splitlines()
    assert rows[0] == "series,x,mean,sd"
    assert {row.split(",")[0] for row in rows[1:]} >= set(VARIANTS)
    again = tmp_path / "again"
    for one, two in zip(written, draw(name, EXPERIMENTS[name].title, runs, again), strict=True):
        assert one.read_bytes() == two.read_bytes(), "the same runs give the same files"


@pytest.mark.parametrize("name", FIGURES)
def test_the_legend_never_covers_data(name, runs):
    figure, _ = figure_of(name, EXPERIMENTS[name].title, runs)
    figure.canvas.draw()
    (legend,), (axes,) = figure.legends, figure.axes
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
