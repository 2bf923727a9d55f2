"""FedNPG, on exact quantities: what it converges to, how fast, and that its samples estimate the exact step."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import Listed, batch, enumerate_trajectories, index_key, law, random_mdp
from simulations import simulation_of
from tiers import some_slow

import perfedrl as pf
from perfedrl.algorithms import FedNPG, Private
from perfedrl.algorithms.fednpg import ActionValues, backed_up, filled
from perfedrl.envs import fleet as fleet_of
from perfedrl.estimators import PolicyObjective, Sampled, StepKeys
from perfedrl.exact import soft as exact_soft
from perfedrl.exact.tabular import Exact, ExactObjective
from perfedrl.types import Trajectory

GRID, POLICY, GAMMA, LAMBDA = pf.gridworld(), pf.TableSoftmax(25, 4), 0.9, 0.1


def mean_mdp(fleet):
    tasks = fleet.train
    return pf.TabularMDP(tasks.P.mean(0), tasks.r.mean(0), tasks.mu.mean(0), tasks.horizon, tasks.discount)


def by_solving(mdp, pi, entropy):
    """Soft action values from one linear system, written out."""
    S, A = mdp.r.shape
    entropy_of = -np.sum(pi * np.log(pi), axis=1)
    P = np.asarray(mdp.P).reshape(S * A, S)
    on = P @ (np.eye(S)[:, :, None] * pi[:, None, :]).reshape(S, S * A)
    r = mdp.r.reshape(-1) + mdp.discount * entropy * P @ entropy_of
    return np.linalg.solve(np.eye(S * A) - mdp.discount * on, r).reshape(S, A)


def run(fleet, policy, algorithm, rounds):
    """The messages after every round of a noiseless run, from the start on."""
    simulation = simulation_of(fleet, policy, [algorithm], [0], Exact(policy))
    state, kept = simulation.start(), []
    for k in range(rounds):
        kept.append(state.server.message[0])
        state = simulation.advance(state, k, 1)
    return np.stack([*kept, state.server.message[0]])


def log_softmax(theta):
    return (
        theta
        - np.log(np.sum(np.exp(theta - theta.max(-1, keepdims=True)), -1, keepdims=True))
        - theta.max(-1, keepdims=True)
    )


class InPython:
    """An agent whose trajectories JAX cannot trace."""

    traceable = False

    def __init__(self, sampler):
        self.sampler = sampler

    def sample(self, params, key, m):
        return jax.tree.map(np.asarray, self.sampler.sample(params, key, m))


@pytest.fixture(scope="module")
def optimum():
    return exact_soft.soft_optimum(mean_mdp(GRID), LAMBDA)


def test_soft_values_solve_their_linear_system():
    rng = np.random.default_rng(0)
    mdp, pi = random_mdp(rng, (4, 3, 2), 0.9), rng.dirichlet(np.ones(3), size=4)
    np.testing.assert_allclose(exact_soft.soft_q(mdp, pi, 0.3), by_solving(mdp, pi, 0.3), atol=1e-12)
    np.testing.assert_allclose(exact_soft.q_values(mdp, pi), by_solving(mdp, pi, 0.0), atol=1e-12)
    certain = np.eye(3)[[0, 1, 2, 0]]
    assert np.isfinite(exact_soft.soft_q(mdp, certain, 0.3)).all(), "no entropy where there is no doubt"


def test_at_the_soft_optimum_no_policy_gains__and_it_is_its_own_softmax():
    rng = np.random.default_rng(1)
    mdp = random_mdp(rng, (4, 3, 2), 0.9)
    best = exact_soft.soft_optimum(mdp, 0.2)
    np.testing.assert_allclose(exact_soft.soft_q(mdp, np.exp(best.log_policy), 0.2), best.q, atol=1e-12)
    np.testing.assert_allclose(best.log_policy, (best.q - best.v[:, None]) / 0.2, atol=1e-12)
    for _ in range(5):
        other = exact_soft.soft_q(mdp, rng.dirichlet(np.ones(3), size=4), 0.2)
        assert (other <= best.q).all()
    with pytest.raises(pf.UserError, match="entropy must be"):
        exact_soft.soft_optimum(mdp, 0.0)


@pytest.mark.parametrize("c", some_slow([0.5, 0.2], [0.5]))
def test_the_log_policy_converges_geometrically_at_1_minus_c__and_values_at_its_square(c, optimum):
    """Values are flat at the optimum, so their error is the square of the log-policy's; both to 1e-9 and below."""
    thetas = run(GRID, POLICY, FedNPG(0.0, c * (1 - GAMMA) / LAMBDA, LAMBDA), 110 if c < 0.5 else 35)
    policies = log_softmax(thetas)
    error = np.abs(policies - optimum.log_policy).max(axis=(1, 2))
    assert error[-1] < 1e-9
    late = (error[:-1] < 1e-3) & (error[1:] > 1e-9)
    np.testing.assert_allclose((error[1:] / error[:-1])[late], 1 - c, rtol=1e-3)
    at = [exact_soft.soft_q(mean_mdp(GRID), np.exp(x), LAMBDA) for x in policies[:30:3]]
    values = np.abs(np.stack(at) - optimum.q).max(axis=(1, 2))
    rounds = np.arange(0, 30, 3)
    assert (values <= (1 - c * (1 - GAMMA)) ** rounds * (values[0] + 2 * LAMBDA * error[0])).all(), "the paper's bound"
    small = (values[:-1] < 1e-5) & (values[1:] > 1e-11)
    np.testing.assert_allclose((values[1:] / values[:-1])[small], (1 - c) ** 6, rtol=0.1)


