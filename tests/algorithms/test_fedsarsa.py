"""FedSARSA: its step, its expectation, where it comes to rest, and the paper's two plateaus."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import batch, enumerate_trajectories, law, random_mdp

import perfedrl as pf
from perfedrl.algorithms import FedSARSA
from perfedrl.algorithms.fedsarsa import expected_semi_gradient, semi_gradient
from perfedrl.estimators import Sampled
from perfedrl.exact.soft import q_values, sarsa_q
from perfedrl.exact.tabular import Exact
from perfedrl.studies.fednpg.study import npg_exact, npg_sampled
from perfedrl.studies.fedsarsa.study import plateau, sarsa_agents, sarsa_heterogeneity
from perfedrl.studies.table_policy_curves import table_parameters
from perfedrl.types import Trajectory

GRID, POLICY = pf.gridworld(width=2, horizon=3), pf.TableSoftmax(4, 4)


def features(rng, S, A, d):
    return pf.LogLinearSoftmax(rng.normal(size=(S, A, d)))


def test_a_step_by_hand():
    """Q = 2 theta. Two transitions: (0, 1) -> (1, 0) with reward 1, then (1, 0) -> (1, 1) with reward -1; the third
    reward has no successor and does not count.
    """
    theta = jnp.asarray([[0.0, 0.5], [1.0, 2.0]])
    one = Trajectory(
        jnp.asarray([[0, 1, 1]]), jnp.asarray([[1, 0, 1]]), jnp.asarray([[1.0, -1.0, 9.0]]), jnp.ones((1, 3))
    )
    step = semi_gradient(pf.TableSoftmax(2, 2), 0.5, theta, one, 2.0)
    np.testing.assert_allclose(step, [[0, (1 + 0.5 * 2 - 1) / 2], [(-1 + 0.5 * 4 - 2) / 2, 0]], atol=1e-6)
    ended = one._replace(mask=jnp.asarray([[1.0, 1.0, 0.0]]))
    cut = semi_gradient(pf.TableSoftmax(2, 2), 0.5, theta, ended, 2.0)
    np.testing.assert_allclose(cut[1, 0], (-1 - 2) / 2, atol=1e-6, err_msg="an early end is worth nothing")


@pytest.mark.parametrize("kind", ["table", "log-linear"])
def test_the_noiseless_step_is_the_expectation_of_the_sampled_one(kind, x64):
    rng = np.random.default_rng(0)
    mdp = random_mdp(rng, (2, 2, 2), 0.9)
    policy = pf.TableSoftmax(2, 2) if kind == "table" else features(rng, 2, 2, 3)
    theta = jnp.asarray(rng.normal(size=np.shape(policy.init())))
    t = enumerate_trajectories(mdp)
    single = lambda xi: semi_gradient(policy, 0.9, theta, jax.tree.map(lambda x: x[None], xi), 0.7)  # noqa: E731
    every = jax.jit(jax.vmap(single))(batch(t))
    weight = law(policy, theta, t).reshape(-1, *[1] * theta.ndim)
    expected = jax.jit(expected_semi_gradient)(policy, mdp, theta, 0.7)
    np.testing.assert_allclose(jnp.sum(weight * every, axis=0), expected, atol=1e-12)


def test_one_hot_features_are_the_table():
    mdp, theta = GRID.task(0), jax.random.normal(jax.random.key(0), (4, 4))
    one_hot = pf.LogLinearSoftmax(np.eye(16).reshape(4, 4, 16))
    a = jax.jit(expected_semi_gradient)(POLICY, mdp, theta, 0.5)
    b = jax.jit(expected_semi_gradient)(one_hot, mdp, theta.reshape(-1), 0.5)
    np.testing.assert_allclose(a.reshape(-1), b, atol=1e-6)


def test_local_steps_move_theta_by_beta_over_temperature__and_the_server_averages():
    """The same trajectories with another unit of theta: Q moves alike."""
    algorithm, key = FedSARSA(0.7, 0.3, 2, 3, temperature=0.5), jax.random.key(1)
    agents = [Sampled(POLICY)(GRID.task(i)) for i in (0, 1)]
    theta = jax.random.normal(jax.random.key(2), (4, 4))
    client, step = jax.jit(algorithm.client), jax.jit(semi_gradient, static_argnums=1)
    uploads = jnp.stack([client(theta, (), agent, key)[0] for agent in agents])
    sample = jax.jit(lambda theta, key: agents[0].sampler.sample(theta, key, 3))
    by_hand, keys = theta, jax.random.split(key, (2, 3))
    for k in keys:
        drawn = sample(by_hand, k[2])
        by_hand = by_hand + 0.3 / 0.5 * step(POLICY, 0.9, by_hand, drawn, 0.5)
    np.testing.assert_allclose(uploads[0], by_hand, atol=1e-6)
    server, _ = algorithm.init(theta)
    shared = algorithm.server(server, uploads, jnp.asarray([1.0, 3.0])).message
    np.testing.assert_allclose(shared, uploads[0] / 4 + uploads[1] * 3 / 4, atol=1e-6)
    adapted = algorithm.personalize(shared, (), Exact(POLICY)(GRID.task(1)), key, 4)
    np.testing.assert_allclose(adapted, shared + 0.7 * pf.exact.gradient(GRID.task(1), shared), atol=1e-6)
    np.testing.assert_array_equal(algorithm.personalize(shared, (), agents[1], key, 0), shared)


def test_agents_played_in_python_give_the_compiled_numbers():
    class InPython:
        traceable = False

        def sample(self, params, key, m):
            return jax.tree.map(np.asarray, agent.sampler.sample(params, key, m))

    algorithm, agent = FedSARSA(0.0, 0.3, 2, 3), Sampled(POLICY)(GRID.task(0))
    live = eqx.tree_at(lambda a: a.sampler, agent, InPython())
    start, key = jnp.ones((4, 4)), jax.random.key(4)
    traced = jax.jit(algorithm.client)(start, (), agent, key)[0]
    np.testing.assert_allclose(algorithm.client(start, (), live, key)[0], traced, atol=1e-6)


def test_its_fixed_point_is_the_value_of_its_own_softmax_policy():
    """One agent without noise ends at the fixed point of dynamic programming, which no state distribution changes."""
    mdp = random_mdp(np.random.default_rng(3), (3, 2, 4), 0.5)
    q = sarsa_q(mdp, 1.0)
    pi = np.exp(q) / np.exp(q).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(q, q_values(mdp, pi), atol=1e-12)
    run = pf.envs.fleet([mdp]), [FedSARSA(0.0, 2.0, 20, 1, 1.0)], [0]
    thetas = table_parameters(*run, rounds=40, every=40, exact=True)[1]
    np.testing.assert_allclose(thetas[0, -1], q, atol=1e-8)


def test_a_cycle_at_a_low_temperature_is_reported():
    """A small difference changes the policy, and the new policy's values change it back."""
    P = [[[0.03, 0.97], [0.97, 0.03]], [[1.0, 0.0], [0.08, 0.92]]]
    mdp = pf.TabularMDP(P, [[0.2, 0.2], [0.9, -0.9]], [0.5, 0.5], 5, 0.98)
    with pytest.raises(pf.UserError, match="choose a higher temperature"):
        sarsa_q(mdp, 0.1)
    assert np.isfinite(sarsa_q(mdp, 5.0)).all()


