"""Comparisons: equal budgets, tuning on other agents and seeds than the tested ones, reproducible results."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from tiers import some_slow

from perfedrl.algorithms import ALGORITHMS
from perfedrl.errors import UserError
from perfedrl.experiments.stats import critical_difference, mean_ranks
from perfedrl.studies.compare import METHODS, Comparison, ComparisonPlan, Trial, compare, load_plans
from perfedrl.studies.compare import figures as compare_figures
from perfedrl.studies.compare import tables as compare_tables
from perfedrl.studies.compare.comparison import Entry, decoded, encoded
from perfedrl.studies.compare.page import comparisons_page
from perfedrl.studies.compare.plan import common_agents
from perfedrl.studies.compare.tuning import best, draws, search

PLANS = Path(__file__).parents[2] / "configs" / "compare"
RESULTS = Path(__file__).parents[2] / "results" / "compare"

SMALL = """
name = "small"
seeds = 2
rounds = 2
evaluations = 2
budget = 30
trials = 2
tuning_seeds = [1000]
methods = ["first-order", "fedavg-pg", "local-pg", "from-scratch"]

[search]
alpha = [0.1, 1.0]
beta = [0.1, 1.0]

[fleet]
env = "gridworld"
width = 3
horizon = 4
goals = [[0, 0], [0, 2]]
held_out = [[1, 1]]

[tuning]
goals = [[2, 0], [2, 2]]
held_out = [[1, 2]]

[policy]
name = "table"