def test_the_longest_step_is_soft_policy_iteration(optimum):
    thetas = run(GRID, POLICY, FedNPG(0.0, (1 - GAMMA) / LAMBDA, LAMBDA), 5)
    first = log_softmax(by_solving(mean_mdp(GRID), np.full((25, 4), 0.25), LAMBDA) / LAMBDA)
    np.testing.assert_allclose(log_softmax(thetas[1]), first, atol=1e-12)
    np.testing.assert_allclose(thetas[5], optimum.log_policy, atol=1e-9)


def test_averaging_steps_is_one_step_along_the_mean_of_action_values():
    """The paper's form: the server's step along mean Q, which moves the policy as the mean of the agents' steps does;
    and, as all agents share transitions, as one agent with the mean reward.
    """
    beta, shared = 0.4, run(GRID, POLICY, FedNPG(0.0, 0.4, LAMBDA), 3)
    alone = run(fleet_of([mean_mdp(GRID)]), POLICY, FedNPG(0.0, 0.4, LAMBDA), 3)
    np.testing.assert_allclose(shared, alone, atol=1e-12)
    theta = np.zeros((25, 4))
    for k in range(3):
        pi = np.exp(log_softmax(theta))
        q = np.mean([by_solving(GRID.task(i), pi, LAMBDA) for i in range(GRID.agents)], axis=0)
        theta = (1 - beta * LAMBDA / (1 - GAMMA)) * theta + beta / (1 - GAMMA) * q
        np.testing.assert_allclose(log_softmax(shared[k + 1]), log_softmax(theta), atol=1e-12)


def test_from_true_values_the_sampled_step_is_the_exact_one_in_expectation(x64):
    """Every pair of trajectories of a small MDP with two decisions, weighed by its probability."""
    rng = np.random.default_rng(2)
    mdp, policy, theta = random_mdp(rng, (2, 2, 1), 0.9), pf.TableSoftmax(2, 2), jnp.asarray(rng.normal(size=(2, 2)))
    t = enumerate_trajectories(mdp)
    algorithm, n = FedNPG(0.0, 0.3, 0.2, m=2), len(t.states)
    sampling = PolicyObjective(Listed(batch(t)), policy, mdp.discount)
    keys = lambda i: StepKeys(*[index_key(i)] * 3)  # noqa: E731
    exact, known = algorithm.step(ExactObjective(mdp, policy), algorithm_start(algorithm, theta), keys(0))
    np.testing.assert_allclose(known.q, by_solving(mdp, np.exp(log_softmax(np.asarray(theta))), 0.2), atol=1e-12)
    every = jax.jit(jax.vmap(lambda i: algorithm.step(sampling, (theta, known), keys(i))[0]))(jnp.arange(n * n))
    q = law(policy, theta, t)
    weight = (q[:, None] * q[None]).reshape(-1, 1, 1)
    assert jnp.abs(every - exact).max() > 0.01, "single batches differ"
    np.testing.assert_allclose(jnp.sum(weight * every, axis=0), exact, atol=1e-12)


def algorithm_start(algorithm, theta):
    server, state = algorithm.init(theta)
    return server.message, state


