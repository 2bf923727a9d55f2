"""The studies of the group "all": configs as in the paper, claims as stated, figures from saved runs."""

import csv
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tiers import some_slow

from perfedrl.experiments.config import load_config
from perfedrl.experiments.stats import at_cost, mean_interval, median_interval, share_interval
from perfedrl.report import static
from perfedrl.report.run_figures import learning
from perfedrl.studies import GROUPS, STUDIES
from perfedrl.studies.claims import everywhere, fraction, median, near
from perfedrl.studies.curvature.study import CLAIMED
from perfedrl.studies.few_shot.study import RECOMMENDED, recommended
from perfedrl.studies.paper_neural.study import curvature_configs, matching_budget, meta_config
from perfedrl.studies.paper_tabular.study import ALPHAS, VARIANTS, tabular
from perfedrl.studies.privacy.study import CLIPPED
from perfedrl.studies.reproduction import all_configs
from perfedrl.studies.robustness.study import AGGREGATIONS, ALONE, ATTACKS, CLEAN, HONEST, MEAN, honest
from perfedrl.theory.realized_bounds import RealizedBound
from perfedrl.theory.witness import Agreement

CONFIGS = Path(__file__).parents[2] / "configs"
NEURAL = ("e4", "e5", "e7", "robustness", "privacy")


def test_the_committed_configs_are_the_papers():
    assert load_config(CONFIGS / "gridworld.toml") == tabular("exact", 2.0, 10)
    assert load_config(CONFIGS / "arc_paper.toml") == meta_config(10)
    assert load_config(CONFIGS / "arc.toml") == recommended(20)


def test_budgets_match_the_papers_table_of_hyperparameters():
    per_round = {v: tabular(v, 2.0, 1).experiment.algorithm.trajectories_per_round for v in VARIANTS}
    assert per_round == {"exact": 150, "first-order": 100, "fedavg-pg": 150}
    meta = meta_config(1)
    assert meta.rounds * meta.experiment.algorithm.trajectories_per_round == 15_000
    curvature = curvature_configs(1, False)
    assert {m: c.experiment.algorithm.trajectories_per_round // 5 for m, c in curvature.items()} == {
        **{m: 20 + m for m in (10, 50, 100, 200, 500, 1000)},
        "fedavg-pg": 30,
    }


def test_the_neural_policy_has_360_parameters_and_the_protocols_start():
    parts = meta_config(1).experiment
    first, second = parts.policy.init(jax.random.key(0))
    assert [np.shape(x) for layer in (first, second) for x in (layer["weight"], layer["bias"])] == [
        (2, 32),
        (32,),
        (32, 8),
        (8,),
    ]
    assert np.std(first["weight"]) == pytest.approx(0.5, rel=0.3)
    assert np.std(second["weight"]) == pytest.approx(0.1, rel=0.3)
    assert not np.any(first["bias"])
    assert not np.any(second["bias"])


def test_studies_share_runs():
    configs = all_configs([STUDIES[name] for name in ("e1", "e3", "e6")], 10)
    assert len(configs) == len({config.folder for config in configs}) == 3 * len(ALPHAS)
    assert len({config.trains_with for config in configs}) == 3, "one compilation per variant"
    assert len(all_configs([STUDIES["e5"], STUDIES["e7"]], 10)) == 3, "both use the same meta-training"


@pytest.mark.parametrize("name", NEURAL)
def test_quick_configs_are_a_subset_of_the_full_ones(name):
    full, quick = (STUDIES[name].configs(4, short) for short in (False, True))
    assert set(quick) <= set(full)
    assert all(full[key] == config for key, config in quick.items())


