"""Clipped steps on one batch: special cases, early stops, optimizers' states, derivatives through the adaptation."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulations import simulation_of
from untraced import AGENTS, ARC, Played

import perfedrl as pf
from perfedrl.algorithms import FedAvgPG, FedPPO, ProMP
from perfedrl.algorithms.annealing import LAST_SHARE
from perfedrl.algorithms.clipped_steps import improve
from perfedrl.algorithms.learned_adaptation import Learned, adapted
from perfedrl.envs import classification
from perfedrl.envs.fleet import fleet
from perfedrl.estimators import Sampled
from perfedrl.experiments.config import make_config
from perfedrl.policies import mlp
from perfedrl.simulation.evaluation import MonteCarlo

GRID, TABLE = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)
AGENT = Sampled(TABLE, baseline="leave-one-out")
THETA = jax.random.normal(jax.random.key(5), (9, 4))


def trained(algorithm, rounds=2):
    result = pf.simulate(GRID, TABLE, algorithm, rounds=rounds, seeds=1, every=rounds, baseline="leave-one-out")
    return np.asarray(result.params[0])


def test_with_one_epoch_of_plain_ascent_fedppo_is_fedavg_pg():
    own = FedPPO(1.0, 0.3, local_steps=2, m=3, epochs=1, optimizer="sgd")
    np.testing.assert_allclose(trained(own), trained(FedAvgPG(1.0, 0.3, local_steps=2, m=3)), rtol=0, atol=1e-6)


def test_without_an_adaptation_promp_is_fedppo():
    same = {"local_steps": 2, "epochs": 3, "optimizer": "adam"}
    own = ProMP(0.0, 0.1, m_in=2, m_out=3, divergence_weight=0.0, **same)
    np.testing.assert_allclose(trained(own), trained(FedPPO(1.0, 0.1, m=3, **same)), rtol=0, atol=1e-6)


def test_no_further_step_is_taken_once_the_policy_diverged():
    far, one = ({"beta": 5.0, "epochs": epochs, "local_steps": 1, "m": 3, "optimizer": "sgd"} for epochs in (4, 1))
    stopped = trained(FedPPO(1.0, stop_divergence=1e-9, **far), rounds=1)
    np.testing.assert_array_equal(stopped, trained(FedPPO(1.0, **one), rounds=1))
    assert np.abs(stopped - trained(FedPPO(1.0, stop_divergence=1e9, **far), rounds=1)).max() > 1e-3


@pytest.mark.parametrize("first_order", [True, False])
def test_a_step_follows_the_gradient_through_the_adaptation(first_order):
    """Against the chain rule with the adaptation's Jacobian written out, or taken for the identity."""
    objective = AGENT(GRID.task(1))
    inner, alpha = objective.batch(THETA, jax.random.key(1), 60), 2.0
    start = THETA + 0.2 * jax.random.normal(jax.random.key(6), (9, 4))  # the divergence has a slope there
    learned = Learned(start, jnp.full((9, 4), 1.2))
    after = adapted(learned, alpha, inner, first_order)
    outer = objective.batch(after, jax.random.key(2), 60)
    how = ProMP(
        alpha,
        1.0,
        epochs=1,
        optimizer="sgd",
        divergence_weight=0.5,
        variant="first-order" if first_order else "differentiated",
    ).how
    moved, _ = improve(how, learned, how.optimizer.init(learned), alpha, 1.0, inner, outer)
    g, step = jax.grad(outer.surrogate)(after).ravel(), alpha * 1.2
    by_theta = g
    if not first_order:
        H = jax.hessian(inner.surrogate)(start).reshape(36, 36)
        by_theta = g + step * H @ g
    by_theta = by_theta - 0.5 * jax.grad(inner.divergence)(start).ravel()
    np.testing.assert_allclose((moved.theta - start).ravel(), by_theta, rtol=1e-3, atol=1e-5)
    by_factor = g * alpha * inner.gradient(start).ravel()
    np.testing.assert_allclose((moved.factors - 1.2).ravel(), by_factor, rtol=1e-3, atol=1e-5)
    assert np.abs(by_factor).max() > 1e-3


