"""Comparisons: equal budgets, tuning on other agents and seeds than the tested ones, reproducible results."""

import dataclasses
import functools
import importlib
import json
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiers import some_slow

from perfedrl.algorithms import ALGORITHMS
from perfedrl.errors import UserError
from perfedrl.experiments.stats import critical_difference, mean_ranks
from perfedrl.experiments.store import Run
from perfedrl.report import page
from perfedrl.simulation.history import History
from perfedrl.simulation.observers import Observer
from perfedrl.studies.compare import (
    METHODS,
    Comparison,
    ComparisonPlan,
    Trial,
    compare,
    comparison,
    find_method,
    load_plans,
)
from perfedrl.studies.compare import figures as compare_figures
from perfedrl.studies.compare import tables as compare_tables
from perfedrl.studies.compare.comparison import Entry, code_of, decoded, encoded, entry_of, is_current
from perfedrl.studies.compare.page import comparisons_page
from perfedrl.studies.compare.plan import common_agents
from perfedrl.studies.compare.tuning import best, draws, score, search

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
    assert found.origin == "results: 4 trained"
    assert again.origin.startswith("results: 4 read from disk (trained on 20")
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


def test_agents_that_could_not_be_measured_do_not_count(small):
    after = np.asarray([[[1.0, 3.0], [np.nan, 5.0]]])
    history = History(np.asarray([0]), *[np.asarray([0, 1])] * 3, after, after, *[np.zeros((1, 2, 0))] * 2, {})
    run = Run(Path("nowhere"), small.config("first-order", {"alpha": 0.5, "beta": 0.5}), history, None, {})
    entry = entry_of("first-order", [], {}, small, run, {})
    assert (entry.after.tolist(), entry.worst.tolist()) == ([[2.0, 5.0]], [5.0])
    assert not entry.diverged


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
    assert {"small: training agents", "small: unseen agents", "small: tuning and cost"} <= set(titles)
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


def test_a_result_from_before_a_change_of_own_code_is_made_again(tmp_path, monkeypatch):
    module = tmp_path / "rooms_for_test.py"
    module.write_text("from perfedrl.envs.gridworld import gridworld as rooms\n")
    monkeypatch.syspath_prepend(tmp_path)
    (plan,) = changed(tmp_path, ('env = "gridworld"', 'env = "rooms_for_test:rooms"'))
    entry = by_hand("first-order", [[0.0, 1.0]] * 2, [0, 1], [0, 1])
    path = tmp_path / "first-order.json"
    for name, current in (("now", True), ("before", False)):
        made = {"run": plan.config("first-order", entry.settings).folder if name == "now" else "small-first-order-0"}
        path.write_bytes(encoded(dataclasses.replace(entry, made=made)))
        assert is_current(plan, "first-order", path, saved=False) == current
    with pytest.raises(UserError, match="of another version of first-order"):
        is_current(plan, "first-order", path, saved=True)


def test_diverged_methods_are_ranked_last_and_not_drawn(made):
    _, found = made
    lost = by_hand("first-order", [[np.nan, np.nan]] * 2, [0, 1], [0, 1])
    plan = found.plan.model_copy(update={"methods": ("first-order",)})
    none = Comparison(plan, {"first-order": lost})
    assert compare_tables.winners([none], "training") == []
    assert compare_figures.details(none) == []
    both = compare_tables.measured(Comparison(found.plan, {**found.entries, "first-order": lost}))
    assert compare_figures.relative_rank(both, "first-order", "training") == 1.0


OWN = """
import equinox as eqx
from perfedrl.algorithms.base import AveragedParameters


class Mine(AveragedParameters):
    alpha: float
    beta: float
    weight: float = 0.5
    local_steps: int = eqx.field(static=True, default=2)
    m: int = eqx.field(static=True, default=10)

    @property
    def trajectories_per_round(self):
        return self.local_steps * self.m

    def client(self, message, state, agent, key):
        return message, state

    def personalize(self, message, state, agent, key, m):
        return message


class Needs(Mine):
    mu: float = eqx.field(kw_only=True)


number = 3
"""

