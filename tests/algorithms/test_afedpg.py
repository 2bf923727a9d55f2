"""AFedPG: what arrives moves the server, however old; what has not arrived counts for nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulations import simulation_of
from untraced import Untraced

import perfedrl as pf
from perfedrl.algorithms import AFedPG
from perfedrl.algorithms.afedpg import GradientArrival
from perfedrl.estimators import Sampled
from perfedrl.exact.tabular import Exact

FLEET, POLICY = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)
PLAIN = AFedPG(1.0, 0.5, m=5, delays="none", momentum=1.0, decay=0.0, normalize=False)


def run(algorithm, rounds, agent=None):
    simulation = simulation_of(FLEET, POLICY, [algorithm], [3], agent)
    return jax.tree.map(lambda x: x[0], simulation.advance(simulation.start(), 0, rounds))


def test_without_delays_momentum_and_normalization_it_is_fedavg_pg_with_one_local_step():
    plain = pf.FedAvgPG(1.0, 0.5, local_steps=1, m=5)
    sampled = run(PLAIN, 1).server.message.theta
    assert np.abs(sampled).max() > 0.01
    np.testing.assert_allclose(sampled, run(plain, 1).server.message, rtol=0, atol=1e-7, err_msg="the same episodes")
    exact = run(PLAIN, 5, Exact(POLICY)).server.message
    np.testing.assert_allclose(exact.theta, run(plain, 5, Exact(POLICY)).server.message, rtol=0, atol=1e-14)
    np.testing.assert_array_equal(exact.ahead, exact.theta, "weight 1 does not look ahead")
    assert PLAIN.trajectories_after(7) == 7 * 5


def arrivals(gradients, since, arrived):
    """Uploads as agents send them: zeros where nothing arrived."""
    gradients, since, arrived = (jnp.asarray(x, float) for x in (gradients, since, arrived))
    return GradientArrival(gradients * arrived[:, None], since * arrived, arrived)


def test_two_ticks_of_the_server_by_hand():
    """Weight 0.8 / (1 + t): 0.8 for a gradient at t = 0; then 0.4, the first tick's parameters being from t = 1."""
    server, _ = (algorithm := AFedPG(1.0, 0.5, momentum=0.8, decay=1.0)).init(jnp.zeros(2))
    first = algorithm.server(server, arrivals([[3.0, 4.0], [9.0, 9.0]], [0.0, 5.0], [1.0, 0.0]), jnp.ones(2))
    np.testing.assert_allclose(first.private, [2.4, 3.2], rtol=1e-6)
    np.testing.assert_allclose(first.message.theta, [0.3, 0.4], rtol=1e-6)
    np.testing.assert_allclose(first.message.ahead, np.asarray([0.3, 0.4]) * (1 + 0.2 / 0.8), rtol=1e-6)
    second = algorithm.server(
        first, arrivals([[-1.6, -4.8], [2.0, 0.0]], [1.0, 1.0], [1.0, 1.0]), jnp.asarray([1.0, 3.0])
    )
    d = 0.6 * np.asarray([2.4, 3.2]) + 0.4 * np.asarray([(-1.6 + 6.0) / 4, -4.8 / 4])
    step = 0.5 * d / np.linalg.norm(d)
    np.testing.assert_allclose(second.private, d, rtol=1e-6)
    np.testing.assert_allclose(second.message.theta, np.asarray([0.3, 0.4]) + step, rtol=1e-5)
    np.testing.assert_allclose(second.message.ahead, np.asarray([0.3, 0.4]) + step * (1 + 0.6 / 0.4), rtol=1e-5)
    assert second.message.tick == 2


def test_the_order_of_arrivals_does_not_matter_and_what_has_not_arrived_counts_for_nothing():
    algorithm = AFedPG(1.0, 0.5)
    server, _ = algorithm.init(jnp.zeros(3))
    drawn, weights = jax.random.normal(jax.random.key(0), (4, 3)), jnp.asarray([1.0, 2.0, 3.0, 4.0])
    came = arrivals(drawn, [0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 1.0, 0.0])
    after = algorithm.server(server, came, weights)
    others = (
        algorithm.server(server, jax.tree.map(lambda x: x[::-1], came), weights[::-1]),
        algorithm.server(server, jax.tree.map(lambda x: x[jnp.asarray([0, 2])], came), weights[jnp.asarray([0, 2])]),
    )
    for other in others:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), after, other)