def test_an_optimizers_state_is_averaged_kept_or_forgotten():
    messages, states = {}, {}
    for where in ("averaged", "personal", "reset"):
        algorithm = FedPPO(1.0, 0.1, m=3, optimizer_state=where)
        server, state = algorithm.init(THETA)
        upload, state = algorithm.client(server.message, state, AGENT(GRID.task(0)), jax.random.key(0))
        messages[where], states[where] = upload, state
        np.testing.assert_array_equal(upload.learned.theta, messages["averaged"].learned.theta, "equal first rounds")
    assert messages["personal"].moments == messages["reset"].moments == ()
    assert states["averaged"] == states["reset"] == ()
    jax.tree.map(np.testing.assert_array_equal, messages["averaged"].moments, states["personal"])
    assert float(states["personal"][0].count) == 5.0, "five epochs"


def test_the_rate_is_annealed_over_rounds():
    algorithm = FedPPO(1.0, 0.1, m=3, anneal=4)
    server, state = algorithm.init(THETA)
    rates = []
    for _ in range(6):
        rates.append(float(algorithm.annealing.rate(0.1, server.message.round)) / 0.1)
        upload, state = algorithm.client(server.message, state, AGENT(GRID.task(0)), jax.random.key(0))
        server = algorithm.server(server, jax.tree.map(lambda x: jnp.stack([x, x]), upload), jnp.ones(2))
    share = (1 - LAST_SHARE) / 4
    np.testing.assert_allclose(rates, [1, 1 - share, 1 - 2 * share, 1 - 3 * share, LAST_SHARE, LAST_SHARE], rtol=1e-5)


def test_played_agents_get_the_numbers_of_compiled_ones():
    """The Python loop samples, and calls compiled functions for everything else."""
    policy = mlp(ARC, (4,))
    agent = Sampled(policy, advantage="gae")
    played = fleet(*[[Played(task, False) for task in tasks] for tasks in AGENTS])
    ends = []
    for some in (ARC, played):
        algorithm = ProMP(0.5, 0.05, local_steps=2, m_in=3, m_out=3, epochs=2, learn_alpha="per-parameter")
        simulation = simulation_of(some, policy, [algorithm], [0], agent, evaluation=MonteCarlo(agent, 1, 1))
        ends.append(simulation.advance(simulation.start(), 0, 2))
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


PLAIN = {"m_in": 40, "m_out": 40, "optimizer": "sgd", "divergence_weight": 0.1, "stop_divergence": 1e9}
SINGLE = {
    "compiled": (pf.gridworld(width=3, horizon=5, goals=[(2, 2)]), TABLE),
    "played": (fleet([Played(AGENTS[0][0], False)]), mlp(ARC, (4,))),
}


@pytest.mark.parametrize("where", SINGLE)
def test_rounds_with_the_same_batches_are_the_epochs_of_one_round(where):
    """For one agent, whose upload is the next message: three rounds of one epoch, then three on other batches.

    Keys of batches are those of the round that samples them, so that the second three begin at round 3 in both ways.
    """
    some, policy = SINGLE[where]
    agent, ends = Sampled(policy, baseline="leave-one-out"), {}
    for rounds, epochs in ((3, 1), (1, 3)):
        algorithm = ProMP(1.0, 0.2, epochs=epochs, rounds_per_batch=rounds, **PLAIN)
        simulation = simulation_of(some, policy, [algorithm], [0], agent, evaluation=MonteCarlo(agent, 1, 1))
        states = [simulation.start()]
        for first in (0, 3):
            states.append(simulation.advance(states[-1], first, rounds))
        ends[epochs] = np.stack([np.concatenate([*map(np.ravel, jax.tree.leaves(x.server.message))]) for x in states])
    np.testing.assert_allclose(ends[1], ends[3], rtol=0, atol=1e-6)
    assert all(np.abs(np.diff(ends[1], axis=0)).max(axis=1) > 1e-3)


