"""Shared representation: heads are the agents' own, and only what is under them is sent."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratic import Quadratic
from simulations import simulation_of

import perfedrl as pf
from perfedrl.algorithms import FedAvgPG, Private, Robust, SharedRepresentation
from perfedrl.algorithms.aggregation import Median
from perfedrl.algorithms.shared_representation import HeadState, heads
from perfedrl.compilation import jit
from perfedrl.experiments.files import named_leaves
from perfedrl.policies import ActorCritic, GaussianMLP, MLPSoftmax, Normalized

KEY = jax.random.key(7)
POLICY = MLPSoftmax((2, 3, 4))
START = POLICY.init(jax.random.key(1))


class Product(eqx.Module):
    """J(theta) = the sum of all of the head times the sum of all of the body: each one's gradient needs the other."""

    traceable = True

    def gradient(self, params, key, m):
        total = lambda layer: sum(jnp.sum(x) for x in layer.values())  # noqa: E731
        return jax.grad(lambda params: total(params[0]) * total(params[1]))(params)

    def curvature(self, params, v, key, m):
        return v

    def value(self, params, key, m):
        return jnp.zeros(())


def same(one, two, **tolerance):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 1e-6, **tolerance}), one, two)


def layer(weight, bias):
    return {"weight": jnp.asarray([[weight]]), "bias": jnp.asarray([bias])}


def test_a_round_by_hand__the_head_moves_first_and_the_representation_sees_it():
    """Sums are 3 below and 1 above. A step of the head adds 0.1 * 3 to both, 1.6; the body's then 0.5 * 1.6."""
    algorithm = SharedRepresentation(0.0, 0.5, head_beta=0.1, head_steps=1, local_steps=1, m=1)
    server, start = algorithm.init((layer(1.0, 2.0), layer(0.5, 0.5)))
    upload, after = algorithm.client(server.message, start, Product(), KEY)
    same(after.head[1], layer(0.8, 0.8))
    same(upload[0], layer(1.8, 2.8))
    assert after.head[0] == {"weight": None, "bias": None}
    assert [x.shape for x in jax.tree.leaves(upload[1])] == [(0,), (0,)]


def test_uploads_carry_no_head_and_do_not_depend_on_its_place():
    """Of a bowl the gradient below is that below alone: whatever the heads are, uploads are the same."""
    algorithm = SharedRepresentation(0.1, 0.3, head_steps=2, local_steps=2, m=1)
    server, start = algorithm.init(START)
    places = [(START[0], jax.tree.map(lambda x, c=c: x + c, START[1])) for c in (1.0, 1e3)]
    (one, mine), (other, yours) = (algorithm.client(server.message, start, Quadratic(place), KEY) for place in places)
    same(one, other, rtol=0)
    assert {name for name, x in named_leaves(one).items() if not x.size} == {"1.bias", "1.weight"}
    assert np.abs(mine.head[1]["weight"] - yours.head[1]["weight"]).min() > 1
    assert jax.tree.structure(algorithm.unchanged_upload(server.message)) == jax.tree.structure(one)


def test_the_server_averages_representations_and_keeps_the_start_head():
    algorithm = SharedRepresentation(0.1, 0.3, head_steps=1, local_steps=1, m=1)
    server, start = algorithm.init(START)
    places = [jax.tree.map(lambda x, c=c: x + c, START) for c in (1.0, 2.0, 6.0)]
    uploads = [algorithm.client(server.message, start, Quadratic(place), KEY)[0] for place in places]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *uploads)
    after = algorithm.server(server, stacked, jnp.asarray([1.0, 1.0, 2.0])).message
    same(after[0], jax.tree.map(lambda x: x + 0.3 * (1 + 2 + 12) / 4, START[0]))
    same(after[1], START[1], rtol=0)


def test_without_steps_of_the_head_it_is_fedavg_below_a_fixed_head_trajectory_for_trajectory():
    fleet = pf.circle(goals=2, held_out=0, radius=0.3, horizon=10)
    policy = pf.policies.mlp(fleet, (3,))
    small = {"local_steps": 1, "m": 8}

    def final(algorithm):
        simulation = simulation_of(fleet, policy, [algorithm], [3])
        start = simulation.start()
        return start.server.message, simulation.advance(start, 0, 1)

    start, still = final(SharedRepresentation(0.0, 0.3, head_steps=0, **small))
    _, moved = final(FedAvgPG(0.0, 0.3, **small))
    same(still.server.message[0], moved.server.message[0], rtol=0)
    same(still.server.message[1], start[1], rtol=0)
    assert np.abs(still.server.message[0]["weight"] - start[0]["weight"]).max() > 0


