"""The best policy that tabular agents share, against enumeration of all policies and all paths."""

import itertools

import numpy as np
import pytest

from perfedrl import exact
from perfedrl.envs import TabularMDP, fleet
from perfedrl.exact.shared_policy import best_responses, best_shared_policy, returns_of_actions

STATES, ACTIONS, HORIZON, DISCOUNT = 2, 2, 1, 0.8


def mdp(rng):
    P = rng.dirichlet(np.ones(STATES), size=(STATES, ACTIONS))
    return TabularMDP(P, rng.uniform(size=(STATES, ACTIONS)), rng.dirichlet(np.ones(STATES)), HORIZON, DISCOUNT)


def agents(seed, count=3):
    rng = np.random.default_rng(seed)
    return fleet([mdp(rng) for _ in range(count)])


def by_paths(task, policy):
    """The expected return as a sum over all sequences of states."""
    total = 0.0
    for path in itertools.product(range(STATES), repeat=HORIZON + 1):
        probability, value = float(task.mu[path[0]]), 0.0
        for t, state in enumerate(path):
            value += DISCOUNT**t * float(task.r[state, policy[t, state]])
            if t < HORIZON:
                probability *= float(task.P[state, policy[t, state], path[t + 1]])
        total += probability * value
    return total


def every_policy():
    for flat in itertools.product(range(ACTIONS), repeat=(HORIZON + 1) * STATES):
        yield np.asarray(flat).reshape(HORIZON + 1, STATES)


def test_returns_of_actions_are_sums_over_all_paths():
    some = agents(0)
    for policy in every_policy():
        expected = [by_paths(some.task(i), policy) for i in range(some.agents)]
        np.testing.assert_allclose(returns_of_actions(some.train, policy), expected, rtol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_the_shared_policy_is_the_best_of_all_enumerated_ones(seed):
    some = agents(seed)
    best = max(returns_of_actions(some.train, policy).mean() for policy in every_policy())
    assert returns_of_actions(some.train, best_shared_policy(some.train)).mean() == pytest.approx(best, rel=1e-9)


def test_equal_agents_share_their_optimum():
    one = mdp(np.random.default_rng(3))
    same = fleet([one, one, one])
    optimum = exact.optimal_return(one)
    np.testing.assert_allclose(returns_of_actions(same.train, best_shared_policy(same.train)), optimum, rtol=1e-7)


def test_an_agents_own_policy_has_its_optimal_return():
    some = agents(5)
    for i, policy in enumerate(best_responses(some.train)):
        assert returns_of_actions(some.train, policy)[i] == pytest.approx(exact.optimal_return(some.task(i)), rel=1e-6)