def test_a_claim_is_met_only_within_its_tolerance():
    assert near("e", "c", 0.5, np.asarray([0.52, 0.53]), 0.03).met
    assert not near("e", "c", 0.5, np.asarray([0.54, 0.55]), 0.03).met
    assert everywhere("e", "c", np.asarray([True, True])).met
    assert not everywhere("e", "c", np.asarray([True, False])).met
    assert median("e", "c", 0.2, np.asarray([0.1, 0.5, 9.0]), 0, 0.6).met
    assert not median("e", "c", 0.2, np.asarray([0.1, 0.7, 9.0]), 0, 0.6).met
    assert (
        near("e", "c", 0.9, np.asarray([1.0, 0.8]), 0.1, shares=True).high
        < 1
        < near("e", "c", 0.9, np.asarray([1.0, 0.8]), 0.1).high
    )
    assert fraction("e", "c", 0.6, np.asarray([True] * 8 + [False] * 2), 0.1, 0.8).met
    assert not fraction("e", "c", 0.6, np.asarray([True] * 9 + [False]), 0.1, 0.8).met


def test_tabular_claims_measure_the_right_numbers(tabular_runs):
    measured = {c.claim: c for name in ("e1", "e3", "e6") for c in STUDIES[name].claims(tabular_runs)}
    assert measured["F after adaptation, exact"].measured == pytest.approx(0.8)
    assert measured["f before adaptation, exact"].measured == pytest.approx(0.48)
    assert measured["F at 8000 trajectories per agent, exact"].measured == pytest.approx(0.3 + 0.5 * 8000 / 12000)
    assert measured["F at 8000 trajectories per agent, first-order"].measured == pytest.approx(0.74)
    assert measured["F at alpha = 3, FedAvg-PG"].measured == pytest.approx(0.77)
    assert measured["steps of alpha at which exact draws further ahead of FedAvg-PG"].met
    assert measured["rounds from 8 on at which exact >= first-order"].met


def test_e4_claims_are_met_only_where_few_seeds_train_with_small_batches(curvature_runs):
    claims = STUDIES["e4"].claims(curvature_runs)
    assert all(claim.met for claim in claims)
    measured = {claim.claim: claim for claim in claims}
    assert measured["median return, m_h = 1000"].measured == pytest.approx(1.6)
    trained = measured["seeds that train (return >= 1.5), m_h = 1000"]
    assert (trained.measured, trained.low, trained.high) == pytest.approx((0.6, 0.262, 0.878), abs=1e-3)
    better = {**curvature_runs, 200: curvature_runs[1000]}
    missed = {claim.claim for claim in STUDIES["e4"].claims(better) if not claim.met}
    assert {"median return, m_h = 200", "seeds that train (return >= 1.5), m_h = 200"} <= missed


def test_e5_claims_are_met_by_the_papers_numbers(deployed_runs):
    claims = STUDIES["e5"].claims(deployed_runs)
    assert all(claim.met for claim in claims), [claim for claim in claims if not claim.met]
    measured = {claim.claim: claim.measured for claim in claims}
    assert measured["return, one step from 200 trajectories"] == pytest.approx(1.94)
    assert measured["success, one step from 20 trajectories"] == pytest.approx(0.62)
    assert measured["return, random initialization"] == pytest.approx(0.6 * 0.45)
    assert measured["success, specialist (4000 trajectories)"] == pytest.approx(0.9)
    halfway = np.exp(np.interp((1.53 - 0.5) / 1.2, (0, 1), np.log((500, 2000))))
    assert measured["trajectories from scratch that match zero-shot (1000 to 4000)"] == pytest.approx(halfway)


def test_curvature_and_few_shot_claims_are_met_only_by_the_claimed_returns(quiet_runs, recommended_runs):
    claims = STUDIES["curvature"].claims(quiet_runs)
    assert all(claim.met for claim in claims), [claim for claim in claims if not claim.met]
    assert claims[-1].measured == pytest.approx(0.08)
    stuck = dict.fromkeys(CLAIMED, quiet_runs.runs["score", 10])
    missed = STUDIES["curvature"].claims(quiet_runs._replace(runs={**quiet_runs.runs, **stuck}))
    assert [claim.met for claim in missed[:4]] == [False] * 4
    assert all(claim.met for claim in STUDIES["fewshot"].claims(recommended_runs))
    worse = recommended_runs[RECOMMENDED]
    outcomes = {k: v - 1.0 for k, v in worse.deployed.outcomes.items()}
    worse = replace(worse, deployment=replace(worse.deployed, outcomes=outcomes))
    missed = [c.met for c in STUDIES["fewshot"].claims({**recommended_runs, RECOMMENDED: worse})]
    assert missed == [False, False, False, True]