def test_agents_deploy_their_own_head_and_new_ones_the_start_head_after_steps_of_it():
    algorithm = SharedRepresentation(0.5, 0.3, head_steps=1, local_steps=1, m=1, adaptation_steps=2)
    _, fresh = algorithm.init(START)
    place = jax.tree.map(lambda x: x + 4, START)
    message = (jax.tree.map(lambda x: x + 9, START[0]), START[1])
    mine = HeadState(jax.tree.map(lambda x: x + 2, fresh.head), jnp.ones(()))
    same(
        algorithm.personalize(message, mine, Quadratic(place), KEY, 0),
        (message[0], jax.tree.map(lambda x: x + 2, START[1])),
    )
    same(algorithm.personalize(message, fresh, Quadratic(place), KEY, 0), message, rtol=0)
    after = algorithm.personalize(message, fresh, Quadratic(place), KEY, 5)
    same(after, (message[0], jax.tree.map(lambda x: x + 3, START[1])))  # half of the way to + 4, twice
    once = algorithm.personalize(message, fresh, Quadratic(place), KEY, 1)
    same(once, (message[0], jax.tree.map(lambda x: x + 2, START[1])))  # one trajectory is for one step
    every = SharedRepresentation(0.5, 0.3, adapt="all").personalize(message, mine, Quadratic(place), KEY, 5)
    same(every, (jax.tree.map(lambda x: x + 6.5, START[0]), jax.tree.map(lambda x: x + 3, START[1])))


def test_head_layers_are_the_last_ones_of_every_network_and_standard_deviations():
    def named(policy):
        params = policy.init(KEY)
        return {name for name, x in named_leaves(eqx.filter(params, heads(params))).items() if x is not None}

    assert named(MLPSoftmax((2, 3, 3, 4))) == {"2.bias", "2.weight"}
    gaussian = GaussianMLP((2, 3, 1))
    assert named(gaussian) == {"log_std", "mean.1.bias", "mean.1.weight"}
    both = {"actor.1.bias", "actor.1.weight", "critic.1.bias", "critic.1.weight"}
    assert named(ActorCritic(POLICY, (3, 3, 1))) == both
    assert named(Normalized(POLICY, size=2)) == {"policy.1.bias", "policy.1.weight"}


def test_privacy_and_aggregation_see_what_is_sent_alone():
    algorithm = SharedRepresentation(0.1, 0.3, head_steps=1, local_steps=1, m=1)
    wrapped = Robust(Private(algorithm, 0.2, 0.1), Median())
    server, start = wrapped.init(START)

    def work(key):
        upload, after = wrapped.client(server.message, start, Quadratic(jax.tree.map(lambda x: x + 4, START)), key)
        return upload, after, wrapped.server(server, jax.tree.map(lambda x: jnp.stack([x] * 5), upload), jnp.ones(5))

    upload, after, server_after = jit(work)(KEY)
    assert [x.shape for x in jax.tree.leaves(upload[1])] == [(0,), (0,)]
    same(after.head[1], jax.tree.map(lambda x: x + 0.3 * 4, START[1]))
    same(server_after.message, (upload[0], START[1]), rtol=0)


def test_policies_without_a_hidden_layer_are_refused_before_anything_compiles():
    grid = pf.gridworld(width=3, horizon=5)
    algorithm = SharedRepresentation(0.1, 0.3)
    with pytest.raises(pf.UserError, match=r"no network.*'mlp'.*'mixing'"):
        simulation_of(grid, pf.TableSoftmax(9, 4), [algorithm], [0])
    with pytest.raises(pf.UserError, match=r"hidden = \[\].*'mlp'.*'mixing'"):
        algorithm.check_supports(grid, MLPSoftmax((2, 4)))
    algorithm.check_supports(grid, POLICY)


def test_bad_settings_are_refused(untyped):
    wrong = {"head_steps": -1, "head_beta": 0.0, "adaptation_steps": 0, "adapt": "body", "local_steps": 0}
    for name, value in wrong.items():
        with pytest.raises(pf.UserError, match=name):
            SharedRepresentation(0.1, 0.3, **{name: value})
    assert SharedRepresentation(0.1, 0.3, head_steps=2, local_steps=3, m=4).trajectories_per_round == 20


@pytest.mark.slow
def test_agents_one_at_a_time_keep_their_heads_too():
    """An empty array in an upload is no obstacle to working on few agents at a time."""
    fleet, policy = pf.arc(goals=3, held_out=0, horizon=4), MLPSoftmax((2, 3, 8))
    algorithm = SharedRepresentation(0.1, 0.1, head_steps=1, local_steps=1, m=2)
    final = []
    for chunk in (1, None):
        simulation = simulation_of(fleet, policy, [algorithm], [0], chunk=chunk)
        final.append(simulation.advance(simulation.start(), 0, 2))
    assert jax.tree.structure(final[0]) == jax.tree.structure(final[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), *final)
