"""Realized values: measured along the steps of a run and never above their bounds."""

import jax
import numpy as np
import pytest
from enumeration import fleets
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

import perfedrl as pf
from perfedrl import exact, theory
from perfedrl.envs.bandits import bandits
from perfedrl.estimators import PAPER
from perfedrl.theory.fleet_problem import problem
from perfedrl.theory.local_step_trace import Trace, trace
from perfedrl.theory.realized_bounds import drifts, evenly, realized

GRID = pf.gridworld(width=3, horizon=4)


@pytest.mark.parametrize(
    "algorithm",
    [
        pf.PerFedAvgPG(2.0, 0.3, 3, 4, 5, 6),
        pf.PerFedAvgPG(2.0, 0.3, 3, variant="first-order"),
        pf.FedAvgPG(1.0, 0.3, 2, 7),
    ],
    ids=["exact", "first-order", "fedavg-pg"],
)
def test_the_trace_is_the_run_bit_by_bit(algorithm):
    policy, rounds = pf.TableSoftmax(9, 4), 5
    run = trace(GRID, policy, algorithm, rounds + 1, seed=3)
    assert run.rounds == rounds + 1
    assert run.params.shape == (rounds + 1, algorithm.local_steps + 1, 8, 9, 4)
    trained = pf.simulate(GRID, policy, algorithm, rounds=rounds, seeds=[3], **PAPER)
    np.testing.assert_array_equal(run.server[-1], trained.params[0])
    np.testing.assert_array_equal(run.params[:, 0], np.broadcast_to(run.server[:, None], run.params[:, 0].shape))
    np.testing.assert_allclose(run.mean[:-1, -1], run.server[1:], atol=1e-6)


def test_algorithms_that_the_theory_does_not_cover_are_refused():
    with pytest.raises(pf.UserError, match="not LocalPG"):
        trace(GRID, pf.TableSoftmax(9, 4), pf.LocalPG(0.1), 2)


def test_drifts_by_hand__lemma_4():
    steps = np.zeros((1, 3, 2, 2))
    steps[0, 1] = [[3, 4], [0, 0]]
    steps[0, 2] = [[3, 4], [-3, -4]]
    way, apart = drifts(Trace(steps))
    np.testing.assert_allclose(way, [0, 5, 5])
    np.testing.assert_allclose(apart, [0, 2.5**2, 25])


@examples(4, fast=2)
@given(fleets(), st.sampled_from((0.1, 2.0)), st.sampled_from(("exact", "first-order")))
def test_no_bound_is_violated_along_a_run__lemmas_1_to_4_and_prop_3(problem_, alpha, variant):
    mdps, _, policy, _ = problem_
    fleet = pf.Fleet(exact.stacked(mdps))
    algorithm = pf.PerFedAvgPG(alpha, 0.5, 2, 2, 2, 2, variant)
    rows = realized(problem(fleet, policy, algorithm), fleet, policy, algorithm, rounds=3)
    assert len(rows) >= 14
    for row in rows:
        assert 0 <= row.realized <= row.bound * (1 + 1e-6), row


@pytest.mark.slow
def test_realized_values_are_maxima_over_the_visited_parameters():
    policy, algorithm = pf.TableSoftmax(9, 4), pf.PerFedAvgPG(2.0, 0.3, 2, 3, 3, 3)
    rows = {
        row.what: row.realized for row in realized(problem(GRID, policy, algorithm), GRID, policy, algorithm, rounds=2)
    }
    run = trace(GRID, policy, algorithm, 2)
    mdps = pf.envs.tabular.unstack(GRID.train)
    visited = [(mdp, run.params[k, t, i]) for k in range(2) for t in range(3) for i, mdp in enumerate(mdps)]
    gradients = [np.linalg.norm(exact.gradient(mdp, theta)) for mdp, theta in visited]
    hessians = [np.linalg.norm(exact.hessian(mdp, theta).reshape(36, 36), 2) for mdp, theta in visited]
    meta = [np.linalg.norm(exact.meta_gradient([mdp], theta, 2.0)) for mdp, theta in visited]
    curved = [
        np.linalg.norm(exact.meta_hessian([m], run.params[k, -1, i], 2.0).reshape(36, 36), 2)
        for k in range(2)
        for i, m in enumerate(mdps)
    ]
    assert rows["gradient |∇J_i|"] == pytest.approx(max(gradients), rel=1e-9)
    assert rows["Hessian |∇²J_i|"] == pytest.approx(max(hessians), rel=1e-9)
    assert rows["meta-gradient |∇F_i|"] == pytest.approx(max(meta), rel=1e-9)
    assert rows["meta-Hessian |∇²F_i|"] == pytest.approx(max(curved), rel=1e-9)
    apart = [
        ((g - g.mean(axis=0)) ** 2).sum(axis=(1, 2)).mean()
        for g in (np.stack([exact.gradient(m, theta) for m in mdps]) for theta in run.server)
    ]
    assert rows["gradient dissimilarity"] == pytest.approx(max(apart), rel=1e-9)
    gaps = [abs(np.diff(exact.returns(GRID, theta, 2.0).mean(axis=1)).item()) for theta in run.server]
    assert rows["distance |F − f|"] == pytest.approx(max(gaps), rel=1e-9)


@pytest.mark.slow
def test_theorem_1_is_compared_only_for_step_sizes_that_it_covers():
    fleet, policy = bandits(), pf.TableSoftmax(1, 3)
    beta = theory.ceiling(theory.constants(fleet, policy, 1 / 16))
    for factor, said in ((1.0, True), (1.1, False)):
        algorithm = pf.PerFedAvgPG(1 / 16, factor * beta, 1, 5, 5, 5)
        rows = realized(problem(fleet, policy, algorithm), fleet, policy, algorithm, rounds=4)
        assert (rows[-1].symbol == "Theorem 1") == said
        assert rows[-1].realized <= rows[-1].bound


def test_networks_are_not_measured():
    policy, algorithm = pf.MLPSoftmax((2, 4, 8)), pf.PerFedAvgPG(1.0, 0.1)
    with pytest.raises(pf.UserError, match="finitely many states"):
        realized(problem(pf.arc(), policy, algorithm, radius=9.0), pf.arc(), policy, algorithm)


def test_evenly_spaced_indices_end_at_both_ends():
    assert evenly(1, 5).tolist() == [0]
    assert evenly(3, 5).tolist() == [0, 1, 2]
    assert evenly(80, 3).tolist() == [0, 40, 79]
    assert jax.tree.leaves(evenly(2, 1))[0].tolist() == [0]
