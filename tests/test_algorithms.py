"""The contract that every registered algorithm keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.algorithms import ALGORITHMS, Algorithm, Attacked, Private, Robust
from perfedrl.algorithms.aggregation import GeometricMedian
from perfedrl.algorithms.attacks import Random
from perfedrl.algorithms.base import check_counts
from perfedrl.lanes import agent_key
from perfedrl.simulation import Simulation

FLEET, POLICY = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)
SETTINGS = {"alpha": 1.0, "beta": 0.3, "local_steps": 2, "m_in": 3, "m_h": 3, "m_out": 3, "m": 3}


def make(name, **change):
    """A registered algorithm with small batches; it takes of the settings what it has."""
    accepted = ALGORITHMS.parameters(name)
    return ALGORITHMS[name](**{k: v for k, v in {**SETTINGS, **change}.items() if k in accepted})


VARIANTS = {name: make(name) for name in ALGORITHMS}
VARIANTS["first-order"] = pf.PerFedAvgPG(1.0, 0.3, 2, 3, 3, 3, variant="first-order")
FEDERATED = {name: algorithm for name, algorithm in VARIANTS.items() if name != "local-pg"}
VARIANTS["wrapped"] = Attacked(Robust(Private(VARIANTS["first-order"], 0.5, 0.1), GeometricMedian()), Random(), 1)


@pytest.fixture(params=VARIANTS)
def algorithm(request):
    return VARIANTS[request.param]


@pytest.fixture(params=FEDERATED)
def federated(request):
    return FEDERATED[request.param]


def agent(i, policy=POLICY):
    return pf.estimators.Sampled(policy)(FLEET.task(i))


def test_algorithms_keep_the_interface(algorithm):
    assert isinstance(algorithm, Algorithm)
    assert algorithm.trajectories_per_round >= 2 * 3


def test_uploads_and_states_keep_shapes_and_dtypes(algorithm):
    server, state = algorithm.init(jnp.zeros((9, 4)))
    upload, new_state = algorithm.client(server.message, state, agent(0), jax.random.key(0))
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    uploads = jax.tree.map(lambda x: jnp.stack([x, x]), upload)
    after = algorithm.server(server, uploads, jnp.ones(2))
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert describe(after) == describe(server)
    adapted = algorithm.personalize(server.message, state, agent(0), jax.random.key(1), 5)
    assert describe(adapted) == describe(jnp.zeros((9, 4)))


def test_nothing_personal_enters_an_upload(algorithm):
    server, state = algorithm.init(jnp.zeros((9, 4)))
    marked = jax.tree.map(lambda x: x + 17.0, state)
    upload, after = algorithm.client(server.message, marked, agent(0), jax.random.key(0))
    for personal in jax.tree.leaves((marked, after)):
        for sent in jax.tree.leaves(upload):
            assert personal.shape != sent.shape or not (personal == sent).all()


def test_the_simulator_is_the_agent_by_agent_loop(algorithm):
    """What a network of single agents computes: client by client, with each agent's own key, then the server."""
    seed, rounds = 11, 2
    simulation = Simulation(FLEET, POLICY, [algorithm], [seed])
    simulated = simulation.advance(simulation.start(), 0, rounds)
    server, start = algorithm.init(POLICY.init())
    clients = [start] * FLEET.agents
    client = jax.jit(lambda *args: algorithm.client(args[0], args[1], pf.estimators.Sampled(POLICY)(args[2]), args[3]))
    for k in range(rounds):
        uploads = []
        for i in range(FLEET.agents):
            key = jax.random.fold_in(agent_key(seed, i), k)
            upload, clients[i] = client(server.message, clients[i], FLEET.task(i), key)
            uploads.append(upload)
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *uploads)
        server = algorithm.server(server, stacked, jnp.ones(FLEET.agents))
    np.testing.assert_allclose(simulated.server.message[0], server.message, rtol=0, atol=1e-6)
    for i, client in enumerate(clients):
        jax.tree.map(
            lambda one, many, i=i: np.testing.assert_allclose(many[0, i], one, rtol=0, atol=1e-6),
            client,
            simulated.clients,
        )


def test_the_server_does_not_care_about_the_order_of_agents(federated):
    algorithm = federated
    uploads = jax.random.normal(jax.random.key(0), (5, 9, 4))
    weights = jnp.asarray([1.0, 2.0, 3.0, 4.0, 5.0])
    server, _ = algorithm.init(jnp.zeros((9, 4)))
    forth = algorithm.server(server, uploads, weights).message
    back = algorithm.server(server, uploads[::-1], weights[::-1]).message
    np.testing.assert_allclose(forth, back, rtol=1e-5, atol=1e-7)
    by_hand = np.average(uploads, axis=0, weights=weights)
    np.testing.assert_allclose(forth, by_hand, rtol=1e-5, atol=1e-7)


def test_one_agent_alone_keeps_its_own_parameters(federated):
    algorithm = federated
    server, state = algorithm.init(jnp.zeros((9, 4)))
    upload, _ = algorithm.client(server.message, state, agent(3), jax.random.key(2))
    alone = algorithm.server(server, upload[None], jnp.ones(1)).message
    np.testing.assert_array_equal(alone, upload)


