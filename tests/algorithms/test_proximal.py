"""pFedMe and pMeta-RL: between LocalPG and FedAvgPG, which are their ends at proximal weights 0 and infinity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratic import Quadratic
from simulations import simulation_of
from tiers import some_slow

import perfedrl as pf
from perfedrl.algorithms import PFedMe, PMetaRL
from perfedrl.algorithms.proximal import ProximalState
from perfedrl.exact.tabular import Exact

FLEET, POLICY = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)
KEY, INFINITE = jax.random.key(7), float("inf")


@pytest.fixture(scope="module")
def one_policy_for_all():
    return simulated(pf.FedAvgPG(0.0, 0.5))


@pytest.fixture(params=some_slow([PFedMe, PMetaRL], [PFedMe]))
def method(request):
    return request.param


def trained(algorithms, rounds=3, exactly=False):
    agent = Exact(POLICY) if exactly else None
    simulation = simulation_of(FLEET, POLICY, algorithms, [5] * len(algorithms), agent)
    return simulation.advance(simulation.start(), 0, rounds)


def simulated(algorithm):
    return pf.simulate(FLEET, POLICY, algorithm, rounds=40, seeds=1, every=40, noiseless=True).history


def deployed(algorithm, state, replica, m):
    message, clients = jax.tree.map(lambda x: x[replica], (state.server.message, state.clients))
    client = jax.tree.map(lambda x: x[2], clients)
    return algorithm.personalize(message, client, Quadratic(jnp.ones((9, 4))), KEY, m)


def test_at_weight_0_it_is_local_and_at_infinity_shared_trajectory_for_trajectory(method):
    steps = 2 if method is PFedMe else 1  # of pMeta-RL a round is one step of the shared policy
    ends = [method(0.3, 0.3, weight=weight, local_steps=steps, m=4) for weight in (0.0, INFINITE)]
    after = trained(ends)
    local = trained([pf.LocalPG(0.3, local_steps=steps, m=4)] * 2)
    shared = trained([pf.FedAvgPG(0.0, 0.3, local_steps=steps, m=4)] * 2)
    np.testing.assert_array_equal(after.clients.theta[0], local.clients[0])
    np.testing.assert_array_equal(after.server.message[0], POLICY.init())
    np.testing.assert_array_equal(after.server.message[1], shared.server.message[1])
    assert np.abs(shared.server.message).max() > 0.01
    for m in (0, 4):
        np.testing.assert_array_equal(deployed(ends[0], after, 0, m), local.clients[0, 2])
        np.testing.assert_array_equal(deployed(ends[1], after, 1, m), shared.server.message[1])


def test_without_noise_the_limits_are_reached_from_inside(method):
    """In double precision weights of 1e-9 and 1e12 are as 0 and infinity, also where a round has several steps."""
    replicas = [method(0.3, 0.2, weight=weight, local_steps=3, m=1) for weight in (1e-9, 1e12, INFINITE)]
    after = trained(replicas, exactly=True)
    local = trained([pf.LocalPG(0.3, local_steps=3)], exactly=True)
    steps = 3 if method is PFedMe else 1
    shared = trained([pf.FedAvgPG(0.0, 0.2, local_steps=steps)], exactly=True)
    np.testing.assert_allclose(after.clients.theta[0], local.clients[0], rtol=0, atol=1e-8)
    for replica in (1, 2):
        np.testing.assert_allclose(after.server.message[replica], shared.server.message[0], rtol=0, atol=1e-10)


def test_a_step_of_pfedme_by_hand():
    """With alpha = weight = 1, s = 1/2: from w = 0 to the place 4, theta = 2 and w = beta (2 - 0), then as below."""
    algorithm = PFedMe(1.0, 0.25, weight=1.0, local_steps=2, m=1)
    server, start = algorithm.init(jnp.zeros(1))
    upload, after = algorithm.client(server.message, start, Quadratic(jnp.asarray([4.0])), KEY)
    # theta follows w from 0 to 1/2 half of the way, 2.25; a step leads to (2.25 + 1.75) / 2 + 0.5 / 2 = 2.25 again.
    np.testing.assert_allclose(after.theta, [2.25])
    np.testing.assert_allclose(after.anchor, [0.5])
    np.testing.assert_allclose(upload, [0.5 + 0.25 * (2.25 - 0.5)])
    mixed = PFedMe(1.0, 0.25, server_mix=0.5).server(server, jnp.asarray([[2.0], [4.0]]), jnp.ones(2))
    np.testing.assert_allclose(mixed.message, [1.5])


def test_a_round_of_pmeta_rl_by_hand():
    """With alpha = weight = 1, s = 1/2: from theta = w = 0 to the place 4, theta = 2 after every step."""
    algorithm = PMetaRL(1.0, 0.25, weight=1.0, local_steps=2, m=1)
    server, start = algorithm.init(jnp.zeros(1))
    agent = Quadratic(jnp.asarray([4.0]))
    upload, after = algorithm.client(server.message, start, agent, KEY)
    np.testing.assert_allclose(after.theta, [2.0])
    np.testing.assert_allclose(upload, [0.25 * 2], err_msg="beta weight (theta - w)")
    upload, after = algorithm.client(jnp.ones(1), after, agent, KEY)
    np.testing.assert_allclose(after.theta, [2.5], err_msg="the maximizer of -(x-4)^2/2 - (x-1)^2/2")
    np.testing.assert_allclose(upload, [1 + 0.25 * 1.5])


def test_many_proximal_steps_find_the_maximizer_and_the_envelopes_gradient(x64):
    """Of a bowl the maximizer is (place + weight w) / (1 + weight), and the envelope's gradient weight (theta - w)."""
    algorithm = PFedMe(0.4, 1.0, weight=3.0, proximal_steps=60, local_steps=1, m=1)
    server, start = algorithm.init(jnp.asarray([2.0]))
    upload, after = jax.jit(algorithm.client)(server.message, start, Quadratic(jnp.asarray([-6.0])), KEY)
    np.testing.assert_allclose(after.theta, [0.0], atol=1e-12)
    np.testing.assert_allclose(upload, [2.0 + 3.0 * (0.0 - 2.0)], rtol=1e-12)


