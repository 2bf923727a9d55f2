"""Methods that learn one shared policy in other ways than FedAvg-PG does: Fast-FedPG, and where local steps rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulations import simulation_of
from untraced import Untraced

import perfedrl as pf
from perfedrl.algorithms import FastFedPG
from perfedrl.estimators import Sampled
from perfedrl.exact.tabular import Exact
from perfedrl.theory.noiseless_limits import noiseless_limit
from perfedrl.theory.witness import attracting_witness

FLEET, POLICY = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)


def final(algorithm, rounds, fleet=FLEET, policy=POLICY, agent=None):
    simulation = simulation_of(fleet, policy, [algorithm], [3], agent)
    return simulation.advance(simulation.start(), 0, rounds).server.message


def noiseless(algorithm, rounds, fleet=FLEET, policy=POLICY):
    return jax.tree.map(lambda x: x[0], final(algorithm, rounds, fleet, policy, Exact(policy)))


def test_corrected_local_steps_converge_to_the_optimum_of_the_mean_return_and_plain_ones_do_not():
    """Two bandits with opposed rewards and curvatures: f has one maximum, at theta = -0.2310491 (Prop. 2's proof)."""
    fleet, policy = attracting_witness()
    drifting = noiseless_limit(fleet, policy, pf.FedAvgPG(0.5, 0.1, local_steps=20))
    corrected = noiseless_limit(fleet, policy, FastFedPG(0.5, 0.1, local_steps=20))
    assert max(drifting.moved, corrected.moved) < 1e-12
    assert drifting.bias == pytest.approx(0.0543559, abs=1e-6)
    assert corrected.bias < 1e-12
    assert corrected.theta[0] == pytest.approx(-0.2310491, abs=1e-7)
    assert corrected.value - drifting.value == pytest.approx(0.0060773, abs=1e-6)


def test_fast_fedpg_by_hand():
    beta, zero = 0.4, np.zeros((9, 4))
    tasks = [FLEET.task(i) for i in range(FLEET.agents)]
    own = [pf.exact.gradient(task, zero) for task in tasks]
    mean = np.mean(own, axis=0)
    first = beta * mean
    ends = [first + beta * (pf.exact.gradient(task, first) - g + mean) for task, g in zip(tasks, own, strict=True)]
    message = noiseless(FastFedPG(1.0, beta, local_steps=2), 2)
    np.testing.assert_allclose(message.gradient, mean, rtol=0, atol=1e-14)
    np.testing.assert_allclose(message.theta, np.mean(ends, axis=0), rtol=0, atol=1e-14)
    assert message.round == 2


def test_among_identical_agents_fast_fedpg_is_fedavg_pg():
    fleet, policy = pf.envs.random_mdps(agents=2, states=3, actions=2, heterogeneity=0.0), pf.TableSoftmax(3, 2)
    fast = noiseless(FastFedPG(1.0, 0.3, local_steps=4), 10, fleet, policy).theta
    plain = noiseless(pf.FedAvgPG(1.0, 0.3, local_steps=4), 5, fleet, policy)
    np.testing.assert_allclose(fast, plain, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_with_one_local_step_fast_fedpg_is_fedavg_pg_with_the_anchor_gradient():
    one = {"local_steps": 1, "m": 4}
    fast, plain = FastFedPG(1.0, 0.3, **one), pf.FedAvgPG(1.0, 0.3, **one)
    np.testing.assert_allclose(final(fast, 2).theta, final(plain, 1), rtol=0, atol=1e-7, err_msg="the same episodes")
    np.testing.assert_allclose(noiseless(fast, 6).theta, noiseless(plain, 3), rtol=0, atol=1e-14)
    assert fast.trajectories_after(2) == plain.trajectories_per_round


def test_fast_fedpg_counts_what_even_and_odd_rounds_cost():
    fast = FastFedPG(1.0, 0.3, local_steps=3, m=5, m_anchor=7)
    assert [fast.trajectories_after(k) for k in range(5)] == [0, 7, 7 + 10, 14 + 10, 14 + 20]
    assert fast.trajectories_per_round == 10
    assert FastFedPG(1.0, 0.3, m=5).trajectories_after(1) == 5, "m_anchor is m where it is not given"


@pytest.fixture
def sampled():
    return Sampled(POLICY)(FLEET.task(0))


def test_an_agent_that_missed_the_even_round_steps_uncorrected(sampled):
    fast = FastFedPG(1.0, 0.3, local_steps=2, m=20)
    server, absent = fast.init(jnp.zeros((9, 4)))
    client = jax.jit(lambda message, state: fast.client(message, state, sampled, jax.random.key(0)))
    g, present = client(server.message, absent)
    assert np.abs(g).max() > 0.01
    odd = server.message._replace(gradient=0.5 * g, round=jnp.ones(()))
    first = 0.15 * g
    key = jax.random.split(jax.random.key(0), (2, 3))[0, 2]
    plain = first + 0.3 * sampled.gradient(first, key, 20)
    np.testing.assert_allclose(client(odd, absent)[0], plain, rtol=0, atol=1e-6)
    np.testing.assert_allclose(client(odd, present)[0], plain + 0.3 * (0.5 * g - g), rtol=0, atol=1e-6)


def test_agents_that_jax_cannot_trace_compute_the_same(sampled):
    fast = FastFedPG(1.0, 0.3, local_steps=3, m=20)
    server, state = fast.init(jnp.zeros((9, 4)))
    compiled = jax.jit(lambda message, state: fast.client(message, state, sampled, jax.random.key(0)))
    message = server.message
    for _ in range(2):
        expected, after = compiled(message, state)
        came, state = fast.client(message, state, Untraced(sampled), jax.random.key(0))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), (came, state), (expected, after))
        message = fast.server(server._replace(message=message), came[None], jnp.ones(1)).message
    np.testing.assert_allclose(message.theta, came, rtol=0, atol=1e-7)


def test_private_uploads_of_fast_fedpg_are_clipped_as_gradients_and_as_displacements(sampled):
    private = pf.algorithms.Private(FastFedPG(1.0, 0.3, local_steps=2, m=20), 1e-3, 0.0)
    server, state = private.init(jnp.ones((9, 4)))
    client = jax.jit(lambda message, state: private.client(message, state, sampled, jax.random.key(0)))
    g, state = client(server.message, state)
    assert np.linalg.norm(g) == pytest.approx(1e-3, rel=1e-4)
    there, _ = client(server.message._replace(gradient=jnp.ones((9, 4)), round=jnp.ones(())), state)
    assert np.linalg.norm(there - 1) == pytest.approx(1e-3, rel=1e-2)
