"""Evaluation: Monte Carlo agrees with dynamic programming, and no random key is used twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulations import simulation_of

import perfedrl as pf
from perfedrl.algorithms import ServerState
from perfedrl.estimators import Sampled
from perfedrl.experiments.config import MOST_ROUNDS
from perfedrl.key_domains import DEPLOYMENT, EVALUATION, PERSONALIZATION, START
from perfedrl.rollout import RolloutSampler
from perfedrl.simulation.evaluation import EVALUATIONS, MonteCarlo, episode_outcomes
from perfedrl.simulation.keys import agent_key
from perfedrl.simulation.measurements import before_and_after, deploy
from perfedrl.simulation.run_state import FleetState

FLEET = pf.arc(goals=3, held_out=2, horizon=6)
POLICY = pf.MLPSoftmax((2, 4, 8))
STEP = pf.FedAvgPG(1.0, 0.1, local_steps=1, m=2)


def simulation(evaluation, seeds=(0, 1), **how):
    return simulation_of(FLEET, POLICY, [STEP] * len(seeds), list(seeds), evaluation=evaluation, **how)


def test_monte_carlo_agrees_with_dynamic_programming():
    """Means of 20,000 episodes within five standard errors: wrong once in about 10^6 such comparisons."""
    grid, table = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)
    theta = jax.random.normal(jax.random.key(0), (9, 4))
    for i in (0, 3):
        episodes = RolloutSampler(grid.task(i), table).sample(theta, jax.random.key(i), 20_000)
        returns = np.asarray(episode_outcomes(grid.task(i), episodes)["return"], float)
        expected = float(pf.exact.expected_return(grid.task(i), theta))
        assert abs(returns.mean() - expected) < 5 * returns.std() / np.sqrt(len(returns))


def test_an_evaluation_adapts_and_then_measures_fresh_episodes():
    evaluation, task, key = MonteCarlo(Sampled(POLICY), trajectories=5, episodes=7), FLEET.task(1), jax.random.key(3)
    theta = POLICY.init(jax.random.key(1))
    measured = before_and_after(evaluation, STEP, theta, (), task, key)
    adaptation, episodes = jax.random.split(key)
    own = jax.tree.map(lambda x, g: x + g, theta, Sampled(POLICY)(task).gradient(theta, adaptation, 5))
    for when, params in (("before", theta), ("after", own)):
        played = RolloutSampler(task, POLICY).sample(params, episodes, 7)
        for name, values in episode_outcomes(task, played).items():
            assert float(measured[when][name]) == pytest.approx(float(np.mean(values)), abs=1e-6)
    assert set(measured["after"]) == {"return", "success", "distance"}


@pytest.mark.slow
def test_a_deployment_is_the_mean_over_its_repeats():
    task, theta, key = FLEET.task(0), POLICY.init(jax.random.key(1)), jax.random.key(8)
    evaluation = MonteCarlo(Sampled(POLICY), episodes=9, few_shot=(0, 4), repeats=3, rollouts=2)
    outcomes, rollouts = deploy(evaluation, STEP, theta, (), task, key)
    budgets, shown = jax.random.split(key)
    for b, m in enumerate((0, 4)):
        keys = [jax.random.split(k) for k in jax.random.split(jax.random.fold_in(budgets, m), 3)]
        own = [STEP.personalize(theta, (), Sampled(POLICY)(task), adaptation, m) for adaptation, _ in keys]
        played = [RolloutSampler(task, POLICY).sample(x, k, 9) for x, (_, k) in zip(own, keys, strict=True)]
        by_hand = np.mean([episode_outcomes(task, x)["return"] for x in played])
        assert float(outcomes["return"][b]) == pytest.approx(by_hand, abs=1e-6)
    np.testing.assert_allclose(rollouts[1], RolloutSampler(task, POLICY).sample(own[-1], shown, 2).obs, atol=1e-6)


@pytest.mark.slow
def test_histories_and_deployments_have_labelled_axes():
    evaluation = MonteCarlo(Sampled(POLICY), trajectories=3, episodes=4, few_shot=(0, 2, 5), rollouts=2)
    sim = simulation(evaluation)
    *_, last = sim.run(sim.begin(), [1, 3])
    history = last.history
    assert history.after.shape == (2, 3, 3)
    assert history.held_out_after.shape == (2, 3, 2)
    assert set(history.outcomes) == {
        f"{part}{when}.{name}"
        for part in ("", "held_out_")
        for when in ("before", "after")
        for name in ("success", "distance")
    }
    assert history.outcomes["held_out_after.success"].shape == (2, 3, 2)
    deployed = sim.deploy(last.fleet_state, 3)
    assert deployed.outcomes["return"].shape == (2, 3, 2)
    assert deployed.rollouts.shape == (2, 3, 2, 2, 7, 2)
    assert deployed.at("return", 5).shape == (2,)
    np.testing.assert_allclose(deployed.at("return", 5), deployed.outcomes["return"][:, 2].mean(axis=-1))
    alone = deployed.select(slice(1, 2))
    np.testing.assert_array_equal(alone.at("success", 2), deployed.at("success", 2)[1:])
    np.testing.assert_array_equal(alone.rollouts, deployed.rollouts[1:2], "its own rollouts, not those of another seed")


@pytest.mark.slow
def test_without_held_out_agents_the_training_agents_are_deployed_with_their_trained_state():
    fleet = pf.arc(goals=2, held_out=0, horizon=6)
    evaluation = MonteCarlo(Sampled(POLICY), trajectories=3, episodes=16, few_shot=(0,))
    sim = simulation_of(fleet, POLICY, [pf.LocalPG(5.0, m=40)], [0], evaluation=evaluation, start="per-seed")
    *_, last = sim.run(sim.begin(), [10])
    learned = sim.deploy(last.fleet_state, 10).outcomes["return"]
    fresh = sim.deploy(sim.start(), 10).outcomes["return"]
    assert learned.shape == (1, 1, 2)
    assert not np.allclose(learned, fresh)


@pytest.mark.slow
def test_measurements_of_a_seed_do_not_depend_on_the_other_seeds():
    evaluation = MonteCarlo(Sampled(POLICY), trajectories=20, episodes=64, few_shot=(0, 30), repeats=2, rollouts=2)

    def measured(seeds, **how):
        sim = simulation(evaluation, seeds, **how)
        state = sim.advance(sim.start(), 0, 2)
        return sim.measure(state, 2).arrays() | sim.deploy(state, 2).arrays()

    whole = measured(range(5))
    for name, x in measured([3], chunk=1).items():
        seed_axis = name not in ("rounds", "trajectories", "bytes", "budgets")
        np.testing.assert_array_equal(x, whole[name][3:4] if seed_axis else whole[name], err_msg=name)


def test_training_evaluation_and_deployment_use_different_keys():
    rounds, agents = range(40), range(12)

    def words(key):
        return tuple(jax.random.key_data(key).tolist())

    def in_domain(first):
        return {words(jax.random.fold_in(agent_key(0, i), np.uint32(first + k))) for i in agents for k in rounds}

    trained = {words(jax.random.fold_in(agent_key(0, i), k)) for i in agents for k in rounds}
    per_seed = {words(jax.random.fold_in(jax.random.key(0), n)) for n in (START, PERSONALIZATION)}
    layers = {words(k) for k in jax.random.split(jax.random.fold_in(jax.random.key(0), START), 8)}
    per_agent = {words(agent_key(0, i)) for i in agents}
    sets = [trained, in_domain(EVALUATION), in_domain(DEPLOYMENT), per_seed, layers, per_agent]
    assert [len(x) for x in sets] == [480, 480, 480, 2, 8, 12]
    assert len(set.union(*sets)) == sum(map(len, sets)), "no key is used twice"
    assert MOST_ROUNDS < DEPLOYMENT - EVALUATION == 2**30


def test_seeds_share_the_initial_parameters_unless_start_is_per_seed():
    shared = simulation(None, (0, 1, 2)).start().server.message
    own = simulation(None, (0, 1, 2), start="per-seed").start().server.message
    other = simulation(None, (0, 1, 2), start=5).start().server.message

    def weights(message):
        return message[0]["weight"]

    assert (weights(shared)[0] == weights(shared)[1]).all()
    assert not (weights(own)[0] == weights(own)[1]).any()
    assert not (weights(shared) == weights(other)).any()
    again = simulation(None, (2,), start="per-seed").start().server.message
    np.testing.assert_array_equal(weights(again)[0], weights(own)[2], "whatever seeds run with it")


def test_auto_chooses_exact_evaluation_for_finite_mdps_and_monte_carlo_for_others():
    grid, table = pf.gridworld(width=2), pf.TableSoftmax(4, 4)
    assert EVALUATIONS["auto"](fleet=grid, agent=Sampled(table)).float64
    assert not EVALUATIONS["auto"](fleet=FLEET, agent=Sampled(POLICY)).float64
    sampled = simulation_of(grid, table, [STEP], [0], evaluation=MonteCarlo(Sampled(table), 2, 50))
    measured = sampled.measure(FleetState(ServerState(jnp.zeros((1, 4, 4))), ()), 0)
    assert measured.outcomes == {}, "a finite MDP has no outcome but the return"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trajectories": -1}, "trajectories must be from 0"),
        ({"episodes": 0}, "episodes must be from 1"),
        ({"few_shot": (3, -2)}, "few_shot must be from 0"),
        ({"repeats": 0}, "repeats must be from 1"),
        ({"rollouts": 3}, "rollouts are saved for the budgets"),
        ({"few_shot": (8, 0)}, "few_shot must be an increasing list"),
    ],
)
def test_invalid_evaluation_settings_are_rejected(change, words):
    with pytest.raises(pf.UserError, match=words):
        EVALUATIONS["monte-carlo"](fleet=FLEET, agent=Sampled(POLICY), **change)


def test_exact_evaluation_and_exact_training_of_continuous_states_are_rejected():
    with pytest.raises(pf.UserError, match="finitely many states"):
        EVALUATIONS["exact"](fleet=FLEET, agent=Sampled(POLICY))
    with pytest.raises(pf.UserError, match="finitely many states"):
        pf.simulate(FLEET, POLICY, STEP, rounds=1, noiseless=True)


@pytest.mark.parametrize(
    ("fleet", "policy"),
    [
        (FLEET, pf.MLPSoftmax((3, 4, 8))),
        (FLEET, pf.MLPSoftmax((2, 4, 16))),
        (FLEET, pf.GaussianMLP((2, 4, 2))),
        (pf.gridworld(), pf.MLPSoftmax((2, 4, 4))),
        (pf.point_navigation(), pf.MLPSoftmax((2, 4, 8))),
        (pf.point_navigation(), pf.GaussianMLP((2, 4, 3))),
    ],
)
def test_a_policy_that_does_not_fit_is_rejected_and_not_broadcast(fleet, policy):
    with pytest.raises(pf.UserError, match="the policy does not fit the fleet"):
        pf.simulate(fleet, policy, STEP, rounds=1)


@pytest.mark.slow
def test_nan_parameters_end_a_run_even_where_sampled_returns_are_finite():
    """Inverse-transform sampling returns actions also for probabilities that are NaN."""
    sim = simulation(MonteCarlo(Sampled(POLICY), 1, 1), (0,))
    begun = sim.begin()
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), begun.fleet_state)
    assert np.isfinite(sim.measure(broken, 0).after).all()
    with pytest.raises(pf.UserError, match="diverged between rounds 0 and 1"):
        list(sim.run(begun._replace(fleet_state=broken), [1]))
    with pytest.raises(pf.UserError, match="beta must be a finite number"):
        pf.FedAvgPG(1.0, 1e39)