def test_more_proximal_steps_at_infinity_are_fedavg_still():
    """All but the last are wasted there: theta is w, whose gradient is what moves it."""
    several = trained([PFedMe(0.3, 0.2, weight=INFINITE, proximal_steps=2, local_steps=2, m=1)], exactly=True)
    shared = trained([pf.FedAvgPG(0.0, 0.2, local_steps=2)], exactly=True)
    np.testing.assert_allclose(several.server.message, shared.server.message, rtol=0, atol=1e-14)


def test_an_agent_that_never_took_part_takes_proximal_steps_from_the_shared_policy(method):
    algorithm = method(1.0, 0.25, weight=1.0, local_steps=1, m=1)
    _, fresh = algorithm.init(jnp.asarray([9.0]))
    w, agent = jnp.zeros(1), Quadratic(jnp.asarray([4.0]))
    np.testing.assert_array_equal(algorithm.personalize(w, fresh, agent, KEY, 0), w)
    np.testing.assert_allclose(algorithm.personalize(w, fresh, agent, KEY, 5), [2.0])
    stuck, free = (method(1.0, 0.25, weight=weight, local_steps=1, m=1) for weight in (INFINITE, 0.0))
    np.testing.assert_array_equal(stuck.personalize(w, fresh, agent, KEY, 5), w)
    np.testing.assert_allclose(free.personalize(w, fresh, agent, KEY, 5), [4.0])
    _, after = algorithm.client(w, fresh, agent, KEY)
    np.testing.assert_allclose(after.theta, [2.0], err_msg="it starts training from w too")


def test_a_personal_policy_follows_the_shared_one_as_another_step_would_with_the_same_gradient(method):
    algorithm = method(0.5, 0.25, weight=2.0, local_steps=1, m=1)
    own = ProximalState(jnp.asarray([1.0]), jnp.asarray([3.0]), jnp.ones(()))
    moved = algorithm.personalize(jnp.asarray([7.0]), own, Quadratic(jnp.zeros(1)), KEY, 5)
    np.testing.assert_allclose(moved, [1.0 + 0.5 * 4.0], err_msg="s = 1/2, and m does not matter")


def test_agents_climb_above_the_shared_policy(method, one_policy_for_all):
    near = simulated(method(0.5, 0.5, weight=0.5))
    assert (near.after[0, -1] > one_policy_for_all.after[0, -1]).all()
    assert near.before[0, -1].mean() > near.before[0, 0].mean(), "and the shared one learns"


def test_bad_weights_are_refused(method):
    for weight in (-1.0, float("nan")):
        with pytest.raises(pf.UserError, match="weight"):
            method(0.1, 0.1, weight=weight)
    with pytest.raises(pf.UserError, match="alpha"):
        method(0.0, 0.1)
    with pytest.raises(pf.UserError, match="server_mix"):
        PFedMe(0.1, 0.1, server_mix=0.0)
    with pytest.raises(pf.UserError, match="proximal_steps"):
        PFedMe(0.1, 0.1, proximal_steps=0)