OWN_METHOD = """
from perfedrl.studies.compare import Method


def split(budget, local_steps):
    return {"m": budget // local_steps, "local_steps": local_steps}


WHOLE = Method("mine, weighted", "own_for_test:Mine", split, {"alpha": 0.5}, ("beta",), {"weight": (0.1, 1.0)})
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Modules of a user's own beside the plan: a function that writes one anew."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write_module(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()

    write_module("own_for_test", OWN)
    write_module("own_method_for_test", OWN_METHOD)
    return write_module


def test_a_class_of_ones_own_is_compared_by_the_convention(own, tmp_path):
    (plan,) = changed(
        tmp_path, ('methods = ["first-order", ', 'methods = ["own_for_test:Mine", "own_method_for_test:WHOLE", ')
    )
    by_class, by_itself = plan.entrants["own_for_test:Mine"], plan.entrants["own_method_for_test:WHOLE"]
    assert by_class.split(30, 5) == {"local_steps": 5, "m": 6}
    assert plan.ranges(by_class) == {"alpha": (0.1, 1.0), "beta": (0.1, 1.0)}
    assert plan.ranges(by_itself) == {"beta": (0.1, 1.0), "weight": (0.1, 1.0)}
    config = plan.config("own_method_for_test:WHOLE", {"beta": 0.2, "weight": 0.3})
    assert config.experiment.algorithm.trajectories_per_round == plan.budget
    assert config.folder.startswith("small-own_method_for_test.WHOLE-")
    assert config.algorithm["weight"] == 0.3
    assert compare_figures.color("own_for_test:Mine") not in map(compare_figures.color, METHODS)


def test_equal_batches_are_as_large_as_the_budget_allows():
    split = find_method("perfedrl.algorithms:PerFedAvgPG").split
    exact = {"local_steps": 5, "m_in": 10, "m_h": 10, "m_out": 10}
    assert split(150, 5) == exact == split(164, 5)
    assert split(14, 5)["m_in"] == 0, "too small, which the plan refuses with the least that works"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own_for_test:Nobody", "cannot be imported"),
        ("nowhere_for_test:Mine", "cannot be imported: No module named 'nowhere_for_test'"),
        ("own_syntax_for_test:Mine", r"cannot be imported: SyntaxError: .*own_syntax_for_test.py, line 1"),
        ("own_for_test:number", "must be a class that follows the algorithm contract, or a Method; it is a int"),
        ("own_for_test:Needs", "needs a value of 'mu': give it a default, or name a Method"),
    ],
)
def test_methods_of_ones_own_that_cannot_be_compared_are_refused(own, tmp_path, name, sentence):
    own("own_syntax_for_test", "def (:")
    with pytest.raises(UserError, match=sentence):
        changed(tmp_path, ('"first-order"', f'"{name}"'))


@pytest.mark.parametrize(
    ("name", "module", "text"),
    [
        ("own_for_test:Mine", "own_for_test", OWN.replace("0.5", "0.6")),
        ("own_method_for_test:WHOLE", "own_for_test", OWN + "# a comment"),
        ("own_method_for_test:WHOLE", "own_method_for_test", OWN_METHOD.replace("(0.1, 1.0)", "(0.1, 2.0)")),
    ],
)
def test_the_source_of_a_method_of_ones_own_is_part_of_its_result(own, tmp_path, name, module, text):
    """After a change of the class, or of a range of the `Method`, the result is of another version."""
    (plan,) = changed(tmp_path, ('"first-order"', f'"{name}"'))
    settings = draws(plan, name)[0]
    made = {"run": plan.config(name, settings).folder, "code": code_of(name)}
    entry = dataclasses.replace(by_hand(name, [[0.0, 1.0]] * 2, [0, 1], [0, 1]), settings=settings, made=made)
    path = tmp_path / "entry.json"
    path.write_bytes(encoded(entry))
    assert is_current(plan, name, path, saved=True)
    own(module, text)
    (plan,) = changed(tmp_path, ('"first-order"', f'"{name}"'))
    assert not is_current(plan, name, path, saved=False), "it is made again"
    with pytest.raises(UserError, match=r"of another version of .*; run the comparison without --saved"):
        is_current(plan, name, path, saved=True)


TABLES_METHOD = """
from perfedrl.studies.compare import Method


