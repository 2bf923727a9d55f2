"""The diagnosis of fleets: verdicts from given returns, exact and trained fleets, saved parts, and bad input."""

from dataclasses import replace

import numpy as np
import pytest

import perfedrl as pf
from perfedrl.envs import bandits, cart_pole, classification, random_mdps
from perfedrl.experiments.config import parse_config
from perfedrl.policies import MLPSoftmax, TableSoftmax
from perfedrl.studies.diagnosis import Diagnosis, FleetReturns, Verdict, diagnose
from perfedrl.studies.diagnosis import diagnosis as module
from perfedrl.studies.diagnosis.fleet_limits import trained_limits
from perfedrl.studies.diagnosis.recommendation import advice, answer, config_tables
from perfedrl.studies.diagnosis.tables import content, diagnosis_page, figures
from perfedrl.studies.diagnosis.training import Training
from perfedrl.studies.diagnosis.verdict import CLUSTERS, FINE_TUNING, ONE_STEP, SHARED

STEPS = {"alpha": 1.0, "beta": 1.0}


def made_up(
    own=2.0, shared=1.0, adapted=(1.2, 1.7, 1.9), tuned=(1.0, 1.2, 1.4), groups=((0,), (1,), (2,), (3,)), exact=False
):
    """Returns of four agents: 0 untrained, `own` by the policy of an agent in the same group, 0 by others."""
    n, rows = 4, 1 if exact else 3
    transfer = np.zeros((rows, n, n))
    for group in groups:
        transfer[:, np.ix_(group, group)[0], np.ix_(group, group)[1]] = own
    noise = np.zeros((rows, 1)) if exact else np.asarray([[-0.01], [0.0], [0.01]])
    return FleetReturns(
        untrained=np.zeros((3, n)),
        shared=np.full((rows, n), shared) + noise,
        own=np.full((rows, n), own),
        transfer=transfer,
        budgets=np.asarray([20, 50, 200]),
        adapted=np.tile(np.asarray(adapted)[None, :, None], (3, 1, n)),
        tuned=np.tile(np.asarray(tuned)[None, :, None], (3, 1, n)),
        spent=np.asarray([0, 100, 200]),
        alone=np.tile(np.asarray([0.0, 1.5, 1.95])[None, :, None], (3, 1, n)),
        exact=exact,
    )


def diagnosis(returns, steps=None):
    return Diagnosis("made-up", Verdict(returns), ("0", "1", "2", "3"), 4, 200, 3, steps)


@pytest.mark.parametrize("exact", [False, True])
def test_gains_are_differences_of_mean_returns(exact):
    verdict = Verdict(made_up(exact=exact))
    assert verdict.scale == 2.0
    assert verdict.gain.mean == pytest.approx(1.0)
    assert (verdict.gain.low == verdict.gain.high) == exact
    assert [gain.mean for gain in verdict.step_gains.values()] == pytest.approx([0.2, 0.7, 0.9])
    assert list(verdict.closed.values()) == pytest.approx([0.2, 0.7, 0.9])
    assert verdict.alone_from == {20: 100, 50: 200, 200: 200}
    falls_back = replace(made_up(), alone=np.tile(np.asarray([1.9, 0.0, 1.95])[None, :, None], (3, 1, 4)))
    assert Verdict(falls_back).alone_from[20] == 200, "ahead from then on"
    assert Verdict(made_up(adapted=(1.0, 1.0, 1.99))).alone_from[200] is None


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        (made_up(shared=2.0), SHARED),
        (made_up(shared=1.95), SHARED),
        (made_up(), ONE_STEP),
        (made_up(adapted=(1.0, 1.1, 1.2)), FINE_TUNING),
        (made_up(adapted=(1.0, 1.1, 1.2), groups=((0, 2), (1, 3))), CLUSTERS),
        (made_up(groups=((0, 2), (1, 3))), ONE_STEP),
        (made_up(tuned=(1.7, 1.8, 1.9)), FINE_TUNING),
        (made_up(tuned=(1.7, 1.8, 1.9), groups=((0, 2), (1, 3))), CLUSTERS),
    ],
)
def test_the_recommendation_follows_from_the_gains(returns, expected):
    found = diagnosis(returns)
    assert found.verdict.recommendation == expected
    assert found.verdict.needed == (expected != SHARED)
    assert answer(found).startswith("yes" if expected != SHARED else "no")
    assert advice(found)


def test_agents_that_one_policy_serves_form_groups():
    assert Verdict(made_up(groups=((0, 3), (1, 2)))).groups == [[0, 3], [1, 2]]
    assert Verdict(made_up()).groups == [[0, 1, 2, 3]], "as many groups as agents are none"
    assert Verdict(made_up(groups=((0, 1, 2, 3),))).groups == [[0, 1, 2, 3]]
    assert Verdict(made_up(shared=2.0, groups=((0, 3), (1, 2)))).groups == [[0, 1, 2, 3]], "not needed"
    assert Verdict(made_up(groups=((0, 1, 2), (3,)))).groups == [[0, 1, 2, 3]], "one agent is no group"
    losses = Verdict(made_up(groups=((0, 3), (1, 2)))).losses
    np.testing.assert_array_equal(losses, [[0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0]])
    idle = made_up()
    idle.untrained[:, 0] = 2.0 - 1e-9
    assert Verdict(replace(idle, transfer=idle.transfer - 1e-6 * (1 - np.eye(4)))).losses[1, 0] == 1
    near = replace(idle, transfer=np.where(np.eye(4, dtype=bool), 2.0, 2.0 - 1e-6)[None].repeat(3, axis=0))
    assert Verdict(near).losses[1, 0] < 1e-4, "noise is no loss to an agent that has nothing to learn"