def test_agents_sample_in_the_first_of_every_few_rounds():
    algorithm = FedPPO(1.0, 0.2, m=4, epochs=1, optimizer="sgd", rounds_per_batch=3).fitted_to(AGENT(GRID.task(0)))
    assert [algorithm.trajectories_after(k) for k in range(8)] == [0, 4, 4, 4, 8, 8, 8, 12]
    server, state = algorithm.init(THETA)
    seen = []
    for k in range(7):
        _, state = algorithm.client(server.message, state, AGENT(GRID.task(0)), jax.random.key(k))
        seen.append(np.asarray(state.batches[1].trajectories.action))
    same = [np.array_equal(a, b) for a, b in itertools.pairwise(seen)]
    assert same == [True, True, False, True, True, False]


def test_a_batch_from_which_the_policy_has_diverged_is_not_used_again():
    algorithm = FedPPO(1.0, 5.0, m=4, epochs=1, optimizer="sgd", rounds_per_batch=3, stop_divergence=1e-9)
    algorithm, agent = algorithm.fitted_to(AGENT(GRID.task(0))), AGENT(GRID.task(0))
    server, state = algorithm.init(THETA)
    first, state = algorithm.client(server.message, state, agent, jax.random.key(0))
    second, state = algorithm.client(first, state, agent, jax.random.key(1))
    third, state = algorithm.client(second, state, agent, jax.random.key(2))
    fresh, _ = algorithm.client(third, state, agent, jax.random.key(3))
    assert np.abs(first.learned.theta - THETA).max() > 1e-3
    np.testing.assert_array_equal(first.learned.theta, third.learned.theta)
    assert np.abs(fresh.learned.theta - third.learned.theta).max() > 1e-3


def test_states_that_do_not_fit_the_agents_are_rejected():
    algorithm = FedPPO(1.0, 0.1, m=3, rounds_per_batch=2)
    server, state = algorithm.init(THETA)
    with pytest.raises(pf.UserError, match="need states of algorithm"):
        algorithm.client(server.message, state, AGENT(GRID.task(0)), jax.random.key(0))


def config(**algorithm):
    parts = {"fleet": {"env": "gridworld", "width": 3, "horizon": 5}, "policy": {"name": "table"}}
    algorithm = {"name": "promp", "alpha": 1.0, "beta": 0.01, **algorithm}
    return make_config({"name": "tried", "seeds": 1, "rounds": 1, "algorithm": algorithm, **parts})


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"clip_ratio": 0.0}, "clip_ratio must be a finite number > 0"),
        ({"stop_divergence": -1.0}, "stop_divergence must be a finite number > 0"),
        ({"divergence_weight": -1.0}, "divergence_weight must be a finite number >= 0"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"anneal": 0}, "anneal must be at least 1"),
        ({"optimizer": "adma"}, "there is no optimizer 'adma'"),
        ({"variant": "exact"}, "should be 'first-order' or 'differentiated'"),
        ({"alpha": 0.0, "learn_alpha": "per-parameter"}, "learn_alpha multiplies alpha, which is 0"),
        ({"rounds_per_batch": 0}, "rounds_per_batch must be at least 1"),
        ({"rounds_per_batch": 2, "local_steps": 3}, "rounds_per_batch = 2 keeps the batches of one local step"),
    ],
)
def test_bad_settings_are_one_sentence_before_compiling(algorithm, said, untyped):
    with pytest.raises(pf.UserError, match=said):
        _ = config(**algorithm).experiment


def test_kept_batches_need_every_agent_in_every_round():
    algorithm = ProMP(1.0, 0.1, m_in=3, m_out=3, rounds_per_batch=2)
    with pytest.raises(pf.UserError, match="rounds_per_batch = 2 needs every agent in every round"):
        pf.Experiment(GRID, TABLE, algorithm, participation=0.5)


def test_agents_with_examples_and_policies_without_a_divergence_are_rejected():
    with pytest.raises(pf.UserError, match="FedPPO needs agents with episodes"):
        FedPPO(1.0, 0.1).check_supports(classification(agents=2, held_out=0), TABLE)
    bare = dataclasses.replace(TABLE)
    object.__setattr__(bare, "divergence", None)
    with pytest.raises(pf.UserError, match="FedPPO limits the divergence of a policy, which TableSoftmax"):
        FedPPO(1.0, 0.1).check_supports(GRID, bare)
