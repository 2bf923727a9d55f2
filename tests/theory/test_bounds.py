"""The bounds of Sections 2 and 3 hold for quantities computed by enumerating all trajectories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import batch, enumerate_trajectories, fleets, law, problems
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from per_trajectory import per_trajectory_gradients, per_trajectory_matrices
from tiers import examples

import perfedrl as pf
from perfedrl import exact, theory
from perfedrl.algorithms import PerFedAvgPG
from perfedrl.envs.tabular import unstack
from perfedrl.policies import LogLinearSoftmax
from perfedrl.policies.mlp import forward
from perfedrl.theory import Batches, Constants, constants
from perfedrl.theory.estimate import enumerated
from perfedrl.theory.realized_bounds import drifts

slack = 1 + 1e-9
alphas = st.sampled_from((0.01, 0.1, 0.5, 2.0))


def test_constants_of_the_gridworld_by_hand__eq_4():
    fleet = pf.gridworld()
    c = constants(fleet, pf.TableSoftmax(25, 4))
    assert c == Constants(R_max=1.0, gamma=0.9, H=15, G=2.0, M=4.0, Lambda=8.0)
    assert pytest.approx(10) == c.R_bar
    assert pytest.approx(200) == c.G_J
    assert pytest.approx((16 * 4 + 4) * 100) == c.L_J
    assert pytest.approx(400) == c.M_bar
    assert pytest.approx(800) == c.Lambda_bar
    assert pytest.approx(16 * 2 * (6800 + 400) + 16 * 4 * 200 + 800) == c.rho_J
    assert c.G_F == c.G_J
    assert c.L_F == c.L_J
    assert theory.bias(c, 10) == theory.bias(c, 0) == 0


def small(alpha=0.5) -> Constants:
    """G_J = 1, L_J = 2, rho_J = 5; at alpha = 1/2, 1 + alpha L_J = 2."""
    return Constants(R_max=1.0, gamma=0.0, H=0, G=1.0, M=1.0, Lambda=1.0, alpha=alpha)


def test_bounds_of_the_estimate_by_hand__lemma_3_and_prop_1():
    c = small()
    assert (c.G_J, c.L_J, c.rho_J, c.stretch) == (1, 2, 1 * (2 + 1) + 1 * 1 + 1, 2)
    assert theory.bias(c, 4) == pytest.approx(2 * 1 * 1 / 2)
    assert theory.sharp_bias(c, 4) == pytest.approx(2 * 0.25 * 5 * 1 / (2 * 4))
    assert theory.sharp_bias(c, 4, variance=0.1) == pytest.approx(0.1 * theory.sharp_bias(c, 4))
    assert theory.second_moment(c, m_in=4, m_h=2, m_out=8) == pytest.approx(3 * (1 / 2 + 4 / 8 + 4 * 1 / 4))
    assert c.G_F == 2
    assert pytest.approx(4 * 2 + 0.5 * 5) == c.L_F


def test_bounds_of_the_first_order_estimate_by_hand__corollary_2():
    c = small()
    assert theory.bias(c, 4, "first-order") == pytest.approx(1 * (1 + 1 / 2))
    assert theory.sharp_bias(c, 4, "first-order") == pytest.approx(1 + 0.25 * 5 / 8)
    assert theory.second_moment(c, 4, 0, 8, "first-order") == pytest.approx(3 * (1 / 8 + 1 / 4 + 1))
    for m in (1, 10**6):
        assert theory.bias(c, m, "first-order") > theory.residual(c) == 1, "no batch removes the floor"


def test_bounds_of_runs_by_hand__lemmas_4_and_5_theorem_1_remarks_and_prop_3():
    c = small()
    L, G = 10.5, 2.0
    assert theory.ceiling(c) == pytest.approx(1 / (6 * L))
    beta = 1 / 100
    assert theory.drift(c, beta, 3) == pytest.approx(beta * 3 * G)
    gain = theory.one_step_progress(c, beta, t=3, n=5, squared_gradient=0.7, bias=0.2, second_moment=0.9)
    lost = 9 / 4 * beta * (L**2 * beta**2 * 9 * G**2 + 0.04) + L * beta**2 * 0.9 / 10
    assert gain == pytest.approx(beta / 2 * 0.7 - lost)
    run = {"rounds": 20, "beta": beta, "n": 5, "gap": 1.5, "bias": 0.2, "second_moment": 0.9}
    bound = theory.convergence(c, tau=4, **run)
    assert bound.optimization == pytest.approx(2 * 1.5 / (beta * 80))
    assert bound.drift == pytest.approx(1.5 * L**2 * G**2 * beta**2 * 16)
    assert bound.bias == pytest.approx(4.5 * 0.04)
    assert bound.variance == pytest.approx(L * beta * 0.9 / 5)
    assert bound.total == pytest.approx(bound.optimization + bound.drift + bound.bias + bound.variance)
    assert theory.convergence(c, tau=1, **run).drift == 0, "one step does not drift"
    assert theory.dissimilarity(c) == 1
    assert theory.certificate(small(0.25), 3.0) == pytest.approx(6.0), "at alpha = 1 / (2 L_J) the factor is 2"
    assert theory.certificate(c, 3.0) == np.inf
    assert theory.small_adaptation(c) == theory.bounds.SmallAdaptation(gradient=2.0, value=0.5)
    with pytest.raises(pf.UserError, match=r"condition \(i\) fails: beta = 1 is 63 times"):
        theory.convergence(c, tau=1, **{**run, "beta": 1.0})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gamma": 1.0}, "finite only for a discount below 1"),
        ({"gamma": -0.1}, "discount must lie in"),
        ({"alpha": -1.0}, "alpha must be"),
        ({"R_max": float("inf")}, "R_max must be"),
        ({"R_max": 0.0}, "R_max must be a finite number > 0"),
        ({"G": 0.0}, "G must be a finite number > 0"),
    ],
)
def test_invalid_constants_are_refused(change, says):
    with pytest.raises(pf.UserError, match=says):
        Constants(**{"R_max": 1.0, "gamma": 0.5, "H": 1, "G": 1.0, "M": 1.0, "Lambda": 1.0, **change})


@given(fleets())
def test_trajectories_obey_the_uniform_bounds__lemma_1(problem):
    (mdp, *_), theta, policy, rng = problem
    t = enumerate_trajectories(mdp)
    c = constants(mdp, policy)
    with jax.enable_x64(True):
        g = np.asarray(per_trajectory_gradients(policy, theta, batch(t), mdp.discount)).reshape(len(t.states), -1)
        u = np.asarray(per_trajectory_matrices(policy, theta, batch(t), mdp.discount))
    assert abs(exact.expected_return(mdp, theta, policy)) <= c.R_bar * slack
    assert np.linalg.norm(g, axis=1).max() <= c.G_J * slack
    assert np.linalg.norm(u, axis=(1, 2)).max() <= c.L_J * slack
    other = theta + rng.normal(size=theta.shape)
    change = (exact.hessian(mdp, theta, policy) - exact.hessian(mdp, other, policy)).reshape(theta.size, -1)
    assert np.linalg.norm(change, ord=2) <= c.rho_J * np.linalg.norm(theta - other) * slack


@given(fleets())
def test_gradients_are_no_further_apart_than_they_are_long__remark_1(problem):
    mdps, theta, policy, _ = problem
    g = np.stack([exact.gradient(mdp, theta, policy).ravel() for mdp in mdps])
    apart = ((g - g.mean(axis=0)) ** 2).sum(axis=1).mean()
    assert apart <= theory.dissimilarity(constants(exact.stacked(mdps), policy)) * slack


@examples(10)
@given(fleets(), alphas)
def test_meta_objective_obeys_its_bounds__lemma_2(problem, alpha):
    mdps, theta, policy, rng = problem
    c = constants(exact.stacked(mdps), policy, alpha)
    other = theta + rng.normal(size=theta.shape)
    here, there = (exact.meta_gradient(mdps, x, alpha, policy) for x in (theta, other))
    assert abs(exact.meta_objective(mdps, theta, alpha, policy)) <= c.R_bar * slack
    assert np.linalg.norm(here) <= c.G_F * slack
    assert np.linalg.norm(here - there) <= c.L_F * np.linalg.norm(theta - other) * slack


@examples(10)
@given(problems(), st.floats(0.05, 0.95))
def test_a_small_meta_gradient_certifies_the_adapted_policy__remark_2(problem, share):
    mdp, theta, _ = problem
    c = constants(mdp, exact.softmax_of(mdp))
    c = c.at(share / c.L_J)
    meta = np.linalg.norm(exact.meta_gradient([mdp], theta, c.alpha))
    own = np.linalg.norm(exact.gradient(mdp, theta + c.alpha * exact.gradient(mdp, theta)))
    assert own <= theory.certificate(c, meta) * slack
    if share <= 0.5:
        assert theory.certificate(c, meta) <= 2 * meta


@examples(10)
@given(problems(), st.sampled_from((0.05, 1.0)))
def test_every_realization_of_the_estimate_is_bounded__lemma_3_i(problem, alpha):
    mdp, theta, _ = problem
    policy, t = exact.softmax_of(mdp), enumerate_trajectories(mdp)
    c, d = constants(mdp, policy, alpha), theta.size
    with jax.enable_x64(True):
        b = batch(t)
        q = np.asarray(law(policy, theta, t))
        g = np.asarray(per_trajectory_gradients(policy, theta, b, mdp.discount))
        u = np.asarray(per_trajectory_matrices(policy, theta, b, mdp.discount))
        adapted = jnp.asarray(theta + alpha * g[int(q.argmax())])
        outer = np.asarray(per_trajectory_gradients(policy, adapted, b, mdp.discount)).reshape(len(q), d)
    realizations = outer @ (np.eye(d) + alpha * u).transpose(0, 2, 1)
    assert np.linalg.norm(realizations, axis=-1).max() <= c.G_F * slack


@examples(12)
@given(fleets(), alphas, st.sampled_from(((1, 1, 1), (2, 1, 3), (1, 4, 1))))
def test_the_estimate_obeys_its_bounds__lemma_3_prop_1_and_corollary_2(problem, alpha, sizes):
    (mdp, *_), theta, policy, _ = problem
    c, sizes = constants(mdp, policy, alpha), Batches(*sizes)
    if len(enumerate_trajectories(mdp).states) > 100:
        sizes = sizes._replace(m_in=1)
    for variant in ("exact", "first-order"):
        m = enumerated(mdp, policy, theta, alpha, sizes, variant)
        assert m.variance <= c.G_J**2 * slack
        assert m.bias <= theory.bias(c, sizes.m_in, variant) * slack
        assert m.bias <= theory.sharp_bias(c, sizes.m_in, variant, m.variance) * slack
        assert m.bias**2 <= m.second_moment <= theory.second_moment(c, *sizes, variant) * slack


@examples(8)
@given(fleets(), alphas, st.integers(0, 2**31))
def test_drift_within_a_round_is_bounded__lemma_4(problem, alpha, seed):
    mdps, _, policy, _ = problem
    fleet, beta, tau = pf.Fleet(exact.stacked(mdps)), 0.3, 4
    c = constants(fleet, policy, alpha)
    for variant in ("exact", "first-order"):
        algorithm = PerFedAvgPG(alpha, beta, tau, 2, 2, 2, variant)
        way, apart = drifts(theory.trace(fleet, policy, algorithm, rounds=2, seed=seed))
        bound = np.asarray([theory.drift(c, beta, t) for t in range(tau + 1)])
        assert way[0] == apart[0] == 0
        assert (way <= bound * (1 + 1e-5)).all()
        assert (apart <= bound**2 * (1 + 1e-5)).all()


@examples(10)
@given(fleets(), alphas)
def test_small_adaptation_stays_near_the_shared_objective__prop_3(problem, alpha):
    mdps, theta, policy, _ = problem
    far = theory.small_adaptation(constants(exact.stacked(mdps), policy, alpha))
    gradient = np.mean([exact.gradient(mdp, theta, policy) for mdp in mdps], axis=0)
    gap = np.linalg.norm(exact.meta_gradient(mdps, theta, alpha, policy) - gradient)
    assert gap <= far.gradient * slack
    before, after = exact.returns(mdps, theta, alpha, policy)
    assert abs(after.mean() - before.mean()) <= far.value * slack


@examples(10)
@given(fleets())
def test_at_alpha_0_objective_bounds_and_estimate_degenerate__prop_3(problem):
    mdps, theta, policy, _ = problem
    c = constants(exact.stacked(mdps), policy, 0.0)
    gradient = np.mean([exact.gradient(mdp, theta, policy) for mdp in mdps], axis=0)
    np.testing.assert_allclose(exact.meta_gradient(mdps, theta, 0.0, policy), gradient, rtol=0, atol=1e-10)
    assert (c.G_F, c.L_F, theory.bias(c, 7)) == (c.G_J, c.L_J, 0)
    assert theory.second_moment(c, 7, 7, 7) == pytest.approx(3 * c.G_J**2 / 7)
    m = enumerated(mdps[0], policy, theta, 0.0, Batches(1, 1, 5))
    assert m.bias == pytest.approx(0, abs=1e-10)
    assert m.second_moment == pytest.approx(m.variance / 5, abs=1e-10)


@pytest.mark.slow
@given(st.integers(0, 2**31))
def test_log_linear_policies_obey_their_constants__example_1(seed):
    rng = np.random.default_rng(seed)
    policy = LogLinearSoftmax(rng.normal(size=(1, 3, 2)))
    theta, other = rng.normal(size=(2, 2))
    with jax.enable_x64(True):

        def logp(t):
            return jnp.stack([policy.log_prob(t, jnp.asarray(0), jnp.asarray(a)) for a in range(3)])

        scores, here, there = jax.jacobian(logp)(theta), jax.hessian(logp)(theta), jax.hessian(logp)(other)
    assert np.linalg.norm(scores, axis=1).max() <= policy.G * slack
    assert np.linalg.norm(here, axis=(1, 2)).max() <= policy.M * slack
    change = np.linalg.norm(here - there, axis=(1, 2)).max()
    assert change <= policy.Lambda * np.linalg.norm(theta - other) * slack


@jax.jit
def log_softmax_derivatives(policy, flat, x):
    """The Jacobian and the Hessians of log pi(a | x) of every action."""
    unravel = ravel_pytree(policy.init(jax.random.key(0)))[1]

    def logp(t):
        return jax.nn.log_softmax(forward(unravel(t), x))

    return jax.jacobian(logp)(flat), jax.hessian(logp)(flat)


@examples(12)
@given(st.integers(0, 2**31), st.sampled_from(((2, 4, 3), (3, 3, 2, 4))), st.sampled_from((0.1, 1.0, 5.0)))
def test_networks_obey_their_constants_on_a_ball__example_1(seed, widths, radius):
    rng, policy = np.random.default_rng(seed), pf.MLPSoftmax(widths)
    with jax.enable_x64(True):
        at = rng.normal(size=(2, len(ravel_pytree(policy.init(jax.random.key(0)))[0])))
        here, there = at * radius * rng.uniform(size=(2, 1)) / np.linalg.norm(at, axis=1, keepdims=True)
        x = rng.normal(size=widths[0])
        largest = 1.5
        x *= largest / np.linalg.norm(x)
        scores, hessian = log_softmax_derivatives(policy, here, x)
        _, other = log_softmax_derivatives(policy, there, x)
    G, M, Lambda = policy.regularity_within(radius, largest)
    assert np.linalg.norm(scores, axis=1).max() <= G * slack
    assert np.linalg.norm(hessian, axis=(1, 2)).max() <= M * slack
    change = np.linalg.norm(hessian - other, axis=(1, 2)).max()
    assert change <= Lambda * np.linalg.norm(here - there) * slack


def test_without_a_hidden_layer_a_network_is_a_log_linear_policy_and_its_constants_are_close():
    G, M, Lambda = pf.MLPSoftmax((2, 3)).regularity_within(10.0, 1.0)
    # Features (x, 1) of norm sqrt(2): a spectral norm of sqrt(2), and no second derivatives.
    assert (G, M, Lambda) == pytest.approx((2.0, 1.0, 4.0))


def test_the_constants_of_a_small_network_by_hand__example_1():
    """Two inputs of norm 1, three hidden units, two actions, on a ball of radius 1/2."""
    r, tanh_2, tanh_3 = 0.5, 4 / (3 * np.sqrt(3)), 2.0
    # The first layer is linear in its six weights and three biases: |(x, 1)| = sqrt(2), and three outputs.
    spectral, first, value = np.sqrt(2), np.sqrt(3 * 2), r * np.sqrt(2)
    second, third = tanh_2 * spectral * first, tanh_3 * spectral**2 * first
    out = np.sqrt(value**2 + 1 + (r * spectral) ** 2)
    out_2 = np.sqrt(2 * 2 * first**2 + (r * second) ** 2)
    out_3 = np.sqrt(3 * 2 * second**2 + (r * third) ** 2)
    G, M = np.sqrt(2) * out, 0.5 * out**2 + np.sqrt(2) * out_2
    Lambda = np.sqrt(2) * out**3 + 1.5 * out * out_2 + np.sqrt(2) * out_3
    assert pf.MLPSoftmax((2, 3, 2)).regularity_within(r, 1.0) == pytest.approx((G, M, Lambda))


def test_policies_without_constants_say_what_they_need():
    arc = pf.arc()
    with pytest.raises(pf.UserError, match="hold on bounded sets only: give a radius"):
        constants(arc, pf.MLPSoftmax((2, 32, 8)))
    with pytest.raises(pf.UserError, match="the radius must be a finite number > 0"):
        constants(arc, pf.MLPSoftmax((2, 32, 8)), radius=0.0)
    c = constants(arc, pf.MLPSoftmax((2, 32, 8)), 0.1, radius=2.0)
    assert c.R_max == 1
    assert 0 < c.G < c.M < c.Lambda < c.L_F < np.inf
    with pytest.raises(pf.UserError, match="GaussianMLP has no finite constants"):
        constants(pf.point_navigation(), pf.GaussianMLP((2, 8, 2)), radius=1.0, reward_bound=10.0)
    with pytest.raises(pf.UserError, match="state none"):
        constants(pf.point_navigation(), pf.TableSoftmax(1, 2))
    with pytest.raises(pf.UserError, match="no `observation_bound`"):
        constants(pf.point_navigation(), pf.MLPSoftmax((2, 8, 2)), radius=1.0)
    with pytest.raises(pf.UserError, match=r"rewards reach 1: 0\.5 is no bound"):
        constants(pf.gridworld(), pf.TableSoftmax(25, 4), reward_bound=0.5)
    assert constants(pf.gridworld(), pf.TableSoftmax(25, 4), reward_bound=3.0).R_max == 3


def test_bounds_on_rewards_and_observations_are_kept():
    from perfedrl.rollout import RolloutSampler

    fleet, policy = pf.arc(), pf.MLPSoftmax((2, 4, 8))
    sampler = RolloutSampler(fleet.task(0), policy)
    seen = sampler.sample(policy.init(jax.random.key(0)), jax.random.key(1), 500)
    task = fleet.train
    assert np.abs(seen.reward).max() <= task.reward_bound
    assert 0.9 * task.observation_bound < np.linalg.norm(seen.obs, axis=-1).max() <= task.observation_bound * slack
    mdps = pf.envs.random_mdps().train
    assert mdps.reward_bound == max(np.abs(mdp.r).max() for mdp in unstack(mdps))