def test_the_best_policy_of_an_agent_is_chosen_by_other_episodes_than_those_that_measure_it():
    """Agent 0 is best served by agent 1's policy; its own lucky measurement does not count."""
    shared = {"measured": np.asarray([[9.0, 0.0]]), "chosen by": np.asarray([[0.0, 0.0]])}
    zero = {
        "measured from scratch": np.asarray([[8.0, 0.0]]),
        "chosen by from scratch": np.asarray([[1.0, 0.0]]),
        "measured from shared": np.asarray([[2.5, 0.0]]),
        "chosen by from shared": np.asarray([[2.0, 0.0]]),
    }
    one = {key: np.asarray([[4.0, 5.0]]) for key in zero}
    found = trained_limits(shared, [zero, one])
    np.testing.assert_array_equal(found["transfer"], [[[2.5, 0.0], [4.0, 5.0]]])
    np.testing.assert_array_equal(found["own"], [[4.0, 5.0]])
    np.testing.assert_array_equal(found["shared"], shared["measured"])


def small(heterogeneity, **more):
    fleet = random_mdps(agents=3, states=3, actions=3, heterogeneity=heterogeneity, reward_heterogeneity=heterogeneity)
    return diagnose(fleet, TableSoftmax(3, 3), **STEPS, **{"trajectories": 100, "seeds": 2, **more})


def test_equal_tabular_agents_need_no_personalization_and_different_ones_do():
    same, different = small(0.0), small(1.0)
    assert same.verdict.gain.mean == pytest.approx(0.0, abs=1e-12)
    assert not same.verdict.needed
    assert different.verdict.needed
    assert different.verdict.returns.exact
    assert different.chosen == "all 3 agents"


def test_finished_parts_are_read_and_not_made_again(tmp_path, monkeypatch):
    first = small(1.0, folder=tmp_path)

    def fail(_self):
        raise AssertionError("made again")

    for part in ("untrained", "initialization", "fine_tuning", "alone"):
        monkeypatch.setattr(Training, part, fail)
    again = small(1.0, folder=tmp_path)
    np.testing.assert_array_equal(first.verdict.returns.adapted, again.verdict.returns.adapted)
    (tmp_path / "alone.npz").unlink()
    with pytest.raises(AssertionError, match="made again"):
        small(1.0, folder=tmp_path)
    with pytest.raises(AssertionError, match="made again"):
        small(1.0, folder=tmp_path, restart=True)


def test_parts_of_another_fleet_or_of_other_settings_are_not_read(tmp_path):
    small(1.0, folder=tmp_path)
    for other, settings in ((0.0, {}), (1.0, {"seeds": 3})):
        with pytest.raises(pf.UserError, match="another fleet or of other settings"):
            small(other, folder=tmp_path, **settings)


def test_agents_that_cannot_be_measured_are_named(monkeypatch):
    returns = made_up(exact=True)
    missing = {name: np.where(np.arange(4) == 2, np.nan, getattr(returns, name)) for name in ("shared", "own")}
    monkeypatch.setattr(module, "exact_parts", lambda *_: {"untrained": returns.untrained, **missing})
    with pytest.raises(pf.UserError, match="agents 2 of those that were chosen could not be measured"):
        small(1.0)


@pytest.mark.slow
def test_poles_of_different_lengths_are_trained_and_need_no_policies_of_their_own():
    fleet = cart_pole(agents=3, held_out=0, seed=0, horizon=99)
    found = diagnose(fleet, MLPSoftmax((4, 16, 2)), trajectories=800, seeds=2)
    assert not found.verdict.returns.exact
    assert not found.verdict.needed
    assert found.verdict.returns.own.mean() > 2 * found.verdict.returns.untrained.mean()


@pytest.mark.slow
def test_different_goals_need_policies_of_their_own():
    found = diagnose(
        pf.arc(goals=3, held_out=0, radius=0.8, span=0.5), MLPSoftmax((2, 16, 8)), trajectories=800, seeds=2
    )
    assert found.verdict.needed


def test_a_fleet_that_cannot_be_diagnosed_is_rejected(untyped):
    policy = TableSoftmax(3, 3)
    for fleet, settings, reason in (
        (random_mdps(agents=1, states=3, actions=3), STEPS, "this fleet has one"),
        (random_mdps(agents=2, states=3, actions=3), {}, "set alpha and beta"),
        (random_mdps(agents=2, states=3, actions=3), {**STEPS, "seeds": 1}, "seeds must be a whole number from 2"),
        (
            random_mdps(agents=2, states=3, actions=3),
            {**STEPS, "trajectories": 10},
            "trajectories must be a whole number",
        ),
        (random_mdps(agents=2, states=3, actions=3), {**STEPS, "agents": 2.5}, "agents must be a whole number from 2"),
        (cart_pole(agents=2), {}, "does not fit the fleet"),
        (classification(agents=2), STEPS, "these have examples"),
    ):
        with pytest.raises(pf.UserError, match=reason):
            diagnose(fleet, policy, **settings)