def test_a_tick_without_arrivals_moves_nothing_but_the_clock():
    algorithm = AFedPG(1.0, 0.5)
    server, _ = algorithm.init(jnp.zeros(3))
    before = algorithm.server(server, arrivals(np.ones((2, 3)), [0.0, 0.0], [1.0, 1.0]), jnp.ones(2))
    after = algorithm.server(before, arrivals(np.ones((2, 3)), [0.0, 0.0], [0.0, 0.0]), jnp.ones(2))
    still = lambda state: (state.private, state.message.theta, state.message.ahead)  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, still(before), still(after))
    assert after.message.tick == before.message.tick + 1


@pytest.mark.slow
def test_an_agent_delivers_the_gradient_at_the_parameters_it_began_with():
    algorithm, agent = AFedPG(1.0, 0.5, m=20), Sampled(POLICY)(FLEET.task(0))
    server, idle = algorithm.init(jnp.zeros((9, 4)))
    now = server.message._replace(ahead=jnp.full((9, 4), 9.0), tick=jnp.asarray(6.0))
    old = jax.random.normal(jax.random.key(1), (9, 4))
    client = jax.jit(lambda state: algorithm.client(now, state, agent, jax.random.key(0)))
    at_work = idle._replace(params=old, since=jnp.asarray(4.0), left=jnp.ones(()))
    nothing, later = client(at_work)
    assert all((x == 0).all() for x in jax.tree.leaves(nothing))
    assert later.left == 0
    came, after = client(later)
    key = jax.random.split(jax.random.key(0), (1, 3))[0, 2]
    np.testing.assert_allclose(came.gradient, agent.gradient(old, key, 20), rtol=0, atol=1e-6)
    assert np.abs(came.gradient).max() > 0.01
    assert (came.since, came.arrived, after.left) == (4, 1, -1)
    played, _ = algorithm.client(now, later, Untraced(agent), jax.random.key(0))
    np.testing.assert_allclose(played.gradient, came.gradient, rtol=0, atol=1e-6)
    _, begun = client(after)
    np.testing.assert_array_equal(begun.params, now.ahead, "it downloads afresh")
    assert begun.since == 6


@pytest.mark.parametrize(("delays", "mean"), [("uniform", 1.5), ("geometric", 3.0), ("geometric", 0.0), ("none", 2.0)])
def test_delays_are_whole_with_the_mean_asked_for(delays, mean):
    algorithm = AFedPG(1.0, 0.5, m=4, delays=delays, mean_delay=mean)
    drawn = np.asarray(jax.jit(jax.vmap(algorithm.delay))(jax.random.split(jax.random.key(0), 20_000)))
    expected = 0 if delays == "none" else mean
    assert drawn.mean() == pytest.approx(expected, abs=4 * drawn.std() / np.sqrt(20_000) + 1e-9), "4 standard errors"
    assert (drawn == np.round(drawn)).all()
    assert drawn.min() == 0
    assert delays != "uniform" or drawn.max() == 2 * mean
    assert algorithm.trajectories_after(100) == round(400 / (1 + expected))


def test_delayed_runs_are_the_same_bits_every_time_and_agents_work_at_their_own_pace():
    delayed = AFedPG(1.0, 0.1, m=4, delays="geometric", mean_delay=2.0)
    one, other = run(delayed, 6), run(delayed, 6)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert len(set(one.clients.since.tolist())) > 1
    assert np.abs(one.server.message.theta).max() > 0


@pytest.mark.parametrize(
    "change",
    [{"momentum": 0.0}, {"momentum": 1.5}, {"decay": -1.0}, {"mean_delay": -1.0}, {"mean_delay": 0.3}, {"m": 0}],
)
def test_bad_settings_are_refused(change):
    with pytest.raises(pf.UserError, match=next(iter(change))):
        AFedPG(1.0, 0.5, **change)


def test_unknown_delays_are_refused(untyped):
    with pytest.raises(pf.UserError, match="'uniform'"):
        AFedPG(1.0, 0.5, delays="poisson")


@pytest.mark.parametrize("around", [{"privacy": {"clip": 1.0, "noise": 0.1}}, {"aggregation": "median"}])
def test_wrappers_that_need_whole_messages_are_rejected_around_afedpg(around):
    settings = {"name": "x", "seeds": 1, "rounds": 1, "fleet": {"env": "gridworld"}, "policy": {"name": "table"}}
    with pytest.raises(pf.UserError, match=r"send nothing in some rounds.*fedavg-pg"):
        pf.make_config({**settings, "algorithm": {"name": "afedpg", "alpha": 1.0, "beta": 0.1}, **around})