[evaluation]
name = "exact"
trajectories = 10
few_shot = [0, 5]
"""


@functools.cache
def plans(stem):
    """The committed plans of a file, loaded once since checking is slow."""
    return load_plans(PLANS / f"{stem}.toml")


STEMS = sorted(path.stem for path in PLANS.glob("*.toml"))


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    (plan,) = load_plans(tmp_path / "small.toml")
    return plan


def changed(tmp_path, *changes):
    text = SMALL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "changed.toml").write_text(text)
    return load_plans(tmp_path / "changed.toml")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The small comparison, run once."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "small.toml").write_text(SMALL)
    (plan,) = load_plans(folder / "small.toml")
    return folder, compare(plan, folder / "results", folder / "runs", compile_cache=False)


@pytest.mark.parametrize("stem", some_slow(STEMS, ["gridworld"]))
def test_every_method_spends_the_budget_of_the_plan(stem):
    """Up to the rounding of batch sizes; from-scratch trains nothing."""
    plan = plans(stem)[0]
    assert len(plan.entrants) + len(plan.unfit) == len(METHODS)
    for name, method in plan.entrants.items():
        settings = {key: low for key, (low, _) in plan.ranges(method).items() if "." not in key}
        made = ALGORITHMS[method.algorithm](**method.fixed, **method.split(plan.budget, plan.local_steps), **settings)
        spent = made.trajectories_after(plan.rounds) / plan.rounds
        assert spent == 0 if name == "from-scratch" else 0.9 * plan.budget <= spent <= plan.budget, name


def test_every_method_tries_equally_many_settings_within_its_ranges(small):
    for name, method in small.entrants.items():
        tried = draws(small, name)
        assert len(tried) == small.trials
        assert tried == draws(small, name), "drawn from a seed"
        for settings in tried:
            assert set(settings) == set(small.ranges(method))
            assert all(low * 0.99 <= settings[k] <= high * 1.01 for k, (low, high) in small.ranges(method).items())


def test_tuning_agents_and_seeds_are_not_tested(small):
    middle = small._middle(METHODS["first-order"])
    test, tuning = (small.config("first-order", middle, tuning) for tuning in (False, True))
    assert common_agents(test.experiment.fleet, tuning.experiment.fleet) == 0
    assert common_agents(test.experiment.fleet, test.experiment.fleet) == 3, "common agents are found"
    assert not set(test.seeds) & set(tuning.seeds)


def test_a_saved_comparison_is_read_bitwise_without_training(made):
    folder, found = made
    again = compare(found.plan, folder / "results", folder / "nowhere", saved=True)
    assert not (folder / "nowhere").exists()
    for name, entry in found.entries.items():
        assert encoded(entry) == encoded(again.entries[name])


def test_a_missing_result_is_computed_again_with_the_same_numbers(made):
    folder, found = made
    path = folder / "results" / found.plan.folder / "fedavg-pg.json"
    before = path.read_bytes()
    path.unlink()
    compare(found.plan, folder / "results", folder / "anew", only=["fedavg-pg"], compile_cache=False)
    timeless = lambda content: {k: v for k, v in json.loads(content).items() if k != "made"}  # noqa: E731
    assert timeless(path.read_bytes()) == timeless(before)


def test_measures_are_computed_from_the_run(made):
    _, found = made
    entry = found.entries["first-order"]
    assert entry.settings == best(entry.trials).settings
    measures = found.measures("first-order")
    assert set(measures) == {
        *("training", "worst agent", "unseen, 0", "unseen, 5", "curve by trajectories", "curve by bytes"),
        "gap to the optimum",
    }
    np.testing.assert_allclose(measures["gap to the optimum"], found.optimum - measures["training"])
    assert (measures["worst agent"] <= measures["training"]).all()
    assert "unseen, 5" not in found.measures("local-pg"), "it serves no unseen agents"
    assert np.isnan(found.measures("local-pg")["curve by bytes"]).all(), "it sends nothing"


def by_hand(name, after, trajectories, cost):
    """An entry of two evaluations."""
    after = np.asarray(after, float)
    return Entry(
        *(
            name,
            [Trial({}, 0.0)],
            {"alpha": 1.0, "beta": 1.0},
            np.asarray(trajectories, float),
            np.asarray(cost, float),
            after,
        ),
        *(after[:, -1], np.zeros(0), np.zeros((len(after), 0)), {}),
    )


def test_the_height_of_a_curve_is_its_mean_up_to_a_common_cost(small):
    steep = by_hand("first-order", [[0.0, 4.0]], [0, 100], [0, 1000])
    slow = by_hand("fedavg-pg", [[0.0, 4.0]], [0, 200], [0, 1000])
    found = Comparison(small, {"first-order": steep, "fedavg-pg": slow})
    assert found.height(steep, "trajectories") == pytest.approx(2.0), "to 100: half of 4"
    assert found.height(slow, "trajectories") == pytest.approx(1.0), "it is at 2 there"
    assert found.height(slow, "bytes") == pytest.approx(2.0)


def test_a_diverged_method_is_saved_and_read_as_diverged(tmp_path):
    nan = by_hand("first-order", [[np.nan, np.nan]], [0, 1], [0, 1])
    path = tmp_path / "x.json"
    path.write_bytes(encoded(nan))
    assert decoded(path).diverged
    path.write_text("{")
    with pytest.raises(UserError, match="damaged"):
        decoded(path)


def test_ranks_and_their_critical_difference():
    values = np.asarray([[3.0, 2.0, 1.0], [3.0, 1.0, 1.0], [1.0, 2.0, np.nan]])
    np.testing.assert_allclose(mean_ranks(values), [(1 + 1 + 2) / 3, (2 + 2.5 + 1) / 3, (3 + 2.5 + 3) / 3])
    # Demsar (2006), table 5: q_0.05 of 5 and of 10 methods is 2.728 and 3.164.
    for methods, q in ((5, 2.728), (10, 3.164)):
        expected = q * np.sqrt(methods * (methods + 1) / (6 * 30))
        assert critical_difference(methods, 30) == pytest.approx(expected, rel=1e-3)


def test_the_page_names_the_best_method_and_the_tuning(made):
    _, found = made
    report = comparisons_page([found], "perfedrl compare small.toml")
    means = {name: found.measures(name)["training"].mean() for name in found.entries}
    assert METHODS[max(means, key=means.get)].title in report.summary
    titles = [table.title for table in report.tables]
    assert {"small: results", "small: tuning and cost"} <= set(titles)
    assert {plot.name for plot in report.plots} >= {"compare-small-ranks-training", "compare-small-training"}
    assert len(compare_tables.terminal(found).rows) == 4
    assert compare_figures.color("fedavg-pg") != compare_figures.color("first-order")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ([("budget = 30", "budget = 5")], "too small for one local step .* the least that works is 10"),
        ([("goals = [[2, 0], [2, 2]]", ""), ("held_out = [[1, 2]]", "")], r"the table \[tuning\] is empty"),
        ([("goals = [[2, 0], [2, 2]]", "goals = [[0, 0], [2, 2]]")], "has 1 of the agents that are tested"),
        ([("tuning_seeds = [1000]", "tuning_seeds = [1]")], "none of them a test seed"),
        ([('"first-order", ', '"fist-order", ')], "no method 'fist-order'"),
        ([('"first-order", ', '"shared-representation", ')], "needs a policy with a hidden layer.*'mixing'"),
        ([("alpha = [0.1, 1.0]\n", "")], r"\[search\] needs alpha"),
        ([("beta = [0.1, 1.0]", "beta = [1.0, 0.1]")], "0 < low <= high"),
        ([("seeds = 2\n", "seeds = 2\nbudgt = 3\n")], "unknown key 'budgt'"),
        ([("beta = [0.1, 1.0]", "beta = [0.1, 1.0]\nbta = [1, 2]")], "and no others; it has alpha, beta, bta"),
        ([("budget = 30", "budget = 30\nlocal_steps = 100000000")], "local_steps"),
        ([("[search]", '[levels]\ndiscount = ["a"]\n\n[search]')], r"the first list of \[levels\] must be of numbers"),
        ([("[search]", "[levels]\ndiscount = []\n\n[search]")], "lists of one length"),
    ],
)
def test_invalid_plans_are_refused_before_any_run(tmp_path, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        changed(tmp_path, *changes)


@pytest.mark.slow
def test_each_level_makes_a_comparison(tmp_path):
    found = changed(tmp_path, ("[search]", "[levels]\ndiscount = [0.5, 0.9]\n\n[search]"))
    assert [plan.name for plan in found] == ["small-0.5", "small-0.9"]
    assert [plan.fleet["discount"] for plan in found] == [0.5, 0.9]
    with pytest.raises(UserError, match="lists of one length"):
        changed(tmp_path, ("[search]", "[levels]\ndiscount = [0.5, 0.9]\nhorizon = [3]\n\n[search]"))


def test_only_methods_of_the_plan_can_be_selected(small, tmp_path):
    with pytest.raises(UserError, match="'sg-mrl' does not take part"):
        compare(small, tmp_path, tmp_path, only=["sg-mrl"])
    with pytest.raises(UserError, match="without --saved"):
        compare(small, tmp_path, tmp_path, saved=True)


@pytest.mark.slow
def test_committed_results_match_the_committed_plans():
    """Each plan has a result of every method that works with its fleet, tuned with equally many trials."""
    every = [plan for stem in STEMS for plan in plans(stem)]
    assert {plan.folder for plan in every} == {path.name for path in RESULTS.iterdir() if path.is_dir()}
    for plan in every:
        found = compare(plan, RESULTS, saved=True)
        assert set(found.entries) == set(plan.entrants)
        for entry in found.entries.values():
            assert [trial.settings for trial in entry.trials] == draws(plan, entry.method)
            scores = {str(trial.settings): trial.score for trial in entry.trials}  # of four digits: some are equal
            assert scores[str(entry.settings)] == max(scores.values())
            assert entry.after.shape[0] == plan.seeds


def test_the_digest_of_a_plan_does_not_depend_on_its_methods(small):
    fewer = ComparisonPlan.model_validate({**small.model_dump(), "methods": ("fedavg-pg",)})
    longer = ComparisonPlan.model_validate({**small.model_dump(), "rounds": 3})
    assert fewer.folder == small.folder != longer.folder


@pytest.mark.slow
def test_the_tables_of_the_document_match_the_committed_results():
    page = (PLANS.parent.parent / "docs" / "comparison.md").read_text().splitlines()
    every = [plan for stem in ("gridworld", "arc", "cart_poles", "random_mdps") for plan in plans(stem)]
    found = [compare(plan, RESULTS, saved=True) for plan in every]
    for measure in ("training", "unseen, 50"):
        for line in compare_tables.lines(found, measure):
            assert line in page


@pytest.mark.slow
def test_incompatible_settings_score_as_diverged_ones(tmp_path):
    """FedNPG's largest step size depends on the entropy, and some draws exceed it."""
    wide = ("beta = [0.1, 1.0]", "beta = [5.0, 5.5]"), ("trials = 2", "trials = 6")
    (plan,) = changed(tmp_path, ('"first-order", ', '"fednpg", '), *wide)
    trials = search(plan, "fednpg", [])
    refused = [trial.settings["beta"] > 0.1 / trial.settings["entropy"] for trial in trials]
    assert 0 < sum(refused) < len(trials)
    assert [trial.score == -np.inf for trial in trials] == refused


def test_a_result_of_another_version_of_a_method_is_refused(made):
    folder, found = made
    path = folder / "results" / found.plan.folder / "local-pg.json"
    before = path.read_text()
    content = json.loads(before)
    content["made"]["run"] = content["made"]["run"].replace("small-", "other-")
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="of another version of local-pg"):
        compare(found.plan, folder / "results", saved=True)
    path.write_text(before)


def test_diverged_methods_are_ranked_last_and_not_drawn(made):
    _, found = made
    lost = by_hand("first-order", [[np.nan, np.nan]] * 2, [0, 1], [0, 1])
    plan = found.plan.model_copy(update={"methods": ("first-order",)})
    none = Comparison(plan, {"first-order": lost})
    assert compare_tables.winners([none], "training") == []
    assert compare_figures.details(none) == []
    both = compare_tables.measured(Comparison(found.plan, {**found.entries, "first-order": lost}))
    assert compare_figures.relative_rank(both, "first-order") == 1.0
