"""Curvature control, several adaptation steps, learned step sizes: exact identities and limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import Listed, batch, enumerate_trajectories, index_key, law, random_mdp
from tiers import some_slow

import perfedrl as pf
from perfedrl import exact
from perfedrl.errors import UserError
from perfedrl.estimators import (
    CONTROLS,
    PolicyObjective,
    Sampled,
    StepKeys,
    adapt,
    first_order_gradient,
    meta_gradient,
)
from perfedrl.estimators.batch_split import (
    BatchSplitMoments,
    candidate_sizes,
    choose_candidate,
    estimate_from_halves,
    initial_moments,
    predicted_error,
    split_gradient,
)
from perfedrl.estimators.curvature_control import Limited, ShrinkageState, Shrunk, curvature_term
from perfedrl.estimators.meta import adaptation, backpropagate_adaptation
from perfedrl.policies import TableSoftmax

FLEET, POLICY = pf.gridworld(width=3, horizon=5), TableSoftmax(9, 4)
KEYS = StepKeys(*jax.random.split(jax.random.key(5), 3))
KEYS_60 = jax.random.split(jax.random.key(6), 60)
close = {"rtol": 0, "atol": 1e-10}


def problem(seed=0):
    """An exact agent, parameters, and an outer gradient, in float64."""
    mdp = pf.envs.random_mdps(agents=1, states=3, actions=2, horizon=3, seed=seed).task(0)
    policy = TableSoftmax(3, 2)
    return mdp, policy, np.random.default_rng(seed).normal(size=(3, 2))


class Noisy:
    """An exact agent whose curvature has Gaussian noise of standard deviation 1 / sqrt(m) in each component."""

    traceable = True

    def __init__(self, agent):
        self.agent = agent

    def gradient(self, params, key, m):
        return self.agent.gradient(params, key, m)

    def curvature(self, params, v, key, m):
        return self.agent.curvature(params, v, key, m) + jax.random.normal(key, v.shape) / m**0.5

    def value(self, params, key, m):
        return self.agent.value(params, key, m)


@pytest.mark.parametrize("name", CONTROLS)
def test_control_tends_to_the_exact_estimate_as_the_curvature_batch_grows(name, x64):
    mdp, policy, theta = problem()
    agent, alpha = Noisy(exact.Exact(policy)(mdp)), 0.7
    v = jnp.asarray(np.random.default_rng(1).normal(size=theta.shape))
    truth = alpha * np.einsum("abcd,cd->ab", exact.hessian(mdp, theta), v)
    control = CONTROLS[name]()
    far = []
    for m in (10**4, 10**8, 10**12):
        term_of = jax.jit(lambda v, m=m: control(agent, theta, alpha, v, jax.random.key(3), m, control.init())[0])
        came = term_of(v)
        far.append(np.abs(np.asarray(came) - truth).max())
    assert far[0] > far[1] > far[2]
    assert far[-1] < 1e-4 * np.abs(truth).max()


@pytest.mark.parametrize("name", CONTROLS)
def test_control_without_curvature_trajectories_is_the_first_order_estimate(name):
    agent, theta = Sampled(POLICY)(FLEET.task(0)), jax.random.normal(jax.random.key(0), (9, 4))
    control = CONTROLS[name]()
    v = jnp.ones((9, 4))
    came, _ = control(agent, theta, 0.7, v, KEYS.curvature, 0, control.init())
    np.testing.assert_array_equal(came, 0)
    path = adaptation(agent, theta, 0.7, KEYS.inner, 4)
    g_out = agent.gradient(path.end, KEYS.outer, 5)
    without = backpropagate_adaptation(agent, path, 0.7, g_out, KEYS.curvature, 0, control, control.init()).gradient
    np.testing.assert_array_equal(without, first_order_gradient(agent, theta, 0.7, KEYS, 4, 5))


def test_noisier_curvature_terms_are_shrunk_more():
    """With noise of standard deviation 1 / sqrt(m), the shrinkage factor falls with the number of trajectories."""
    mdp, policy, theta = problem()
    agent, v = Noisy(exact.Exact(policy)(mdp)), jax.random.normal(jax.random.key(2), (3, 2))
    shares = []
    for m in (4, 10**6, 10**10):

        def step(state, key, m=m):
            return (Shrunk()(agent, theta, 0.7, v, key, m, state)[1], None)

        state, _ = jax.jit(lambda keys, step=step: jax.lax.scan(step, Shrunk().init(), keys))(KEYS_60)
        shares.append(float(jnp.clip(state.signal / state.signal_and_noise, 0, 1)))
    assert shares[0] < shares[1] < shares[2] <= 1
    assert shares[0] < 0.5 < shares[2]


def test_a_limited_term_keeps_its_direction_and_loses_its_length():
    agent, theta = Sampled(POLICY)(FLEET.task(0)), jax.random.normal(jax.random.key(0), (9, 4))
    v = 0.01 * jax.random.normal(jax.random.key(2), (9, 4))
    free = curvature_term(agent, theta, 5.0, v, KEYS.curvature, 9)
    longest = 0.01 * 3 * np.linalg.norm(v)
    assert np.linalg.norm(free) > longest
    came, _ = Limited(0.01)(agent, theta, 5.0, v, KEYS.curvature, 9, ())
    np.testing.assert_allclose(came, free * longest / np.linalg.norm(free), rtol=1e-5)
    loose, _ = Limited(1e6)(agent, theta, 5.0, v, KEYS.curvature, 9, ())
    np.testing.assert_array_equal(loose, free)


def test_inner_products_of_halves_estimate_squared_lengths_without_bias():
    """Over all pairs of trajectories: E[c1 . c2] = |E c|^2 and E|c1 - c2|^2 / 2 = the variance of one."""
    rng = np.random.default_rng(0)
    mdp = random_mdp(rng, (2, 2, 1), 0.9)
    policy, t = TableSoftmax(2, 2), enumerate_trajectories(mdp)
    theta, v = rng.normal(size=(2, 2)), rng.normal(size=(2, 2))
    with jax.enable_x64(True):
        agent = PolicyObjective(Listed(batch(t)), policy, mdp.discount)
        each = jax.jit(jax.vmap(lambda i: agent.curvature(theta, v, index_key(i), 1)))(jnp.arange(len(t.states)))
        q = law(policy, theta, t)
        q, each = np.asarray(q), np.asarray(each).reshape(len(t.states), -1)
    mean = q @ each
    np.testing.assert_allclose(q @ (each @ each.T) @ q, mean @ mean, **close)
    variance = q @ np.sum((each - mean) ** 2, axis=1)
    apart = np.sum((each[:, None] - each[None]) ** 2, axis=-1)
    np.testing.assert_allclose(q @ apart @ q / 2, variance, **close)
    # And `halves` computes just these from its two estimates.
    values = {0: jnp.asarray([1.0, 2.0]), 1: jnp.asarray([3.0, -1.0])}
    calls = iter((0, 1))
    estimate, noise, signal = estimate_from_halves(lambda key, m: values[next(calls)], jax.random.key(0), 4)
    np.testing.assert_allclose(estimate, [2.0, 0.5])
    assert float(signal) == pytest.approx(1 * 3 - 2)
    assert float(noise) == pytest.approx((4 + 9) / (1 / 2 + 1 / 2))


@pytest.mark.parametrize(("noise", "signal", "expected"), [(1e-6, 100.0, 4), (1e6, 1e-6, 4), (50.0, 40.0, 10)])
def test_the_split_minimizes_the_predicted_error(noise, signal, expected):
    """With very little or very much noise the smallest curvature batch is chosen, in between a larger one."""
    known = BatchSplitMoments(jnp.asarray(1.0), jnp.asarray(noise), jnp.asarray(signal), jnp.asarray(1.0))
    sizes = candidate_sizes(20)
    assert sizes == [4, 5, 10, 15]
    chosen = int(choose_candidate(known, 20))
    errors = [float(predicted_error(known, jnp.asarray(m), jnp.asarray(20 - m))) for m in sizes]
    assert errors[chosen] == min(errors)
    assert sizes[chosen] >= expected if expected > 4 else sizes[chosen] == 4
    assert int(choose_candidate(initial_moments(), 20)) == 2, "nothing known: the middle"


@pytest.mark.slow
def test_the_automatic_split_spends_its_budget_and_learns_from_it():
    agent, theta = Sampled(POLICY)(FLEET.task(0)), jnp.zeros((9, 4))
    made = jax.jit(lambda t: split_gradient(agent, t, 1.0, KEYS, 4, 20, initial_moments()))(theta)
    assert jax.tree.map(np.shape, made.gradient) == (9, 4)
    assert float(made.known.seen) == pytest.approx(0.1)
    assert float(made.known.outer) > 0
    plain = pf.PerFedAvgPG(1.0, 0.3, 2, 4, 10, 10, control="auto")
    assert plain.trajectories_per_round == 2 * 24
    server, state = plain.init(theta)
    upload, state = jax.jit(lambda *args: plain.client(*args, agent, jax.random.key(0)))(server.message, state)
    assert float(state.seen) > 0.1, "what is known stays with the agent"
    assert upload.shape == (9, 4)


@pytest.mark.parametrize("steps", some_slow([1, 2, 3], [2]))
def test_several_steps_are_the_gradient_through_all_of_them(steps, x64):
    """Without noise: autodiff through nu exact adaptation steps, for the parameters and for each step size."""
    mdp, policy, theta = problem()
    theta, alpha, agent, none = jnp.asarray(theta), 0.6, exact.Exact(policy)(mdp), CONTROLS["none"]()

    def after(theta, alpha):
        for _ in range(steps):
            theta = theta + alpha * jax.grad(lambda t: exact.J(policy, mdp, t))(theta)
        return exact.J(policy, mdp, theta)

    came = jax.jit(lambda t: meta_gradient(agent, t, alpha, KEYS, 1, 1, 1, steps))(theta)
    np.testing.assert_allclose(came, jax.grad(after)(theta, alpha), **close)

    @jax.jit
    def by_step_size(theta):
        path = adaptation(agent, theta, alpha, KEYS.inner, 1, steps)
        return backpropagate_adaptation(
            agent, path, alpha, agent.gradient(path.end, KEYS.outer, 1), KEYS.curvature, 1, none, ()
        ).step

    by_step = by_step_size(theta)
    each = jnp.full(theta.shape, alpha)
    np.testing.assert_allclose(by_step, jax.grad(after, argnums=1)(theta, each), **close)
    np.testing.assert_allclose(jnp.sum(by_step), jax.grad(after, argnums=1)(theta, alpha), **close)


def test_step_sizes_of_their_own_enter_the_jacobian(x64):
    mdp, policy, theta = problem()
    alpha, agent = jnp.asarray(np.random.default_rng(3).uniform(0.1, 1, theta.shape)), exact.Exact(policy)(mdp)

    def after(t):
        return exact.J(policy, mdp, t + alpha * jax.grad(lambda x: exact.J(policy, mdp, x))(t))

    came = jax.jit(lambda t: meta_gradient(agent, t, alpha, KEYS, 1, 1, 1))(jnp.asarray(theta))
    np.testing.assert_allclose(came, jax.grad(after)(jnp.asarray(theta)), **close)


@pytest.mark.slow
def test_memory_grows_with_the_steps_by_parameter_vectors_alone():
    """Trajectories are not kept from step to step: 8 steps need the memory of 2 and a few vectors more."""
    agent, theta = Sampled(POLICY)(FLEET.task(0)), jnp.zeros((9, 4))

    def program(n):
        return jax.jit(lambda t: meta_gradient(agent, t, 0.5, KEYS, 50, 50, 50, n))

    needed = [program(n).lower(theta).compile().memory_analysis().temp_size_in_bytes for n in (2, 8)]
    assert needed[1] - needed[0] <= 6 * 4 * theta.nbytes
    assert needed[0] > 50 * 6 * 4 * 4, "one batch is much more than that"


def test_deployment_takes_as_many_steps_and_shares_the_trajectories_among_them():
    algorithm = pf.PerFedAvgPG(0.8, 0.3, adaptation_steps=3, deployment_alpha=0.5)
    agent, theta, key = Sampled(POLICY)(FLEET.task(0)), jnp.zeros((9, 4)), jax.random.key(1)
    came = algorithm.personalize(theta, (), agent, key, 31)
    np.testing.assert_array_equal(came, adapt(agent, theta, 0.5, key, 10, 3))
    np.testing.assert_array_equal(algorithm.personalize(theta, (), agent, key, 0), theta)
    assert algorithm.trajectories_per_round == 5 * (3 * 20 + 10)


@pytest.mark.parametrize("kind", ["scalar", "per-parameter"])
def test_learned_step_sizes_climb_by_the_cosine_of_adaptation_and_outer_gradient(kind, x64):
    mdp, policy, theta = problem()
    agent, alpha, rate = exact.Exact(policy)(mdp), 0.7, 0.05
    algorithm = pf.PerFedAvgPG(alpha, 0.3, 1, learn_alpha=kind, alpha_rate=rate)
    server, state = algorithm.init(jnp.asarray(theta))
    upload, _ = jax.jit(lambda message: algorithm.client(message, state, agent, jax.random.key(0)))(server.message)
    g = exact.gradient(mdp, theta)
    g_out = exact.gradient(mdp, theta + alpha * g)
    shares = g * g_out / (np.linalg.norm(g) * np.linalg.norm(g_out))
    expected = rate * (shares.sum() if kind == "scalar" else np.clip(shares.size * shares, -1, 1))
    np.testing.assert_allclose(upload.log_step, expected, **close)
    step = algorithm.deployment_step_size(upload)
    np.testing.assert_allclose(step, alpha * np.exp(expected), **close)
    plain = pf.PerFedAvgPG(alpha, 0.3, 1).client(jnp.asarray(theta), (), agent, jax.random.key(0))[0]
    np.testing.assert_allclose(upload.theta, plain, **close)


@pytest.mark.slow
def test_zero_rewards_change_no_parameters_and_give_no_nan():
    mdp = pf.envs.TabularMDP(np.ones((1, 2, 1)), np.zeros((1, 2)), np.ones(1), 2, 0.9)
    agent, theta = Sampled(TableSoftmax(1, 2))(mdp), jnp.zeros((1, 2))
    for settings in ({"learn_alpha": "scalar"}, {"control": "shrink"}, {"control": "auto"}, {"control": "limit"}):
        algorithm = pf.PerFedAvgPG(1.0, 0.3, 1, clip=1.0, **settings)
        server, state = algorithm.init(theta)
        upload, _ = algorithm.client(server.message, state, agent, jax.random.key(0))
        for leaf in jax.tree.leaves(upload):
            np.testing.assert_array_equal(leaf, 0)


@pytest.mark.slow
def test_a_learned_step_size_is_saved_with_the_run_and_personalizes(tmp_path):
    from perfedrl.experiments.config import make_config
    from perfedrl.experiments.evaluate import evaluate
    from perfedrl.experiments.personalize import personalize
    from perfedrl.experiments.training import train

    algorithm = {"name": "per-fedavg-pg", "alpha": 0.5, "beta": 0.3, "learn_alpha": "per-parameter", "alpha_rate": 0.2}
    fleet = {"env": "gridworld", "width": 3, "horizon": 4}
    table = {"name": "learned", "seeds": 2, "rounds": 2, "fleet": fleet, "policy": {"name": "table"}}
    run = train(make_config({**table, "algorithm": algorithm}), tmp_path, compile_cache=False)
    assert run.message.log_step.shape == (2, 9, 4)
    assert np.abs(run.message.log_step).max() > 0
    own = personalize(run, agent=0, trajectories=5, episodes=4)
    assert own.alpha == pytest.approx(0.5 * np.exp(run.message.log_step[0]).mean(), rel=1e-5)
    assert len(evaluate(run)) == len(evaluate(run, alpha=0.5)) == 8


def test_a_clipped_step_is_at_most_beta_times_the_limit():
    agent, theta = Sampled(POLICY)(FLEET.task(0)), jnp.zeros((9, 4))
    steps = [pf.PerFedAvgPG(1.0, 0.5, 1, clip=c).client(theta, (), agent, jax.random.key(0))[0] for c in (None, 0.01)]
    assert np.linalg.norm(steps[0]) > 0.005
    assert np.linalg.norm(steps[1]) == pytest.approx(0.005, rel=1e-4)
    np.testing.assert_allclose(steps[1] / 0.005, steps[0] / np.linalg.norm(steps[0]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"control": "auto", "adaptation_steps": 2}, "auto"),
        ({"control": "auto", "m_h": 1, "m_out": 1}, "auto"),
        ({"control": "limit", "variant": "first-order"}, "exact variant"),
        ({"control": "shrink", "m_h": 1}, "two halves"),
        ({"clip": 0.0}, "clip"),
        ({"limit": -1.0}, "limit"),
        ({"alpha_rate": 0.0}, "alpha_rate"),
        ({"deployment_alpha": -1.0}, "deployment_alpha"),
        ({"adaptation_steps": 0}, "adaptation_steps"),
    ],
)
def test_invalid_settings_of_per_fedavg_pg_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        pf.PerFedAvgPG(1.0, 0.3, **settings)


def test_a_step_size_of_zero_cannot_be_learned():
    with pytest.raises(UserError, match="learn_alpha"):
        pf.PerFedAvgPG(0.0, 0.3, learn_alpha="scalar")


@pytest.mark.slow
def test_exact_evaluation_adapts_with_as_many_steps_as_training():
    fleet, policy = pf.gridworld(width=3, horizon=6), TableSoftmax(9, 4)
    one, three = (
        pf.simulate(fleet, policy, pf.PerFedAvgPG(1.0, 0.3, adaptation_steps=n), rounds=1, seeds=1, noiseless=True)
        for n in (1, 3)
    )
    assert (three.history.after[0, 0] > one.history.after[0, 0]).all(), "from the same start"


def test_configs_that_set_an_optional_setting_do_not_train_with_those_that_do_not():
    from perfedrl.experiments.config import make_config

    table = {"name": "x", "seeds": 1, "rounds": 1, "fleet": {"env": "gridworld"}, "policy": {"name": "table"}}

    def make(**more):
        return make_config({**table, "algorithm": {"name": "per-fedavg-pg", "alpha": 1.0, "beta": 0.3, **more}})

    assert make().trains_with != make(clip=0.5).trains_with == make(clip=0.7).trains_with
    with pytest.raises(UserError, match="two trajectories"):
        make_config(
            {**table, "curvature": "central-common", "algorithm": {**make().algorithm, "m_h": 3, "control": "shrink"}}
        )


def test_the_theory_refuses_extensions_of_the_algorithm():
    with pytest.raises(UserError, match="leave out control, clip"):
        pf.theory.fleet_problem.settings(pf.PerFedAvgPG(1.0, 0.3, control="limit", clip=1.0))
    assert isinstance(Shrunk().init(), ShrinkageState)