def test_in_a_deterministic_task_a_backup_keeps_true_values():
    """Deterministic moves: whatever a batch visits, backing up true values gives them back."""
    fleet, policy, algorithm = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4), FedNPG(0.0, 0.3, 0.2, m=2)
    theta, task = jax.random.normal(jax.random.key(0), (9, 4)), fleet.task(2)
    exact, known = jax.jit(algorithm.client)(*algorithm_start(algorithm, theta), Exact(policy)(task), jax.random.key(1))
    again = jax.jit(algorithm.client)(theta, known, Sampled(policy)(task), jax.random.key(1))
    np.testing.assert_allclose(again[0], exact, atol=1e-5)
    np.testing.assert_allclose(again[1].q, known.q, atol=1e-5)


def test_a_backup_by_hand():
    """States 0, 0, 1 with actions 1, 1, 0. V is the table's mean and the entropy of a coin; the pair (0, 1) gets the
    mean of its two visits, and (0, 0), which was not tried, rises with it; the last decision is no visit.
    """
    known = ActionValues(jnp.asarray([[1.0, 3.0], [8.0, 0.0]]), jnp.ones((2, 2)))
    obs, action, reward = jnp.asarray([[0, 0, 1]]), jnp.asarray([[1, 1, 0]]), jnp.asarray([[1.0, 2.0, 4.0]])
    one = Trajectory(obs, action, reward, jnp.ones((1, 3)))
    h = 0.1 * np.log(2)
    target = (1 + 0.5 * (2 + h) + 2 + 0.5 * (4 + h)) / 2
    after = backed_up(0.5, known, jnp.zeros((2, 2)), one, 0.1)
    np.testing.assert_allclose(after.q, [[1 + target - 3, target], [8, 0]], rtol=1e-6)
    ended = one._replace(mask=jnp.asarray([[1.0, 1.0, 0.0]]))
    np.testing.assert_allclose(
        backed_up(0.5, known, jnp.zeros((2, 2)), ended, 0.1).q[0, 1], (1 + 0.5 * (2 + h) + 2) / 2, rtol=1e-6
    )


def test_actions_never_tried_count_as_the_mean_of_those_that_were():
    q, seen = jnp.asarray([[1.0, 3.0, 9.0], [9.0, 9.0, 9.0]]), jnp.asarray([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(filled(ActionValues(q, seen), jnp.zeros((2, 3))), [[1, 3, 2], [0, 0, 0]], atol=1e-6)


def test_sampled_runs_reach_the_optimum_too():
    """In a deterministic world to rounding, once the batch is large enough to see everything now and then."""
    fleet, policy = pf.gridworld(width=3, horizon=6), pf.TableSoftmax(9, 4)
    best = exact_soft.soft_optimum(mean_mdp(fleet), LAMBDA)
    simulation = simulation_of(fleet, policy, [FedNPG(0.0, 0.2, LAMBDA, 30)] * 2, [0, 1])
    after = simulation.advance(simulation.start(), 0, 80).server.message
    assert np.abs(log_softmax(after) - best.log_policy).max() < 1e-3


def test_agents_played_in_python_give_the_compiled_numbers():
    fleet, policy = pf.gridworld(width=2, horizon=4), pf.TableSoftmax(4, 4)
    algorithm = FedNPG(0.5, 0.1, 0.5, 3)
    server, state = algorithm.init(policy.init())
    key = jax.random.key(3)
    agent = Sampled(policy)(fleet.task(1))
    traced = jax.jit(algorithm.client)(server.message, state, agent, key)
    live = algorithm.client(
        server.message, state, eqx.tree_at(lambda a: a.sampler, agent, InPython(agent.sampler)), key
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), traced, live)


def test_it_refuses_what_has_no_table_and_steps_beyond_policy_iteration():
    features = pf.LogLinearSoftmax(np.eye(100).reshape(25, 4, 100))
    with pytest.raises(pf.UserError, match="fedavg-pg"):
        FedNPG(0.5, 0.3).check_supports(GRID, features)
    with pytest.raises(pf.UserError, match=r"at most \(1 - discount\) / entropy = 1"):
        Private(FedNPG(0.5, 1.1), 1.0, 0.0).check_supports(GRID, POLICY)
    with pytest.raises(pf.UserError, match="horizon"):
        FedNPG(0.5, 0.3).check_supports(pf.gridworld(horizon=0), POLICY)
    FedNPG(0.5, 1.0).check_supports(GRID, POLICY)
    with pytest.raises(pf.UserError, match="entropy must be"):
        FedNPG(0.5, 0.3, entropy=0.0)
