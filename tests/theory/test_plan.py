"""The planner: conditions hold with the stated margins, costs scale as in the paper, and no plan is cheaper."""

from itertools import product
from math import ceil, inf, log, sqrt

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import perfedrl as pf
from perfedrl.theory import Constants, Given, Problem, cheapest, corollary_1, regime
from perfedrl.theory.plan import inner_batch

BANDIT = Constants(R_max=1.0, gamma=0.0, H=0, G=2.0, M=4.0, Lambda=8.0, alpha=1 / 16)


def fleet_problem(alpha=1 / 16, agents=8, gap=0.5, variant="exact", constants=BANDIT) -> Problem:
    return Problem(constants.at(alpha), agents, 3, gap, variant)


@st.composite
def any_problem(draw) -> Problem:
    """Random constants: any horizon, discount, adaptation step size and fleet size."""

    def number(low, high):
        return draw(st.floats(np.log10(low), np.log10(high)).map(lambda x: 10**x))

    c = Constants(
        R_max=number(0.1, 10),
        gamma=draw(st.sampled_from((0.0, 0.5, 0.99))),
        H=draw(st.integers(0, 50)),
        G=number(0.1, 3),
        M=number(0.1, 5),
        Lambda=number(0.1, 10),
        alpha=draw(st.sampled_from((0.0, 1e-6, 1e-3, 0.1, 2.0))),
    )
    return Problem(c, draw(st.integers(1, 1000)), draw(st.integers(1, 10**6)), number(1e-3, 1) * c.R_bar)


@settings(max_examples=60)
@given(any_problem(), st.floats(-6, 0).map(lambda x: 10**x), st.sampled_from(("crude", "sharp")))
def test_the_papers_plan_meets_its_four_conditions_and_theorem_1_confirms_it__corollary_1(problem, epsilon, bias):
    plan = corollary_1(problem, epsilon, bias)
    for condition in plan.conditions:
        assert condition.holds, condition
        assert condition.margin == 1 - condition.used
    assert plan.bound.total <= epsilon * (1 + 1e-9)
    assert plan.tau == ceil(epsilon**-0.5)
    c = problem.constants
    if c.alpha:
        crude = 18 * c.stretch**2 * c.alpha**2 * c.L_J**2 * c.G_J**2 / epsilon
        sharp = 3 / sqrt(2) * c.stretch * c.alpha**2 * c.rho_J * c.G_J**2 / sqrt(epsilon)
        needed = crude if bias == "crude" else sharp
        assert needed * (1 - 1e-9) <= plan.m_in <= max(1, needed * (1 + 1e-9) + 1)
    else:
        assert plan.m_in == plan.m_h == 0, "without adaptation neither is drawn"
    assert plan.beta <= sqrt(epsilon / 6) / (c.L_F * c.G_F * plan.tau) * (1 + 1e-9) or plan.tau == 1
    assert plan.trajectories == plan.K * plan.tau * (plan.m_in + plan.m_h + plan.m_out)
    assert plan.steps == plan.trajectories * (c.H + 1)
    assert plan.bytes == 2 * 4 * problem.parameters * plan.K


@pytest.mark.parametrize("agents", [8, 10**6])
def test_costs_scale_as_the_paper_says_over_six_decades__corollary_1(agents):
    accuracies = 10.0 ** -np.arange(2, 9)

    def power(values):
        return np.polyfit(np.log(accuracies), np.log(np.asarray(values, float)), 1)[0]

    p = fleet_problem(agents=agents)
    for bias, trajectories in (("crude", -3.0), ("sharp", -2.5)):
        plans = [corollary_1(p, e, bias) for e in accuracies]
        assert power([x.K for x in plans]) == pytest.approx(-1.5, abs=0.01)
        assert power([x.tau for x in plans]) == pytest.approx(-0.5, abs=0.01)
        assert power([x.trajectories for x in plans]) == pytest.approx(trajectories, abs=0.02)
        # With many agents the noise does not bind, and what is left is the drift, as the paper's choice intends.
        assert ("(ii) drift" in plans[-1].binding) == (agents == 10**6)
    without = [corollary_1(fleet_problem(0.0), e) for e in accuracies]
    assert power([x.trajectories for x in without]) == pytest.approx(-2, abs=0.01), "Prop. 3: no inner batch"