def test_robustness_and_privacy_claims_are_met_only_by_the_claimed_shares(attacked_runs, private_runs):
    claims = STUDIES["robustness"].claims(attacked_runs)
    assert len(claims) == len(ATTACKS) * len(AGGREGATIONS)
    assert all(claim.met for claim in claims), [claim for claim in claims if not claim.met]
    assert claims[0].measured == pytest.approx(0.5 / 2.8)
    fallen, standing = attacked_runs["random", MEAN], attacked_runs["scaled", "median"]
    swapped = attacked_runs | {("random", "median"): fallen, ("scaled", MEAN): standing}
    missed = [c.claim for c in STUDIES["robustness"].claims(swapped) if not c.met]
    assert [m.partition("), ")[2] for m in missed] == ["scaled, mean", "random, median"]
    claims = STUDIES["privacy"].claims(private_runs)
    assert all(claim.met for claim in claims), [claim for claim in claims if not claim.met]
    assert len(claims) == 4
    reversed_ = private_runs | {0.3: private_runs[3.0], 10.0: private_runs[CLIPPED]}
    assert [c.met for c in STUDIES["privacy"].claims(reversed_)] == [True, False, False, False]


def test_returns_of_hostile_agents_are_excluded(attacked_runs):
    run = attacked_runs[CLEAN, MEAN]
    after = run.history.after.copy()
    after[:, :, HONEST:] = 1e6
    np.testing.assert_allclose(honest(replace(run, history=replace(run.history, after=after))), 2.8)
    (alone, ten) = (attacked_runs[key, MEAN].config.experiment.fleet for key in (ALONE, CLEAN))
    np.testing.assert_allclose(alone.train.goal, ten.train.goal[:HONEST], atol=1e-5)


def test_matching_budget_interpolates_and_is_infinite_below_the_level():
    budgets, values = np.asarray([10, 100]), np.asarray([0.1, 0.2])
    assert matching_budget(budgets, values, 0.3) == np.inf
    assert matching_budget(budgets, values, 0.05) == 10
    assert matching_budget(budgets, values, 0.15) == pytest.approx(10**1.5)


def test_rollouts_are_counted_where_they_reach_the_goal(deployed_runs):
    assert [c.measured for c in STUDIES["e7"].claims(deployed_runs)] == pytest.approx([9, 12, 5])
    assert all(claim.met for claim in STUDIES["e7"].claims(deployed_runs))


def test_intervals_by_hand():
    mean, low, high = mean_interval(np.asarray([1.0, 2.0, 3.0]))
    assert (mean, low, high) == pytest.approx((2, 2 - 4.302653 / np.sqrt(3), 2 + 4.302653 / np.sqrt(3)), abs=1e-6)
    assert mean_interval(np.asarray([1.0])).low == -np.inf
    np.testing.assert_allclose(at_cost(np.asarray([[0.0, 1.0]]), np.asarray([0, 10]), 5), [0.5])
    # Of ten values the second and the ninth bracket the median with probability 1 - 2 (1 + 10) / 2^10 = 0.979.
    assert median_interval(np.arange(10.0)) == (4.5, 1.0, 8.0)
    assert median_interval(np.arange(5.0)) == (2.0, -np.inf, np.inf)
    # With no success in ten the upper end solves (1 - p)^10 = 0.025.
    assert share_interval(0, 10) == pytest.approx((0, 0, 1 - 0.025**0.1))
    assert share_interval(10, 10) == pytest.approx((1, 0.025**0.1, 1))


