"""What following a diagnosis costs: regrets by hand, and those of the committed comparisons on their page."""

import json
from pathlib import Path

import numpy as np
import pytest

from perfedrl.studies.compare import Entry, load_plans
from perfedrl.studies.diagnosis.agreement import FILE, METHOD_OF, read_entries, regret, regrets
from perfedrl.studies.diagnosis.verdict import CLUSTERS, FINE_TUNING, NEGLIGIBLE, ONE_STEP, SHARED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "compare"


def entry(method, unseen, training=0.0, untrained=1.0, noise=(0.0, 0.0)):
    """A method with two seeds: unseen agents get `unseen` from 20 and from 200 trajectories in the mean."""
    held_out = np.asarray([[untrained, unseen - 0.5 + x, unseen + 0.5 + x] for x in noise])
    after = np.asarray([[0.0, training + x] for x in noise])
    costs = np.zeros(2), np.zeros(2)
    return Entry(method, [], {}, *costs, after, np.zeros(2), np.asarray([0.0, 20.0, 200.0]), held_out, {})


def entries(*made):
    """Entries by method; the local training serves no unseen agents."""
    local = entry("local-pg", np.nan, training=9.0)
    return {one.method: one for one in (*made, entry("from-scratch", 2.0, training=2.0), local)}


def test_a_regret_is_a_share_of_what_learning_is_worth():
    """The best has 5, the untrained policy 1; what was recommended has 4.9, 4.7 and 3: 2.5, 7.5 and 50 % are lost."""
    found = entries(entry("clustered", 5.0), entry("fine-tuned", 4.9), entry("first-order", 4.7), entry("fedavg-pg", 3))
    lost = {what: regret(found, what) for what in METHOD_OF}
    assert {one.best for one in lost.values()} == {"clustered"}
    assert {what: one.lost.mean for what, one in lost.items()} == pytest.approx(
        {CLUSTERS: 0.0, FINE_TUNING: 0.025, ONE_STEP: 0.075, SHARED: 0.5}
    )
    assert {what for what, one in lost.items() if one.right} == {CLUSTERS, FINE_TUNING}


def test_a_loss_within_the_interval_of_seeds_is_none():
    """Differences paired by seed: 0 and 0.8 of 4 have a mean of 10 % and an interval that holds 0."""
    found = entries(entry("clustered", 5.0), entry("fine-tuned", 4.6, noise=(0.4, -0.4)))
    measured = regret(found, FINE_TUNING)
    assert measured.lost.mean == pytest.approx(0.1)
    assert measured.lost.mean > NEGLIGIBLE
    assert measured.lost.low < 0
    assert measured.right
    alike = entries(entry("clustered", 5.0, noise=(0.4, -0.4)), entry("fine-tuned", 4.6, noise=(0.4, -0.4)))
    assert not regret(alike, FINE_TUNING).right, "the same noise in both does not hide a loss"


def test_training_agents_have_a_best_method_of_their_own():
    found = entries(entry("clustered", 5.0, training=5.0), entry("fine-tuned", 4.0, training=8.0))
    measured = regret(found, FINE_TUNING, training=True)
    assert (measured.best, measured.lost.mean) == ("local-pg", pytest.approx(1 / 8))


def test_the_best_may_be_sought_among_some_methods():
    found = entries(entry("mixing", 5.0), entry("fine-tuned", 4.0), entry("clustered", 3.0))
    assert regret(found, FINE_TUNING).best == "mixing"
    assert regret(found, FINE_TUNING, among=METHOD_OF.values()).best == "fine-tuned"


def test_methods_that_diverged_are_not_the_best():
    found = entries(entry("clustered", np.nan), entry("fine-tuned", 4.0))
    assert regret(found, FINE_TUNING).best == "fine-tuned"


@pytest.fixture(scope="module")
def plans():
    return [plan for path in sorted((ROOT / "configs" / "compare").glob("*.toml")) for plan in load_plans(path)]


def test_the_page_has_the_regrets_of_the_committed_comparisons(plans):
    page = (ROOT / "docs" / "diagnosis.md").read_text()
    recommended = json.loads((RESULTS / FILE).read_text())
    assert set(recommended) == {plan.name for plan in plans}
    found = {x: regrets(plans, RESULTS, training=x) for x in (False, True)}
    for plan in plans:
        one, other = (found[x][plan.name] for x in (False, True))
        assert one.method == METHOD_OF[recommended[plan.name]["recommendation"]]
        cells = (cell for x in (one, other) for cell in (x.best, said(x.lost), "yes" if x.right else "no"))
        assert f"| {plan.name} | {one.method} | {' | '.join(cells)} |" in page
    counts = [sum(x.right for x in found[training].values()) for training in (False, True)]
    assert f"right on {counts[0]} of {len(plans)} fleets for unseen agents, on {counts[1]} for training agents" in page
    strict = regrets(plans, RESULTS, among=METHOD_OF.values())
    assert f"the very best of the four on {sum(x.best == x.method for x in strict.values())}" in page


def said(lost):
    """A loss as the page has it."""
    return "{:.1f} % ({:.1f} .. {:.1f})".format(*(100 * x + 0.0 for x in lost))


def test_every_result_of_a_comparison_is_read(plans):
    found = read_entries(RESULTS / plans[0].folder)
    assert set(METHOD_OF.values()) <= set(found)
    assert all(name == one.method for name, one in found.items())
