"""Methods that differ from FedAvg-PG in deployment, or in how far the server goes: they are it at the right setting."""

import jax
import numpy as np
import pytest
from simulations import simulation_of

import perfedrl as pf
from perfedrl.algorithms import FineTuned, FromScratch, Reptile
from perfedrl.estimators import Sampled

FLEET, POLICY = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)
SHARED = pf.FedAvgPG(0.7, 0.3, local_steps=2, m=4)


def final(algorithm, rounds=3):
    simulation = simulation_of(FLEET, POLICY, [algorithm] * 2, [0, 1])
    return simulation.advance(simulation.start(), 0, rounds).server.message


@pytest.fixture(scope="module")
def shared():
    """What FedAvg-PG learns, and what its agents deploy."""
    return final(SHARED), pf.simulate(FLEET, POLICY, SHARED, rounds=3, seeds=1, noiseless=True)


@pytest.mark.parametrize(
    "algorithm",
    [
        FineTuned(0.7, 0.3, local_steps=2, m=4, fine_tuning_steps=1),
        pytest.param(
            Reptile(0.7, 0.3, local_steps=2, m=4, server_step=1.0, adaptation_steps=1), marks=pytest.mark.slow
        ),
    ],
    ids=["fine-tuned", "reptile"],
)
def test_one_step_at_deployment_and_a_whole_server_step_are_fedavg_pg_bit_for_bit(algorithm, shared):
    by_sampling, without_noise = shared
    assert np.abs(by_sampling).max() > 0.01
    np.testing.assert_array_equal(final(algorithm).view(np.int32), by_sampling.view(np.int32))
    run = pf.simulate(FLEET, POLICY, algorithm, rounds=3, seeds=1, noiseless=True)
    np.testing.assert_array_equal(run.history.before, without_noise.history.before)
    np.testing.assert_array_equal(run.history.after, without_noise.history.after)
    np.testing.assert_array_equal(run.history.trajectories, without_noise.history.trajectories)


def test_reptile_goes_a_part_of_the_way_to_the_mean_of_where_agents_went():
    quarter = Reptile(0.7, 0.3, local_steps=2, m=4, server_step=0.25)
    way = pf.simulate(FLEET, POLICY, SHARED, rounds=1, seeds=1, noiseless=True).params
    run = pf.simulate(FLEET, POLICY, quarter, rounds=1, seeds=1, noiseless=True)
    np.testing.assert_allclose(run.params, 0.25 * way, rtol=0, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "start"),
    [
        (FineTuned(0.5, 0.3, fine_tuning_steps=3), 0.2),
        (Reptile(0.5, 0.3, adaptation_steps=3), 0.2),
        (FromScratch(0.5, steps=3), 0.0),
    ],
    ids=["fine-tuned", "reptile", "from-scratch"],
)
def test_the_steps_of_a_deployment_share_its_trajectories(algorithm, start):
    agent, key = Sampled(POLICY)(FLEET.task(1)), jax.random.key(3)
    theta = np.full((9, 4), start, np.float32)
    deployed = jax.jit(lambda m: algorithm.personalize(theta, (), agent, key, m), static_argnums=0)
    by_hand = theta
    for k in jax.random.split(key, 3):
        by_hand = by_hand + 0.5 * agent.gradient(by_hand, k, 7 // 3)
    np.testing.assert_allclose(deployed(7), by_hand, rtol=0, atol=1e-6)
    two = theta
    for k in jax.random.split(key, 2):
        two = two + 0.5 * agent.gradient(two, k, 1)
    np.testing.assert_allclose(deployed(2), two, rtol=0, atol=1e-6, err_msg="each step has at least one")
    np.testing.assert_array_equal(deployed(0), theta, "no data, no step")


def test_from_scratch_costs_nothing_until_it_is_deployed_and_is_as_good_after_any_round():
    fleet = pf.envs.random_mdps(agents=2, held_out=2, states=3, actions=2, horizon=4)
    policy = pf.TableSoftmax(3, 2)
    run = pf.simulate(fleet, policy, FromScratch(0.5, steps=4), rounds=2, seeds=1, noiseless=True)
    assert run.history.trajectories.tolist() == [0, 0, 0]
    assert run.history.bytes.tolist() == [0, 0, 0]
    alone = np.zeros((3, 2))
    for _ in range(4):
        alone = alone + 0.5 * pf.exact.gradient(fleet.task(1, held_out=True), alone)
    expected = float(pf.exact.expected_return(fleet.task(1, held_out=True), alone))
    np.testing.assert_allclose(run.history.held_out_after[0, :, 1], expected, rtol=1e-12)
    np.testing.assert_array_equal(run.params, 0)


def test_from_scratch_serves_unseen_agents_and_local_pg_does_not():
    fleet = {"env": "random-mdps", "agents": 2, "held_out": 1, "states": 2, "actions": 2}
    table = {"name": "x", "rounds": 1, "seeds": 1, "fleet": fleet, "policy": {"name": "table"}}
    config = pf.make_config({**table, "algorithm": {"name": "from-scratch", "alpha": 1.0}})
    assert config.experiment.algorithm.steps == 10
    with pytest.raises(pf.UserError, match="held-out"):
        _ = pf.make_config({**table, "algorithm": {"name": "local-pg", "beta": 1.0}}).experiment


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: FineTuned(-1.0, 0.3), "alpha"),
        (lambda: FineTuned(1.0, 0.3, fine_tuning_steps=0), "fine_tuning_steps"),
        (lambda: Reptile(1.0, 0.3, server_step=0.0), "server_step"),
        (lambda: Reptile(1.0, 0.0), "beta"),
        (lambda: Reptile(1.0, 0.3, adaptation_steps=0), "adaptation_steps"),
        (lambda: FromScratch(-0.1), "alpha"),
        (lambda: FromScratch(1.0, steps=0), "steps"),
    ],
)
def test_bad_settings_are_refused(make, setting):
    with pytest.raises(pf.UserError, match=setting):
        make()


def test_per_fedavg_pg_may_take_more_steps_at_deployment_than_in_training():
    theta, key = POLICY.init(jax.random.key(0)), jax.random.key(3)
    agent = Sampled(POLICY)(FLEET.task(2))
    own = pf.PerFedAvgPG(1.0, 0.3, deployment_alpha=0.5, deployment_steps=4)
    tuned = FineTuned(0.5, 0.3, fine_tuning_steps=4)
    np.testing.assert_array_equal(
        own.personalize(theta, (), agent, key, 12), tuned.personalize(theta, (), agent, key, 12)
    )
    with pytest.raises(pf.UserError, match="deployment_steps must be at least 1"):
        pf.PerFedAvgPG(1.0, 0.3, deployment_steps=0)