def test_growing_batches_reach_the_rate_that_the_paper_leaves_open():
    """Theorem 1 at tau = 1 with batches of order 1 / epsilon: epsilon^-1 rounds and epsilon^-2 trajectories."""
    accuracies = 10.0 ** -np.arange(2, 9)
    plans = [cheapest(fleet_problem(), float(e)) for e in accuracies]

    def power(name):
        return np.polyfit(np.log(accuracies), np.log([float(getattr(x, name)) for x in plans]), 1)[0]

    assert power("K") == pytest.approx(-1, abs=0.01)
    assert power("m_out") == pytest.approx(-1, abs=0.01)
    assert power("trajectories") == pytest.approx(-2, abs=0.01)
    assert all(plan.tau == 1 for plan in plans)


givens = st.fixed_dictionaries(
    {},
    optional={
        "tau": st.sampled_from((1, 2, 10)),
        "m_h": st.sampled_from((1, 30)),
        "m_out": st.sampled_from((1, 30)),
    },
)


@settings(max_examples=60)
@given(any_problem(), st.floats(-5, 0).map(lambda x: 10**x), givens)
def test_the_cheapest_plan_meets_the_conditions_keeps_what_is_given_and_beats_corollary_1(problem, epsilon, given):
    assume(problem.constants.alpha or not {"m_h"} & given.keys())
    plan = cheapest(problem, epsilon, Given(**given))
    assert all(condition.holds for condition in plan.conditions), plan.conditions
    assert plan.bound.total <= epsilon * (1 + 1e-9)
    for name, value in given.items():
        assert getattr(plan, name) == value
    if not given:
        for bias in ("crude", "sharp"):
            assert plan.trajectories <= corollary_1(problem, epsilon, bias).trajectories * 1.01


@pytest.mark.parametrize("given", [{}, {"m_h": 5}, {"m_h": 5, "m_out": 5}, {"tau": 3}, {"tau": 3, "m_out": 40}])
def test_no_plan_is_cheaper__by_brute_force(given):
    p, epsilon = fleet_problem(agents=3), 0.02
    plan = cheapest(p, epsilon, Given(**given))
    tau = given.get("tau", 1)
    c, needed = p.constants, inner_batch(p, epsilon, "best")
    best = inf

    def grid(name):
        return [given[name]] if name in given else np.unique(np.geomspace(1, 1e4, 120).astype(int))

    for m_h, m_out in product(grid("m_h"), grid("m_out")):
        m_in = np.unique(np.geomspace(needed, 1e4, 160).astype(int))
        a, b = (c.alpha * c.L_J) ** 2, (1 + c.alpha * c.L_J) ** 2
        noise = 3 * c.G_J**2 * (a / m_h + b / m_out + a * b / m_in)
        beta = np.minimum(1 / (6 * c.L_F), p.agents * epsilon / (4 * c.L_F * noise))
        beta = np.minimum(beta, sqrt(epsilon / 6) / (c.L_F * c.G_F * tau)) if tau > 1 else beta
        cost = 8 * p.gap / (beta * epsilon) * (m_in + m_h + m_out)
        best = min(best, cost.min())
    assert plan.trajectories <= best * 1.01


def test_local_steps_save_rounds_at_no_cost_where_batches_are_given():
    p, batches = fleet_problem(), {"m_h": 1, "m_out": 1}
    single, free = cheapest(p, 1e-3, Given(tau=1, **batches)), cheapest(p, 1e-3, Given(**batches))
    assert free.tau > 20
    assert free.K < single.K / 20
    assert free.trajectories == pytest.approx(single.trajectories, rel=0.01), "steps are free as long as nothing drifts"


