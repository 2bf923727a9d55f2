"""Mixing: between LocalPG and FedAvgPG, which are its ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratic import Quadratic
from simulations import simulation_of

import perfedrl as pf
from perfedrl.algorithms import Mixing
from perfedrl.algorithms.mixing import MixingState
from perfedrl.compilation import jit
from perfedrl.estimators import Sampled
from perfedrl.estimators.zeroth_order import ZerothOrder
from perfedrl.exact.tabular import Exact

FLEET, POLICY = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)
KEY = jax.random.key(7)


def state(v, weight):
    return MixingState(jnp.asarray(v), jnp.asarray(weight), jnp.ones(()))


def trained(algorithms, rounds=3):
    simulation = simulation_of(FLEET, POLICY, algorithms, [5] * len(algorithms))
    return simulation.advance(simulation.start(), 0, rounds)


def test_at_a_fixed_weight_of_0_it_is_local_and_at_1_fedavg_trajectory_for_trajectory():
    ends = trained([Mixing(0.0, 0.3, weight=weight, local_steps=2, m=4) for weight in (0.0, 1.0)])
    local = trained([pf.LocalPG(0.3, local_steps=2, m=4)] * 2)
    shared = trained([pf.FedAvgPG(0.0, 0.3, local_steps=2, m=4)] * 2)
    np.testing.assert_array_equal(ends.clients.v[0], local.clients[0])
    np.testing.assert_array_equal(ends.server.message, shared.server.message, "whatever the weight")
    np.testing.assert_array_equal(ends.clients.weight, [[0.0] * FLEET.agents, [1.0] * FLEET.agents])
    assert np.abs(shared.server.message).max() > 0.01

    def deployed(replica):
        message, client = jax.tree.map(lambda x: x[replica], (ends.server.message, ends.clients))
        client = jax.tree.map(lambda x: x[2], client)
        agent = Sampled(POLICY)(FLEET.task(2))
        return Mixing(0.0, 0.3, weight=float(replica)).personalize(message, client, agent, KEY, 4)

    np.testing.assert_array_equal(deployed(0), local.clients[0, 2])
    np.testing.assert_array_equal(deployed(1), shared.server.message[0])


def test_one_step_by_hand():
    """At w = (1, 0), v = (0, 2), lambda = 1/4: theta = (1/4, 3/2), and g(theta) = (3/4, -1/2) to the place (1, 1)."""
    algorithm = Mixing(0.0, 0.5, weight=0.9, weight_rate=0.1, local_steps=1, m=1)
    w, own = jnp.asarray([1.0, 0.0]), state([0.0, 2.0], 0.25)
    upload, after = algorithm.client(w, own, Quadratic(jnp.ones(2)), KEY)
    np.testing.assert_allclose(upload, [1.0, 0.5], rtol=1e-6, err_msg="w + 0.5 (0, 1)")
    np.testing.assert_allclose(after.v, [0.28125, 1.8125], rtol=1e-6, err_msg="v + 0.5 * 0.75 * (3/4, -1/2)")
    cosine = (0.75 * 1 + -0.5 * -2) / np.hypot(0.75, 0.5) / np.hypot(1, 2)
    np.testing.assert_allclose(after.weight, 0.25 + 0.1 * cosine, rtol=1e-6)


@pytest.mark.parametrize(("place", "weight"), [(9.0, 0.6), (-9.0, 0.4), (0.0, 0.4)])
def test_the_weight_goes_where_the_return_grows_by_no_more_than_its_rate(place, weight):
    """On a line a cosine is 1 or -1: w = 1 and v = -1/2 mix to 1/4."""
    algorithm = Mixing(0.0, 0.5, weight_rate=0.1, local_steps=1, m=1)
    own = state([-0.5], 0.5)
    _, after = algorithm.client(jnp.ones(1), own, Quadratic(jnp.asarray([place])), KEY)
    np.testing.assert_allclose(after.weight, weight, rtol=1e-6)


def test_weights_stay_from_0_to_1_and_do_not_move_at_rate_0():
    for rate, start, place, end in ((1.0, 0.7, 9.0, 1.0), (1.0, 0.3, -9.0, 0.0), (0.0, 0.3, -9.0, 0.3)):
        algorithm = Mixing(0.0, 0.1, weight_rate=rate, local_steps=2, m=1)
        _, after = algorithm.client(jnp.ones(1), state([-0.5], start), Quadratic(jnp.asarray([place])), KEY)
        np.testing.assert_allclose(after.weight, end, rtol=1e-6)


def test_zeroth_order_steps_are_those_of_an_agent_that_has_no_other_gradients():
    settings = {"weight_rate": 0.1, "local_steps": 2, "m": 5}
    by_points = Mixing(0.5, 0.3, gradient="zeroth-order", radius=3.0, **settings)
    plain = Mixing(0.5, 0.3, **settings)
    w, own = jnp.zeros((9, 4)), state(jax.random.normal(KEY, (9, 4)), 0.4)

    def work(algorithm, agent):
        both = lambda key: (algorithm.client(w, own, agent, key), algorithm.personalize(w, own, agent, key, 4))  # noqa: E731
        return jit(both)(KEY)

    one = work(by_points, Sampled(POLICY)(FLEET.task(1)))
    other = work(plain, ZerothOrder(POLICY, radius=3.0)(FLEET.task(1)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)
    assert np.abs(np.asarray(one[0][0])).max() > 0
    assert by_points.trajectories_per_round == 2 * 2 * 4
    assert plain.trajectories_per_round == 2 * 2 * 5
    agent = Sampled(POLICY)(FLEET.task(1))
    alone = [by_points.personalize(w, own, agent, KEY, m) for m in (0, 1)]
    np.testing.assert_array_equal(*alone, "one trajectory makes no difference of two")


def test_what_an_agent_deploys_is_its_mixture_and_one_step():
    algorithm = Mixing(0.5, 0.3, weight=0.9)
    w, own, agent = jnp.asarray([1.0, 0.0]), state([0.0, 2.0], 0.25), Quadratic(jnp.ones(2))
    np.testing.assert_allclose(algorithm.personalize(w, own, agent, KEY, 0), [0.25, 1.5])
    np.testing.assert_allclose(algorithm.personalize(w, own, agent, KEY, 3), [0.25 + 0.375, 1.5 - 0.25])
    _, fresh = algorithm.init(jnp.asarray([7.0, 7.0]))
    np.testing.assert_array_equal(algorithm.personalize(w, fresh, agent, KEY, 0), w, "never took part: w alone")
    np.testing.assert_allclose(algorithm.personalize(w, fresh, agent, KEY, 3), [1.0, 0.5])


def test_an_agent_that_comes_later_starts_from_the_shared_parameters_and_its_lanes_weight():
    algorithm = Mixing(0.0, 0.5, weight=0.25, local_steps=1, m=1)
    _, fresh = algorithm.init(jnp.asarray([7.0, 7.0]))
    w = jnp.asarray([1.0, 0.0])
    _, after = algorithm.client(w, fresh, Quadratic(jnp.ones(2)), KEY)
    np.testing.assert_allclose(after.v, [1.0, 0.375], rtol=1e-6, err_msg="w + 0.5 * 0.75 * (0, 1)")
    assert float(after.weight) == 0.25


def test_among_different_agents_every_agent_gains_from_personal_parameters():
    """Without noise: each agent's mixture climbs above the one shared policy."""
    result = lambda algorithm: pf.simulate(  # noqa: E731
        FLEET, POLICY, algorithm, rounds=40, seeds=1, every=40, noiseless=True
    ).history.after[0, -1]
    mixed = result(Mixing(0.0, 0.5, weight=0.5, weight_rate=0.01))
    shared = result(pf.FedAvgPG(0.0, 0.5))
    assert (mixed > shared).all()


def test_what_it_cannot_do_is_refused(untyped):
    with pytest.raises(pf.UserError, match="the nearest choice is m = 2"):
        Mixing(0.0, 0.3, gradient="zeroth-order", m=1)
    with pytest.raises(pf.UserError, match="'first-order' or 'zeroth-order'"):
        Mixing(0.0, 0.3, gradient="second-order")
    for name, value in (("weight", 1.5), ("weight", float("nan")), ("weight_rate", -0.1), ("radius", 0.0)):
        with pytest.raises(pf.UserError, match=name):
            Mixing(0.0, 0.3, **{name: value})
    algorithm = Mixing(0.0, 0.3, gradient="zeroth-order")
    server, start = algorithm.init(jnp.zeros((9, 4)))
    with pytest.raises(pf.UserError, match="show their trajectories"):
        algorithm.client(server.message, start, Exact(POLICY)(FLEET.task(0)), KEY)