def test_without_noise_the_plateau_grows_with_heterogeneity__fedsarsa():
    """To the mean MDP's fixed point as its square, to the agents' own in proportion; equal agents have none."""
    found = sarsa_heterogeneity((0.0, 0.25, 0.5, 1.0), rounds=400, every=100)
    mean, own = (found.errors[name][:, -1] for name in ("mean", "own"))
    assert max(mean[0], own[0]) < 1e-4
    np.testing.assert_allclose(own[2:] / own[1:3], 2, rtol=0.05)
    np.testing.assert_allclose(mean[2:] / mean[1:3], 4, rtol=0.15)


@pytest.mark.slow
def test_with_noise_the_plateau_falls_with_the_root_of_the_number_of_agents__fedsarsa():
    """At 1 and 16 equal agents a quarter remains, within 20 % at these fixed seeds."""
    found = sarsa_agents((1, 16), rounds=300, every=10, seeds=4)
    heights = plateau(found.errors["mean"]).mean(axis=1)
    np.testing.assert_allclose(heights[1] / heights[0], 1 / 4, rtol=0.2)


def test_the_study_of_fednpg_has_its_curves():
    grid = pf.gridworld(width=2, horizon=4)
    exact = npg_exact((1.0, 0.5), grid, rounds=6)
    assert exact.errors["policy"].shape == exact.errors["values"].shape == (2, 7)
    assert exact.rounds.tolist() == list(range(7))
    sampled = npg_sampled((3,), grid, rounds=4, every=2, seeds=2)
    assert sampled.errors["policy"].shape == (1, 2, 3)


def test_it_refuses_policies_that_are_no_linear_action_values():
    with pytest.raises(pf.UserError, match="fedavg-pg"):
        FedSARSA(0.5, 0.3).check_supports(pf.arc(), pf.TableSoftmax(4, 4))
    with pytest.raises(pf.UserError, match="horizon"):
        FedSARSA(0.5, 0.3).check_supports(pf.gridworld(horizon=0), pf.TableSoftmax(25, 4))
    FedSARSA(0.5, 0.3).check_supports(GRID, pf.LogLinearSoftmax(np.ones((4, 4, 2))))
    with pytest.raises(pf.UserError, match="temperature must be"):
        FedSARSA(0.5, 0.3, temperature=-1.0)