@pytest.mark.parametrize("name", some_slow(GROUPS["all"], ["e1", "e4", "e7", "lqr", "robustness"]))
def test_figures_are_saved_reproducibly_with_their_numbers(name, runs_of, tmp_path):
    plots = STUDIES[name].figures(runs_of[name])
    for plot in plots:
        written = static.save(plot, tmp_path)
        assert [path.name for path in written] == [f"{plot.name}.png", f"{plot.name}.pdf", f"{plot.name}.csv"]
        assert written[0].read_bytes().startswith(b"\x89PNG")
        assert written[1].read_bytes().startswith(b"%PDF")
        for one, two in zip(written, static.save(plot, tmp_path / "again"), strict=True):
            assert one.read_bytes() == two.read_bytes(), "the same runs give the same files"
    assert {plot.name.partition("-")[0] for plot in plots} == {name}


def test_the_csv_file_has_the_plotted_numbers(runs_of, tmp_path):
    (plot,) = STUDIES["e4"].figures(runs_of["e4"])
    lines = list(csv.reader((static.save(plot, tmp_path)[2]).read_text().splitlines()))
    assert lines[0] == ["series", "x", "mean", "sd", "median", "seeds"]
    (row,) = (line for line in lines if line[1] == "1000.0")
    assert [float(x) for x in row[2:]] == pytest.approx([0.4 * 0.5 + 0.6 * 1.6, 0.568038, 1.6, 10], abs=1e-6)


@pytest.mark.parametrize(
    "name", some_slow(["e1", "e3", "e4", "e5", "e6", "theory", "privacy", "robustness"], ["e1", "e4", "robustness"])
)
def test_the_legend_never_covers_data(name, runs_of):
    for plot in STUDIES[name].figures(runs_of[name]):
        figure = static.draw(plot)
        figure.canvas.draw()
        (legend,), (axes,) = figure.legends, figure.axes
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_rollouts_are_drawn_up_to_the_goal(runs_of):
    (plot,) = STUDIES["e7"].figures(runs_of["e7"])
    assert [panel.reached for panel in plot.panels] == [9, 12, 5]
    before = plot.panels[0]
    assert len(before.path(0)) < 21
    assert np.linalg.norm(before.path(0)[-1] - before.goal) <= before.radius
    assert np.linalg.norm(before.path(0)[-2] - before.goal) > before.radius
    assert len(before.path(11)) == 21, "a path that never reaches is drawn whole"


def test_figures_of_a_run_with_and_without_deployment(deployed_runs):
    names = [plot.name for plot in learning(deployed_runs["first-order"])]
    assert names == ["learning", "few-shot", "rollouts"]
    assert [plot.name for plot in learning(replace(deployed_runs["first-order"], deployment=None))] == ["learning"]


def test_theory_claims_fail_for_other_exponents_and_violated_bounds(theory_study):
    study = STUDIES["theory"]
    assert all(claim.met for claim in study.claims(theory_study))
    assert len(study.claims(theory_study)) == 17
    steep = theory_study.bias["nothing"]._replace(y=theory_study.bias["nothing"].y ** 1.1)
    above = theory_study.drift | {"way": theory_study.drift["bound"]._replace(y=theory_study.drift["bound"].y * 1.01)}
    worse = theory_study._replace(
        bias=theory_study.bias | {"nothing": steep},
        drift=above,
        realized=[*theory_study.realized, RealizedBound("loose", "G", "Lemma 1", 1.0, 1.1)],
        witness=[Agreement("theta*", -0.5, -0.5000001)],
    )
    missed = [claim.claim for claim in study.claims(worse) if not claim.met]
    assert missed == [
        "power of m_in in the bias (Prop. 1)",
        "client drift (Lemma 4) within its bound",
        "realized constants within their bounds",
        "numbers of the witness that agree in all digits",
    ]


def test_titles_of_exact_figures_mention_no_seeds(theory_study):
    plots = {plot.name: plot for plot in STUDIES["theory"].figures(theory_study)}
    assert static.draw(plots["theory-bias"]).axes[0].get_title() == plots["theory-bias"].title
    assert static.draw(plots["theory-bias"]).axes[0].get_yscale() == "log"
    assert "5 seeds" in static.draw(plots["theory-convergence"]).axes[0].get_title()
    assert static.draw(plots["theory-realized"]).axes[0].get_xscale() == "log"