@settings(max_examples=60)
@given(any_problem(), st.floats(-5, 0).map(lambda x: 10**x), givens, st.floats(-2, 1).map(lambda x: 10**x))
def test_a_budget_of_rounds_is_kept_or_refused(problem, epsilon, given, share):
    assume(problem.constants.alpha or "m_h" not in given)
    budget = max(1, int(cheapest(problem, epsilon, Given(**given)).K * share))
    try:
        plan, refused = cheapest(problem, epsilon, Given(K=budget, **given)), ""
    except pf.UserError as error:
        plan, refused = None, str(error)
    if plan is None:
        assert "rounds are too few" in refused
        assert share < 1
    else:
        assert budget >= plan.K
        assert all(condition.holds for condition in plan.conditions)


def test_a_budget_that_only_a_single_step_meets_is_met_by_one():
    """If the limit on the rounds needs more progress than the drift condition allows, a single step must be chosen."""
    plan = cheapest(fleet_problem(), 1e-3, Given(K=15028200, m_h=50))
    assert (plan.tau, plan.m_h) == (1, 50)
    assert plan.K <= 15028200


def test_a_budget_near_what_drift_allows_is_met_by_whole_numbers_of_steps():
    """If the batches allow at most a third of the drift limit per step, three steps are too few and four suffice."""
    p, epsilon, batches = fleet_problem(agents=6), 1e-3, {"m_in": 63, "m_h": 30, "m_out": 30}
    c = p.constants
    reach = sqrt(epsilon / 6) / (c.L_F * c.G_F)
    limit = p.agents * epsilon / (4 * c.L_F * p.second_moment(**batches))
    assert 0.25 * reach < limit < 0.95 / 3 * reach
    plan = cheapest(p, epsilon, Given(K=ceil(8 * p.gap / (0.95 * reach * epsilon)), **batches))
    assert plan.tau == 4
    assert plan.beta == pytest.approx(reach / 4)


def test_a_given_step_size_is_kept_with_a_budget_of_rounds_or_refused():
    p, epsilon = fleet_problem(), 1e-3
    reach = sqrt(epsilon / 6) / (p.constants.L_F * p.constants.G_F)

    def budget(progress):
        return ceil(8 * p.gap / (progress * epsilon))

    plan = cheapest(p, epsilon, Given(beta=0.3 * reach, K=budget(0.8 * reach)))
    assert (plan.beta, plan.tau) == (0.3 * reach, 3)
    with pytest.raises(pf.UserError, match=r"condition \(ii\) drift allows .* 1.5 times as many"):
        cheapest(p, epsilon, Given(beta=0.6 * reach, K=budget(0.9 * reach)))
    with pytest.raises(pf.UserError, match="and tau = 1 make beta tau"):
        cheapest(p, epsilon, Given(beta=0.3 * reach, tau=1, K=budget(0.8 * reach)))


def test_few_rounds_are_planned_in_whole_numbers():
    """With gap 0 one round of the smallest batches suffices, and small numbers of rounds are not rounded up."""
    plan = cheapest(fleet_problem(gap=0.0), 1e-3)
    assert (plan.K, plan.tau, plan.m_h, plan.m_out) == (1, 1, 1, 1)
    few = cheapest(fleet_problem(1 / 64, agents=2, gap=0.001), 0.1)
    assert few.K < 10
    assert few.trajectories <= 430


def test_batches_however_large_are_kept_as_given():
    assert cheapest(fleet_problem(), 1e-3, Given(m_out=10**13)).m_out == 10**13