def test_personalization_is_one_policy_gradient_step__algorithm_1_line_12(federated):
    algorithm = federated
    theta, key = jax.random.normal(jax.random.key(3), (9, 4)), jax.random.key(4)
    adapted = algorithm.personalize(theta, (), agent(1), key, 20)
    by_hand = theta + algorithm.alpha * agent(1).gradient(theta, key, 20)
    np.testing.assert_allclose(adapted, by_hand, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(algorithm.personalize(theta, (), agent(1), key, 0), theta, "no data, no step")


def test_from_scratch_nothing_crosses_and_every_agent_climbs_its_own_return():
    fleet, policy = pf.gridworld(width=3, horizon=6), pf.TableSoftmax(9, 4)
    result = pf.simulate(fleet, policy, pf.LocalPG(0.5), rounds=20, seeds=1, every=5, noiseless=True)
    assert (np.diff(result.history.after[0], axis=0) > 0).all(), "each agent by itself"
    assert result.history.bytes.tolist() == [0] * 5
    assert result.history.trajectories.tolist() == [0, 100, 200, 300, 400]
    alone = np.zeros((9, 4))
    for _ in range(20):
        alone = alone + 0.5 * pf.exact.gradient(fleet.task(2), alone)
    assert result.history.after[0, -1, 2] == pytest.approx(float(pf.exact.expected_return(fleet.task(2), alone)))
    np.testing.assert_array_equal(result.params[0], 0, "the start is all that is shared")


@pytest.mark.parametrize("variant", ["exact", "first-order"])
def test_at_alpha_0_it_is_fedavg_pg_trajectory_for_trajectory__prop_3_step_5(variant):
    fleet = pf.gridworld()
    policy = pf.TableSoftmax(25, 4)

    def final(algorithm):
        simulation = Simulation(fleet, policy, [algorithm] * 3, [0, 1, 2])
        return simulation.advance(simulation.start(), 0, 20).server.message

    shared = final(pf.FedAvgPG(0.0, 0.3, local_steps=5, m=10))
    personalized = final(pf.PerFedAvgPG(0.0, 0.3, local_steps=5, m_in=7, m_h=4, m_out=10, variant=variant))
    assert np.abs(shared).max() > 0.1
    np.testing.assert_array_equal(shared.view(np.int32), personalized.view(np.int32))


def test_exact_dynamics_climb_the_meta_objective_and_first_order_stalls_below():
    """Without sampling noise: each exact round increases F, and after as many rounds the exact variant is ahead."""
    fleet, policy = pf.gridworld(width=3, horizon=6), pf.TableSoftmax(9, 4)
    exact = pf.simulate(fleet, policy, pf.PerFedAvgPG(2.0, 0.3), rounds=30, seeds=1, every=3, noiseless=True)
    first = pf.simulate(
        fleet, policy, pf.PerFedAvgPG(2.0, 0.3, variant="first-order"), rounds=30, seeds=1, every=3, noiseless=True
    )
    F = exact.history.after.mean(axis=-1)[0]
    assert exact.params.dtype == np.float64
    assert (np.diff(F) > 0).all()
    assert F[-1] > first.history.after.mean(axis=-1)[0, -1]


def test_one_exact_local_step_is_one_step_of_gradient_ascent_on_F__eq_6():
    fleet, policy, beta, alpha = pf.gridworld(width=3, horizon=6), pf.TableSoftmax(9, 4), 0.3, 1.5
    run = pf.simulate(fleet, policy, pf.PerFedAvgPG(alpha, beta, local_steps=1), rounds=1, seeds=1, noiseless=True)
    expected = beta * pf.exact.meta_gradient(fleet, np.zeros((9, 4)), alpha)
    np.testing.assert_allclose(run.params[0], expected, rtol=0, atol=1e-12)
    first = pf.PerFedAvgPG(alpha, beta, local_steps=1, variant="first-order")
    run = pf.simulate(fleet, policy, first, rounds=1, seeds=1, noiseless=True)
    expected = beta * pf.exact.first_order_direction(fleet, np.zeros((9, 4)), alpha)
    np.testing.assert_allclose(run.params[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        {"alpha": -1.0},
        {"beta": 0.0},
        {"beta": -0.1},
        {"alpha": float("nan")},
        {"local_steps": 0},
        {"beta": float("inf")},
    ],
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_bad_settings_are_refused(name, change):
    if next(iter(change)) not in ALGORITHMS.parameters(name):
        pytest.skip("this algorithm has no such setting")
    with pytest.raises(pf.UserError, match=next(iter(change))):
        make(name, **change)


def test_an_unknown_variant_is_refused(untyped):
    with pytest.raises(pf.UserError, match="'exact' or 'first-order'"):
        pf.PerFedAvgPG(1.0, 0.3, variant="fo")


@pytest.mark.parametrize("value", [2.5, "3", True])
def test_counts_must_be_whole_numbers(value, untyped):
    with pytest.raises(pf.UserError, match="whole number"):
        check_counts(m_in=value)


@pytest.mark.parametrize("batch", ["m_in", "m_h", "m_out"])
def test_batches_under_1_are_refused(batch):
    with pytest.raises(pf.UserError, match=batch):
        pf.PerFedAvgPG(1.0, 0.3, **{batch: 0})
    with pytest.raises(pf.UserError, match="m must"):
        pf.FedAvgPG(1.0, 0.3, m=0)


def test_the_first_order_variant_needs_no_curvature_batch():
    assert pf.PerFedAvgPG(1.0, 0.3, 5, 10, 0, 10, variant="first-order").trajectories_per_round == 100