TABULAR = {"fleet": {"env": "random-mdps", "agents": 2}, "policy": {"name": "table"}}
CONTROL = {"fleet": {"env": "cart-pole", "agents": 2}, "policy": {"name": "mlp"}}


@pytest.mark.parametrize("adapted", [(1.2, 1.7, 1.9), (1.0, 1.1, 1.2)])
@pytest.mark.parametrize("shared", [1.0, 2.0])
@pytest.mark.parametrize("groups", [((0,), (1,), (2,), (3,)), ((0, 1), (2, 3))])
@pytest.mark.parametrize("steps", [None, (1.0, 0.5)])
def test_the_recommended_tables_make_a_config(adapted, shared, groups, steps):
    found = diagnosis(made_up(adapted=adapted, shared=shared, groups=groups), steps)
    parts = CONTROL if steps is None else TABULAR
    config = parse_config({"name": "x", "seeds": 1, "rounds": 1, **parts, **config_tables(found)})
    assert config.experiment.algorithm is not None
    assert content(found)["config"] == config_tables(found)


def test_figures_and_page_show_every_agent():
    found = diagnosis(made_up(adapted=(1.0, 1.1, 1.2), groups=((0, 2), (1, 3))))
    losses, own = figures(found)
    assert losses.labels == ("0", "2", "1", "3")
    assert losses.groups == (2, 2)
    np.testing.assert_array_equal(losses.values, np.kron([[0, 1], [1, 0]], np.ones((2, 2))))
    assert [series.label for series in own.series][1] == "worst agent of these"
    report = diagnosis_page(found, "perfedrl diagnose x.toml")
    assert len(report.tables[1].rows) == 4
    assert "2 initializations" in report.summary


def test_at_most_so_many_agents_are_looked_at(monkeypatch):
    exact = made_up(exact=True)
    parts = {name: getattr(exact, name) for name in ("untrained", "shared", "own")}
    monkeypatch.setattr(module, "exact_parts", lambda *_: parts)
    monkeypatch.setattr(module, "FleetReturns", lambda **_: exact)
    found = diagnose(bandits([[0.0, 1.0]] * 9), TableSoftmax(1, 2), **STEPS, agents=4)
    assert found.chosen == "4 of 9 agents, evenly chosen"


def test_agents_with_exact_returns_are_measured_after_a_training_that_left_them_out():
    fleet = random_mdps(agents=6, states=3, actions=2, heterogeneity=1.0, reward_heterogeneity=1.0)
    training = Training(fleet, TableSoftmax(3, 2), range(2), 40, (4,), 10, (1.0, 1.0))
    parts = training.leaving_out()
    assert [left_out for left_out, _ in parts] == [[0, 4], [1, 5], [2], [3]]
    for left_out, one in parts:
        assert (one.fleet.agents, one.fleet.held_out_agents) == (6 - len(left_out), len(left_out))
        for i, agent in enumerate(left_out):
            np.testing.assert_array_equal(one.fleet.task(i, held_out=True).r, fleet.task(agent).r)
            rewards = np.asarray(one.fleet.train.r)
            assert not (rewards == np.asarray(fleet.task(agent).r)).all(axis=tuple(range(1, rewards.ndim))).any()
    few = replace(training, fleet=random_mdps(agents=3, states=3, actions=2))
    assert [left_out for left_out, _ in few.leaving_out()] == [[0], [1], [2]]


def test_returns_of_agents_that_were_left_out_are_in_the_order_of_the_fleet(monkeypatch):
    """Every agent's return is its number; the second draw, by which settings are chosen, prefers the second setting."""
    fleet = random_mdps(agents=6, states=3, actions=2, heterogeneity=1.0, reward_heterogeneity=1.0)
    training = Training(fleet, TableSoftmax(3, 2), range(2), 40, (4,), 10, (1.0, 1.0))
    numbers = {np.asarray(fleet.task(i).r).tobytes(): i for i in range(6)}

    def numbered(self, algorithm, rounds):
        tasks = [self.fleet.task(i, held_out=True) for i in range(self.fleet.held_out_agents)]
        drawn = np.asarray([float(numbers[np.asarray(task.r).tobytes()]) for task in tasks])
        return [np.tile(drawn + 10 * algorithm.alpha, (2, 1, 1)), np.full((2, 1, len(tasks)), algorithm.alpha)]

    monkeypatch.setattr(Training, "adapted", numbered)
    found = training.best_adapted([pf.PerFedAvgPG(1.0, 1.0), pf.PerFedAvgPG(2.0, 1.0)])
    np.testing.assert_array_equal(found, np.tile(20.0 + np.arange(6), (2, 1, 1)))