def test_a_plan_that_nothing_limits_has_no_binding_condition():
    plan = cheapest(fleet_problem(), 1e-3, Given(beta=1e-9, tau=1, m_in=10**6, m_h=10**6, m_out=10**6))
    assert plan.binding == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"K": 1000}, r"K = 1000 rounds are too few: condition \(i\) ceiling .* 5.52e\+05 rounds, 552 times as many"),
        ({"K": 10**7, "m_h": 1, "m_out": 1}, r"condition \(ii\) drift .* 2.14 times as many"),
        ({"K": 10**8, "tau": 1, "m_h": 1, "m_out": 1}, r"condition \(iv\) variance .* times as many"),
        ({"beta": 1.0}, r"condition \(i\) ceiling fails: beta = 1 is 138 times"),
        ({"beta": 0.001, "tau": 10}, r"condition \(ii\) drift fails: beta = 0.001 is 53.4 times"),
        ({"beta": 0.001, "m_out": 1}, r"condition \(iv\) variance fails: beta = 0.001 is .* times"),
        ({"m_in": 1}, r"condition \(iii\) bias fails: m_in = 1, .* 63 times as many"),
    ],
)
def test_contradictions_name_the_condition_and_by_how_much_it_fails(given, says):
    with pytest.raises(pf.UserError, match=says):
        cheapest(fleet_problem(), 1e-3, Given(**given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"K": 0}, "K must be a whole number of at least 1"),
        ({"tau": -2}, "tau must be a whole number"),
        ({"beta": -1.0}, "beta must be a finite number > 0"),
        ({"m_in": -3}, "m_in must be"),
        ({"beta": inf}, "beta must be a finite number"),
    ],
)
def test_invalid_fixed_quantities_are_refused(given, says):
    with pytest.raises(pf.UserError, match=says):
        Given(**given)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, inf, float("nan")])
def test_an_invalid_accuracy_is_refused(epsilon):
    for make in (corollary_1, cheapest):
        with pytest.raises(pf.UserError, match="epsilon, the accuracy to plan for"):
            make(fleet_problem(), epsilon)
    with pytest.raises(pf.UserError, match="epsilon"):
        regime(BANDIT, epsilon)


def test_the_first_order_variant_has_a_plan_only_for_small_alpha__corollary_2():
    limit = regime(BANDIT, 0.01).vanishing
    assert limit == pytest.approx(sqrt(0.01) / (3 * sqrt(2) * BANDIT.L_J * BANDIT.G_J))
    for plan in (f(fleet_problem(limit * 0.9, variant="first-order"), 0.01) for f in (corollary_1, cheapest)):
        assert plan.m_h == 0
        assert all(condition.holds for condition in plan.conditions)
        assert plan.bound.total <= 0.01
    with pytest.raises(pf.UserError, match="m_h cannot be given: the first-order variant draws no such batch"):
        cheapest(fleet_problem(limit / 2, variant="first-order"), 0.01, Given(m_h=10))
    with pytest.raises(pf.UserError, match="m_in cannot be given: without adaptation there is no such batch"):
        cheapest(fleet_problem(0.0), 0.01, Given(m_in=10))
    with pytest.raises(pf.UserError, match=rf"fails for every m_in: .* 2 times .* it needs alpha < {limit:.4g}"):
        cheapest(fleet_problem(2 * limit, variant="first-order"), 0.01)


def test_regimes_end_where_the_paper_says__section_5():
    L, rho, G = BANDIT.L_J, BANDIT.rho_J, BANDIT.G_J
    r = regime(BANDIT, 0.01)
    assert r.moderate == pytest.approx(1 / (2 * L))
    assert r.dagger == pytest.approx(L / (rho * G))
    names = [regime(BANDIT.at(a), 0.01).name for a in (0.0, r.vanishing, r.moderate, 1.01 * r.moderate)]
    assert [name.split()[0] for name in names] == ["none", "vanishing", "moderate", "above"]
    assert regime(BANDIT.at(r.vanishing)).name.startswith("moderate"), "no accuracy is asked for"

    def at(alpha):
        return BANDIT.at(alpha).L_F

    assert at(r.dagger) <= L * ((1 + r.dagger * L) ** 2 + 1) * (1 + 1e-12), (
        "the third-order term is L_J at alpha-dagger"
    )
    assert BANDIT.at(r.moderate).G_F <= 1.5 * G
    assert at(r.moderate) <= 9 / 4 * L + rho * G / (2 * L) * (1 + 1e-12)


def test_rounds_grow_with_alpha_and_a_smaller_one_saves():
    costs = [cheapest(fleet_problem(a), 1e-3).trajectories for a in (1 / 4, 1 / 16, 1 / 64, 0.0)]
    assert costs == sorted(costs, reverse=True)
    assert log(costs[0]) - log(costs[-1]) > 1
