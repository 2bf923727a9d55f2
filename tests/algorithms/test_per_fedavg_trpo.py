"""Trust-region steps on an initialization: limits that are kept, agents of all kinds, settings that are rejected."""

import jax
import numpy as np
import pytest
from simulations import simulation_of
from untraced import AGENTS, ARC, Played

import perfedrl as pf
from perfedrl.algorithms import PerFedAvgTRPO
from perfedrl.algorithms.learned_adaptation import Learned, adapted
from perfedrl.envs.fleet import fleet
from perfedrl.estimators import Sampled, StepKeys
from perfedrl.experiments.config import make_config
from perfedrl.policies import mlp
from perfedrl.simulation.evaluation import MonteCarlo

GRID, TABLE = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)
AGENT = Sampled(TABLE, baseline="leave-one-out")
THETA = jax.random.normal(jax.random.key(5), (9, 4))


@pytest.mark.parametrize("learn_alpha", ["no", "per-parameter"])
def test_an_upload_improves_its_batch_within_the_limit(learn_alpha):
    algorithm = PerFedAvgTRPO(1.0, 0.02, m_in=8, m_out=8, learn_alpha=learn_alpha)
    objective, key = AGENT(GRID.task(1)), jax.random.key(3)
    message = algorithm.init(THETA)[0].message
    upload, state = algorithm.client(message, (), objective, key)
    assert state == ()
    assert jax.tree.structure(upload) == jax.tree.structure(message)
    keys = StepKeys(*jax.random.split(key, (1, 3))[0])
    before, after = (Learned(x, ()) if learn_alpha == "no" else x for x in (message, upload))
    inner = objective.batch(THETA, keys.inner, 8)
    start, end = (adapted(x, 1.0, inner, True) for x in (before, after))
    outer = objective.batch(start, keys.outer, 8)
    assert 0.25 * 0.02 < float(outer.divergence(end)) <= 0.02 * (1 + 1e-4), "close to the limit"
    assert float(outer.surrogate(end)) > float(outer.surrogate(start)) + 1e-3
    if learn_alpha != "no":
        assert np.abs(upload.factors - 1).max() > 1e-3


def test_runs_that_differ_in_the_limit_are_one_program():
    """A limit is a leaf: two of them side by side train as each does alone."""
    limits = [PerFedAvgTRPO(1.0, delta, m_in=3, m_out=3) for delta in (0.001, 0.1)]
    assert jax.tree.structure(limits[0]) == jax.tree.structure(limits[1])
    both = simulation_of(GRID, TABLE, limits, [0, 0], AGENT)
    moved = np.asarray(both.advance(both.start(), 0, 1).server.message)
    lengths = np.linalg.norm(moved.reshape(2, -1), axis=1)
    assert 3 < lengths[1] / lengths[0] < 30, "about the square root of the limits' ratio"


def test_played_agents_get_the_numbers_of_compiled_ones():
    policy = mlp(ARC, (4,))
    agent = Sampled(policy, baseline="leave-one-out")
    played = fleet(*[[Played(task, False) for task in tasks] for tasks in AGENTS])
    ends = []
    for some in (ARC, played):
        algorithm = PerFedAvgTRPO(5.0, m_in=20, m_out=20, iterations=4, learn_alpha="per-parameter")
        simulation = simulation_of(some, policy, [algorithm], [0], agent, evaluation=MonteCarlo(agent, 1, 1))
        ends.append(simulation.advance(simulation.start(), 0, 2).server.message)
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    start = simulation.start().server.message
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), ends[1], start)
    assert max(jax.tree.leaves(moved.theta)) > 0.01
    assert max(jax.tree.leaves(moved.factors)) > 0


GRIDWORLD = {"fleet": {"env": "gridworld", "width": 3, "horizon": 5}, "policy": {"name": "table"}}
ON_ARC = {"fleet": {"env": "arc", "horizon": 5}, "policy": {"name": "mlp"}}


@pytest.mark.parametrize(
    ("parts", "settings", "said"),
    [
        (GRIDWORLD, {"delta": 0.0}, "delta must be a finite number > 0"),
        (GRIDWORLD, {"delta": float("nan")}, "delta must be a finite number > 0; it is nan"),
        (GRIDWORLD, {"delta": float("inf")}, "delta must be a finite number > 0"),
        (GRIDWORLD, {"damping": -1.0}, "damping must be a finite number >= 0"),
        (GRIDWORLD, {"iterations": 0}, "iterations must be at least 1"),
        (GRIDWORLD, {"iterations": 2.5}, "valid integer"),
        (GRIDWORLD, {"backtracks": 0}, "backtracks must be at least 1"),
        (GRIDWORLD, {"variant": "exact"}, "should be 'first-order' or 'differentiated'"),
        (GRIDWORLD, {"alpha": 0.0, "learn_alpha": "per-parameter"}, "learn_alpha multiplies alpha, which is 0"),
        (ON_ARC | {"policy": {"name": "actor-critic"}}, {}, "a value network and normalization moments do not change"),
        (
            ON_ARC | {"normalization": {"observations": "local"}},
            {},
            "a value network and normalization moments do not change",
        ),
    ],
)
def test_bad_settings_are_one_sentence_before_compiling(parts, settings, said, untyped):
    algorithm = {"name": "per-fedavg-trpo", "alpha": 1.0, **settings}
    with pytest.raises(pf.UserError, match=said):
        _ = make_config({"name": "tried", "seeds": 1, "rounds": 1, "algorithm": algorithm, **parts}).experiment


def test_the_server_averages_steps_of_sampled_agents():
    algorithm = PerFedAvgTRPO(1.0, m_in=3, m_out=3)
    run = pf.simulate(GRID, TABLE, algorithm, rounds=2, seeds=1, participation=0.5, baseline="leave-one-out")
    assert np.isfinite(run.params).all()
    assert np.abs(run.params).max() > 0.01