def split(budget, local_steps):
    return {"m": budget // local_steps, "local_steps": local_steps}


TABLES = {"server": {"optimizer": "adam"}}
RATED = Method("rated", "fedavg-pg", split, search={"server.rate": (0.1, 1.0)}, tables=TABLES)
"""


WITHOUT_SETTINGS = [
    ("own_for_test:Mine", OWN.replace("    alpha: float\n", "")),
    ("own_for_test:RATED", TABLES_METHOD.replace(', search={"server.rate": (0.1, 1.0)}, tables=TABLES', "")),
]
LOST = [(*changed, with_source) for changed in WITHOUT_SETTINGS for with_source in (True, False)]


@pytest.mark.parametrize(("name", "text", "with_source"), some_slow(LOST, [LOST[0], LOST[3]]))
def test_a_result_whose_settings_the_method_no_longer_has_is_made_again(
    own, tmp_path, monkeypatch, name, text, with_source
):
    """Also where no source is found whose change would tell."""
    if not with_source:
        monkeypatch.setattr(comparison, "code_of", lambda _: {})
    own("own_for_test", OWN if name.endswith("Mine") else TABLES_METHOD)
    (plan,) = changed(tmp_path, ('"first-order"', f'"{name}"'))
    settings = draws(plan, name)[0]
    made = {"run": plan.config(name, settings).folder, "code": comparison.code_of(name)}
    entry = dataclasses.replace(by_hand(name, [[0.0, 1.0]] * 2, [0, 1], [0, 1]), settings=settings, made=made)
    path = tmp_path / "entry.json"
    path.write_bytes(encoded(entry))
    assert is_current(plan, name, path, saved=True)
    own("own_for_test", text)
    (plan,) = changed(tmp_path, ('"first-order"', f'"{name}"'))
    assert not is_current(plan, name, path, saved=False)
    with pytest.raises(UserError, match=r"of another version of .*; run the comparison without --saved"):
        is_current(plan, name, path, saved=True)


def test_a_searched_setting_of_a_table_that_the_method_lacks_is_one_sentence(own, tmp_path):
    own("own_for_test", TABLES_METHOD.replace(", tables=TABLES", ""))
    with pytest.raises(UserError, match=r"own_for_test:RATED: the setting 'server.rate' needs a table 'server'"):
        changed(tmp_path, ('"first-order"', '"own_for_test:RATED"'))


def test_settings_with_which_every_played_agent_fails_score_as_diverged_ones(untyped):
    """Of played agents that fail only some of the time, those that were measured count."""
    after = np.asarray([[[1.0, 3.0]], [[np.nan, 5.0]], [[np.nan, np.nan]]])
    unseen = np.asarray([[[1.0], [3.0]], [[np.nan], [7.0]], [[np.nan], [np.nan]]])
    for traceable, expected in ((False, [2.0, 6.0, -np.inf]), (True, [2.0, -np.inf, -np.inf])):
        simulation = SimpleNamespace(
            fleet=SimpleNamespace(traceable=traceable, held_out=1),
            measure=lambda *_: SimpleNamespace(after=after),
            deploy=lambda *_: SimpleNamespace(outcomes={"return": unseen}),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert score(simulation, None, 1).tolist() == expected


def test_saved_results_are_shown_while_others_are_missing(made, tmp_path, run):
    folder, found = made
    results = tmp_path / "results" / found.plan.folder
    results.mkdir(parents=True)
    for name in ("first-order", "local-pg"):
        shutil.copy(folder / "results" / found.plan.folder / f"{name}.json", results)
    part = compare(found.plan, tmp_path / "results", saved=True)
    assert (set(part.entries), part.missing) == ({"first-order", "local-pg"}, ("fedavg-pg", "from-scratch"))
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "other.toml").write_text(SMALL.replace('name = "small"', 'name = "other"'))
    code, out, err = run("compare", "small.toml", "other.toml", "--saved", "--results", "results")
    assert code == 0
    assert "no results yet: fedavg-pg, from-scratch" in out
    assert "left out: results/other-" in err
    assert (tmp_path / "comparison.html").is_file()
    assert run("compare", "other.toml", "--saved", "--results", "results")[0] == 2


def test_a_plan_without_methods_is_a_mistake(run, tmp_path):
    (tmp_path / "none.toml").write_text("methods = []\n" + SMALL.replace("methods =", "# methods ="))
    code, _, err = run("compare", "none.toml")
    assert (code, "methods must name at least one method" in err) == (2, True)


def test_observers_are_told_which_method_of_how_many_is_next(small, tmp_path, monkeypatch):
    """Also after an interruption: results that are there count as done."""
    parts = []

    class Watcher(Observer):
        def on_part(self, part):
            parts.append(part)

    def enter(plan, name, runs, observers):
        settings = draws(plan, name)[0]
        made = {"run": plan.config(name, settings).folder}
        return dataclasses.replace(by_hand(name, [[0.0, 1.0]] * 2, [0, 1], [0, 1]), settings=settings, made=made)

    monkeypatch.setattr(comparison, "enter", enter)
    for only in (["fedavg-pg"], ()):
        compare(small, tmp_path, tmp_path, only=only, observers=[Watcher()], compile_cache=False)
    assert [(part.name, part.number, part.parts, part.waiting) for part in parts] == [
        ("fedavg-pg", 1, 1, 0),
        ("first-order", 2, 4, 2),
        ("local-pg", 3, 4, 1),
        ("from-scratch", 4, 4, 0),
    ]


def test_bars_of_ranks_stay_within_the_ranks(made):
    """Two seeds of four methods: the critical difference is wider than all ranks."""
    _, found = made
    for plot in compare_figures.summary([found]):
        assert "ranks" in plot.name
        assert all(1 <= line.low <= line.value <= line.high <= len(plot.ranges) for line in plot.ranges)


def test_the_overview_is_in_the_order_that_its_title_says(made):
    """By mean rank for unseen agents; methods that serve none are last, though they are the best in training."""
    _, found = made
    unseen = compare_tables.unseen_measure([found])
    assert unseen == "unseen, 5", "the largest budget, since the plan has none of 50"
    drawn = compare_figures.overview([found, found])
    assert "by mean rank for unseen agents" in drawn.title
    means = {name: found.measures(name)[unseen].mean() for name in found.entries if name != "local-pg"}
    expected = [*sorted(means, key=means.get, reverse=True), "local-pg"]
    assert drawn.labels == tuple(METHODS[name].title for name in expected)


def test_tables_of_the_page_have_few_columns(made):
    """Seven budgets of unseen agents make two tables."""
    _, found = made
    entry = found.entries["first-order"]
    many = dataclasses.replace(entry, budgets=np.arange(7.0), held_out=np.ones((2, 7)))
    alone = {"first-order": many, "local-pg": found.entries["local-pg"]}
    tables = compare_tables.results(Comparison(found.plan, alone))
    assert [len(table.header) - 1 for table in tables] == [5, 5, 2]
    assert [len(table.rows) for table in tables] == [2, 1, 1], "local-pg serves no unseen agents"


def test_in_a_browser_of_1200_pixels_tables_and_captions_fit(made, browser, tmp_path):
    """With the long table of methods that do not work with the fleet."""
    _, found = made
    plan = ComparisonPlan.model_validate({**found.plan.model_dump(), "methods": None})
    found = dataclasses.replace(found, plan=plan)
    report = comparisons_page([found], "perfedrl compare small.toml")
    assert "small: not compared" in [table.title for table in report.tables]
    path = page.write(report, tmp_path / "comparison.html")
    browser.set_window_size(1200, 1000)
    browser.get(path.as_uri())
    wide = "return [...document.querySelectorAll('.wide')].filter(x => x.scrollWidth > x.clientWidth).length"
    assert browser.execute_script(wide) == 0
    outside = """
        return [...document.querySelectorAll('figure')].flatMap(figure => {
            const box = figure.getBoundingClientRect();
            const texts = [...figure.querySelectorAll('text, figcaption, p')];
            return texts.filter(text => text.getBoundingClientRect().right > box.right + 1).map(x => x.textContent);
        });"""
    assert browser.execute_script(outside) == []
