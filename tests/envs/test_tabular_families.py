"""The tabular families one by one; their common contract is in test_env_contract.py."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfedrl as pf
from perfedrl.envs import ENVS, TabularMDP, fleet, mix, random_mdps, tabular_fleet, unstack, windy_cliff
from perfedrl.envs.inverse_transform import inverse_cdf

ARRAYS = {
    "P": np.full((3, 2, 2, 2), 0.5).tolist(),
    "r": np.arange(12.0).reshape(3, 2, 2).tolist(),
    "mu": [[1.0, 0.0]] * 3,
    "horizon": 2,
    "discount": 0.5,
    "held_out": 1,
}


def test_agents_of_a_fleet_share_shapes_and_differ_in_goals_and_winds():
    grid = pf.gridworld().train
    assert (grid.P[0] == grid.P).all()
    assert len({tuple(r.ravel()) for r in grid.r}) == 8
    cliffs = windy_cliff(winds=(0.0, 0.5)).train
    assert not (cliffs.P[0] == cliffs.P[1]).all()
    assert (cliffs.mu[0] == cliffs.mu[1]).all()


def test_gridworld_follows_the_protocol():
    fleet_ = pf.gridworld()
    goals = [int(r[:, 0].argmax()) for r in fleet_.train.r]
    assert sorted(goals) == [0, 2, 4, 10, 14, 20, 22, 24]
    mdp = fleet_.task(0)
    assert (mdp.horizon, mdp.discount, mdp.step_noise) == (15, 0.9, 0)
    # From the upper left corner: up and left stay, down leads to cell 5, right to cell 1.
    assert mdp.P[0].argmax(axis=-1).tolist() == [0, 5, 0, 1]
    assert mdp.mu[0] == 0
    np.testing.assert_allclose(mdp.mu[1:], 1 / 24)
    assert mdp.r[0].tolist() == [1.0] * 4


def test_windy_cliff_by_hand():
    calm, storm = unstack(windy_cliff(winds=(0.0, 1.0)).train)
    start, goal, UP, RIGHT = 12, 15, 0, 3
    assert calm.mu[start] == 1
    assert calm.P[start, RIGHT, start] == 1, "stepping right from the start falls and is back at the start"
    assert calm.r[start, RIGHT] == pytest.approx(-1.01)
    assert calm.r[start, UP] == pytest.approx(-0.01)
    assert calm.P[goal, :, goal].tolist() == [1.0] * 4
    assert storm.P[0, UP, 4] == 1, "a full wind moves down whatever the walker wants"
    assert calm.P[:, :, 13:15].sum() == 0, "nobody stands in the cliff"


@pytest.mark.parametrize("heterogeneity", [0.0, 0.25, 1.0])
def test_heterogeneity_mixes_the_common_and_the_own_kernel(heterogeneity):
    common, own = np.asarray([[0.2, 0.8]]), np.asarray([[0.6, 0.4]])
    mixed = mix(common, own, heterogeneity)
    np.testing.assert_allclose(mixed[0, 0], 0.2 + 0.4 * heterogeneity)


def test_random_mdps_at_no_heterogeneity_are_one_mdp():
    P = random_mdps(agents=3, heterogeneity=0.0).train.P
    assert P.shape == (3, 5, 5, 5)
    np.testing.assert_array_equal(P[0], P[2])
    assert (random_mdps(agents=2, seed=1).train.r <= 1).all()


def test_agents_may_differ_in_start_transitions_and_rewards():
    stacked = tabular_fleet(ARRAYS["P"], ARRAYS["r"], [[1, 0], [0, 1], [0.5, 0.5]], 2, 0.5)
    assert stacked.train.mu.tolist() == [[1, 0], [0, 1], [0.5, 0.5]]


def test_the_last_agents_are_held_out():
    own = ENVS["arrays"](**ARRAYS)
    assert (own.agents, own.held_out_agents) == (2, 1)
    assert own.task(0, held_out=True).r[0, 0] == 8


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 1.0))
def test_successor_lists_lose_nothing(seed, density):
    rng = np.random.default_rng(seed)
    P = rng.dirichlet(np.ones(4), size=(4, 3)) * (rng.uniform(size=(4, 3, 4)) < density)
    P[P.sum(-1) == 0] = np.eye(4)[1]
    P /= P.sum(-1, keepdims=True)
    mdp = TabularMDP(P, np.zeros((4, 3)), np.eye(4)[0], 1, 0.5)
    np.testing.assert_array_equal(mdp.P, P)
    v = rng.normal(size=4)
    np.testing.assert_allclose(mdp.backup(jnp.asarray(v)), P @ v, rtol=1e-5, atol=1e-6)
    dense = TabularMDP(np.full((4, 3, 4), 0.25), np.zeros((4, 3)), np.eye(4)[0], 1, 0.5)
    np.testing.assert_array_equal(fleet([mdp, dense]).train.P[0], P)


def test_rows_within_the_tolerance_are_normalized():
    """Float32 input is off by rounding; sampled and exact agents must mean the same MDP."""
    P = np.full((2, 2, 2), 0.5)
    P[0, 0] = [0.5000004, 0.5]
    mdp = TabularMDP(**{**GOOD, "P": P, "mu": np.asarray([0.3, 0.7000003])})
    np.testing.assert_allclose(mdp.P.sum(-1), 1, rtol=0, atol=1e-15)
    assert mdp.mu.sum() == pytest.approx(1, abs=1e-15)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any), st.floats(0, 1, exclude_max=True, width=32))
def test_inverse_cdf_picks_the_interval_that_u_falls_in(counts, u):
    p = np.asarray(counts) / np.sum(counts)
    picked = int(inverse_cdf(jnp.asarray(p, jnp.float32), jnp.asarray(u, jnp.float32)))
    assert p[picked] > 0, "what is impossible is never drawn"
    edges = np.concatenate([[0.0], np.cumsum(p)])
    assert edges[picked] - 1e-6 <= u <= edges[picked + 1] + 1e-6


def test_the_largest_uniform_never_draws_an_entry_of_probability_zero():
    """Also not where rounding, or an input that passed the tolerance, left the sum a little under 1."""
    top = jnp.asarray(np.nextafter(np.float32(1), np.float32(0)))
    for p in ([0.5, 0.4999995, 0.0, 0.0], [1.0, 0.0], [0.0, 1.0, 0.0]):
        assert p[int(inverse_cdf(jnp.asarray(p, jnp.float32), top))] > 0


# --- bad input ------------------------------------------------------------------------------------------------------

GOOD = {"P": np.full((2, 2, 2), 0.5), "r": np.zeros((2, 2)), "mu": np.eye(2)[0], "horizon": 3, "discount": 0.9}


def bad_row():
    P = GOOD["P"].copy()
    P[1, 0] = [0.5, 0.4]
    return P


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"P": bad_row()}, ["state 1", "action 0", "0.9"]),
        ({"P": np.full((2, 2, 2), np.nan)}, ["P[0, 0, 0]", "nan"]),
        ({"P": np.asarray([[[1.5, -0.5]] * 2] * 2)}, ["negative", "-0.5"]),
        ({"P": np.ones((2, 2))}, ["[S, A, S]"]),
        ({"r": np.zeros((2, 3))}, ["r must have shape"]),
        ({"r": np.full((2, 2), np.inf)}, ["r[0, 0]", "finite"]),
        ({"mu": np.asarray([0.5, 0.4])}, ["mu sums to 0.9"]),
        ({"mu": np.asarray([1.5, -0.5])}, ["negative"]),
        ({"horizon": -1}, ["horizon", "-1"]),
        ({"discount": 1.0}, ["discount", "[0, 1)", "1.0"]),
        ({"discount": -0.1}, ["discount"]),
        ({"horizon": float("nan")}, ["horizon"]),
        ({"horizon": 1.5}, ["horizon", "1.5"]),
        ({"P": [[[1.0], [0.5, 0.5]]]}, ["P", "ragged"]),
        ({"P": np.ones((0, 2, 0)), "r": np.ones((0, 2)), "mu": np.ones(0)}, ["at least one state"]),
    ],
)
def test_an_invalid_mdp_is_rejected_in_one_sentence(change, words, untyped):
    with pytest.raises(pf.UserError) as error:
        TabularMDP(**{**GOOD, **change})
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_a_bad_row_in_a_fleet_names_the_agent():
    P = np.stack([GOOD["P"], bad_row()])
    with pytest.raises(pf.UserError, match=r"agent 1: the row of P at state 1, action 0 sums to 0.9"):
        tabular_fleet(P, np.zeros((2, 2, 2)), np.full((2, 2), 0.5), 3, 0.9)


def test_fleets_of_mixed_shapes_are_rejected():
    small, large = pf.gridworld(width=2).task(0), pf.gridworld(width=3).task(0)
    with pytest.raises(pf.UserError, match="agent 1"):
        fleet([small, large])
    with pytest.raises(pf.UserError, match="horizon 15, agent 1 has 3"):
        fleet([small, pf.gridworld(width=2, horizon=3).task(0)])
    with pytest.raises(pf.UserError, match="at least one"):
        fleet([])


@pytest.mark.parametrize(
    "call",
    [
        lambda: pf.gridworld(width=1),
        lambda: pf.gridworld(goals=[(5, 0)]),
        lambda: windy_cliff(winds=(1.5,)),
        lambda: random_mdps(heterogeneity=2.0),
        lambda: random_mdps(agents=0),
        lambda: pf.gridworld().task(8),
        lambda: pf.envs.arrays(3, 0.9, file="no-such-file.npz"),
        lambda: pf.envs.arrays(3, 0.9),
        lambda: pf.envs.arrays(3, 0.9, P=[[[[1.0]]], [[[0.5, 0.5]]]], r=[[[0.0]]], mu=[[1.0]]),
    ],
)
def test_bad_parameters_are_user_errors(call):
    with pytest.raises(pf.UserError):
        call()


def test_a_pickled_array_file_is_rejected(tmp_path):
    path = tmp_path / "evil.npz"
    np.savez(path, P=np.asarray([{"a": 1}], dtype=object))
    with pytest.raises(pf.UserError, match="plain arrays"):
        pf.envs.arrays(3, 0.9, file=str(path))
