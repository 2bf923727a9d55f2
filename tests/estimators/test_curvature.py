"""Curvature forms and baselines: unbiasedness is proven by enumerating all batches of small MDPs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import batch, enumerate_trajectories, law, problems, random_mdp
from hypothesis import given
from jaxprs import sizes
from tiers import examples, some_slow

import perfedrl as pf
from perfedrl import exact
from perfedrl.compilation import jit
from perfedrl.errors import UserError
from perfedrl.estimators import BASELINES, CURVATURES, UNBIASED, Credit, FromBatch, Sampled, forms
from perfedrl.estimators.advantages import credit
from perfedrl.estimators.baselines import others_fit
from perfedrl.policies import TableSoftmax
from perfedrl.policies.mlp import MLPSoftmax
from perfedrl.types import Trajectory

close = {"rtol": 0, "atol": 1e-10}
MADE = {name: CURVATURES[name]() for name in CURVATURES}
UNBIASED_FORMS = {name: form for name, form in MADE.items() if form.bias == UNBIASED}
SAME = ("causal", "loaded-dice", "taming", "taypo")
WITH_BASELINES = [(name, "leave-one-out") for name in UNBIASED_FORMS]
WITH_BASELINES += [(name, "ridge") for name in ("score", "dice", "causal")]
FREE = [name for name in BASELINES if name != "critic"]


def small(seed=0, shape=(2, 2, 1), discount=0.9):
    """A two-state MDP small enough to enumerate all pairs of trajectories; parameters and a direction."""
    rng = np.random.default_rng(seed)
    mdp = random_mdp(rng, shape, discount)
    return mdp, TableSoftmax(*shape[:2]), rng.normal(size=shape[:2]), rng.normal(size=shape[:2])


def all_pairs(t) -> Trajectory:
    """Every batch of two trajectories, leading axis: the batch."""
    n = len(t.states)
    i, j = np.divmod(np.arange(n * n), n)
    return jax.tree.map(lambda x: jnp.stack([x[i], x[j]], axis=1), batch(t))


def credited(policy, theta, b, discount, baseline):
    return credit(policy, baseline, discount, theta, b)


def _products(form, baseline, policy, theta, batches, discount, v):
    def one(b):
        return form.product(policy, theta, b, credited(policy, theta, b, discount, baseline), v, discount)

    return jax.vmap(one)(batches)


def _gradients(baseline, policy, theta, batches, discount):
    def one(b):
        return pf.estimators.policy_gradient(
            policy.log_prob, theta, b, credited(policy, theta, b, discount, baseline).advantage
        )

    return jax.vmap(one)(batches)


products, gradients = jit(_products, static_argnums=(0, 1)), jit(_gradients, static_argnums=0)


def weights(policy, theta, t):
    q = law(policy, theta, t)
    return jnp.outer(q, q).ravel()


@pytest.mark.parametrize(
    ("form", "baseline"),
    some_slow(WITH_BASELINES, [("score", "leave-one-out"), ("causal", "ridge")]),
)
def test_products_are_unbiased_with_baselines__eq_3(form, baseline):
    """Enumerate pairs of trajectories, the smallest batches in which baselines depend on another trajectory."""
    mdp, policy, theta, v = small()
    t = enumerate_trajectories(mdp)
    with jax.enable_x64(True):
        made = products(MADE[form], BASELINES[baseline](), policy, theta, all_pairs(t), mdp.discount, v)
        mean = np.asarray(jnp.einsum("x,x...->...", weights(policy, theta, t), made))
    np.testing.assert_allclose(mean, np.einsum("abcd,cd->ab", exact.hessian(mdp, theta), v), **close)


@pytest.mark.parametrize("form", some_slow(UNBIASED_FORMS, ["score", "causal"]))
@examples(8)
@given(problem=problems())
def test_products_are_unbiased_on_random_problems__eq_3(form, problem):
    mdp, theta, rng = problem
    policy, t, v = exact.softmax_of(mdp), enumerate_trajectories(mdp), rng.normal(size=theta.shape)
    with jax.enable_x64(True):
        alone = jax.tree.map(lambda x: x[:, None], batch(t))
        made = products(MADE[form], BASELINES["none"](), policy, theta, alone, mdp.discount, v)
        mean = np.asarray(jnp.einsum("x,x...->...", law(policy, theta, t), made))
    np.testing.assert_allclose(mean, np.einsum("abcd,cd->ab", exact.hessian(mdp, theta), v), **close)


@pytest.mark.parametrize("baseline", FREE)
@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 3, 0), (3, 2, 0)])
def test_gradients_are_unbiased_with_every_baseline__eq_2(baseline, shape):
    mdp, policy, theta, _ = small(3, shape)
    t = enumerate_trajectories(mdp)
    with jax.enable_x64(True):
        g = gradients(BASELINES[baseline](), policy, theta, all_pairs(t), mdp.discount)
        mean = np.asarray(jnp.einsum("x,x...->...", weights(policy, theta, t), g))
    np.testing.assert_allclose(mean, exact.gradient(mdp, theta), **close)


def test_a_baseline_that_saw_the_trajectory_itself_would_be_biased():
    """The mean of the whole batch, own trajectory included, fails the test of unbiasedness above."""
    mdp, policy, theta, _ = small()
    t = enumerate_trajectories(mdp)

    def own(policy, params, b, R, discount):
        return jnp.broadcast_to(R.mean(axis=0), R.shape)

    with jax.enable_x64(True):
        g = gradients(own, policy, theta, all_pairs(t), mdp.discount)
        mean = np.asarray(jnp.einsum("x,x...->...", weights(policy, theta, t), g))
    assert np.abs(mean - exact.gradient(mdp, theta)).max() > 1e-3


@pytest.mark.parametrize("form", SAME)
@pytest.mark.parametrize("baseline", ["none", "leave-one-out"])
def test_four_published_forms_are_one_estimate_batch_by_batch(form, baseline):
    mdp, policy, theta, v = small(1, (3, 2, 2))
    t = enumerate_trajectories(mdp)
    chosen = np.random.default_rng(0).integers(0, len(t.states), (40, 3))
    with jax.enable_x64(True):
        some = jax.tree.map(lambda x: x[chosen], batch(t))
        args = BASELINES[baseline](), policy, theta, some, mdp.discount, v
        expected, came = np.asarray(products(MADE["causal"], *args)), np.asarray(products(MADE[form], *args))
        dice = np.asarray(products(MADE["dice"], *args))
    np.testing.assert_allclose(came, expected, **close)
    assert (np.abs(dice - expected).max() < 1e-10) == (baseline == "none"), "DiCE's baseline does not reach pairs"


def test_lvc_is_biased_by_the_pairs_it_drops_and_taypo_reaches_from_it_to_the_truth():
    mdp, policy, theta, v = small(2)
    t = enumerate_trajectories(mdp)
    truth = np.einsum("abcd,cd->ab", exact.hessian(mdp, theta), v)

    def bias(form):
        with jax.enable_x64(True):
            alone = jax.tree.map(lambda x: x[:, None], batch(t))
            made = products(form, BASELINES["none"](), policy, theta, alone, mdp.discount, v)
            return np.asarray(jnp.einsum("x,x...->...", law(policy, theta, t), made)) - truth

    off = bias(MADE["lvc"])
    assert np.abs(off).max() > 1e-3
    for decay in (0.0, 0.25, 1.0):
        # With two decisions there is one pair, at distance one: the bias is linear in what is left out.
        np.testing.assert_allclose(bias(CURVATURES["taypo"](decay=decay)), (1 - decay) * off, **close)
    assert CURVATURES["taypo"](decay=0.5).bias != UNBIASED != MADE["lvc"].bias


def test_central_differences_err_by_the_square_of_their_step_and_are_exact_in_the_mean():
    mdp, policy, theta, v = small(4)
    agent, key = exact.Exact(policy)(mdp), jax.random.key(0)
    truth = np.einsum("abcd,cd->ab", exact.hessian(mdp, theta), v)
    with jax.enable_x64(True):
        errors = [
            np.abs(np.asarray(CURVATURES["central-common"](step=s)(agent, theta, jnp.asarray(v), key, 2)) - truth).max()
            for s in (0.2, 0.1, 0.05)
        ]
    assert errors[0] > errors[1] > errors[2] > 0
    np.testing.assert_allclose(np.log2(np.asarray(errors[:-1]) / errors[1:]), 2, atol=0.05)


def test_common_random_numbers_play_the_same_uniforms_on_both_sides_and_fresh_ones_do_not():
    class Recorder:
        traceable, keys = True, []

        def gradient(self, params, key, m):
            self.keys.append((tuple(np.asarray(jax.random.key_data(key))), m))
            return params

    v = jnp.asarray([3.0, 4.0])
    for name, same in (("central-common", True), ("central-fresh", False)):
        agent = Recorder()
        agent.keys = []
        product = CURVATURES[name](step=0.5)(agent, jnp.ones(2), v, jax.random.key(1), 8)
        (first, m), (second, _) = agent.keys
        assert m == 4, "half of the trajectories on each side"
        assert (first == second) == same
        np.testing.assert_allclose(product, v, rtol=1e-6)  # the gradient of |theta|^2 / 2: H v = v, whatever |v| is


@pytest.mark.parametrize("form", [name for name, form in MADE.items() if isinstance(form, FromBatch)])
def test_products_are_linear_and_no_array_grows_with_batch_times_parameters(form):
    policy, m, T = MLPSoftmax((2, 64, 4)), 60, 3
    d = 2 * 64 + 64 + 64 * 4 + 4
    params = policy.init(jax.random.key(0))
    obs = jax.random.normal(jax.random.key(1), (m, T, 2))
    action = jax.random.randint(jax.random.key(2), (m, T), 0, 4)
    b = Trajectory(obs, action, jnp.ones((m, T)), jnp.ones((m, T)))

    def product(v):
        return MADE[form].product(policy, params, b, Credit(b.reward), v, 0.9)

    v = jax.tree.map(jnp.ones_like, params)
    twice = jax.jit(product)(jax.tree.map(lambda x: 2 * x, v))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, 2 * y, rtol=2e-4, atol=1e-5), twice, jax.jit(product)(v))
    assert max(sizes(jax.make_jaxpr(product)(v).jaxpr)) < min(d * d, m * T * d // 2)


def test_leave_one_out_is_the_mean_of_the_others_and_a_single_trajectory_has_none():
    R = jnp.asarray([[1.0, 2.0], [3.0, 4.0], [8.0, 0.0]])
    b = Trajectory(R, R, R, R)

    def of(R):
        return BASELINES["leave-one-out"]()(None, R, b, R, 0.9)

    np.testing.assert_allclose(of(R), [[5.5, 2.0], [4.5, 1.0], [2.0, 3.0]])
    np.testing.assert_array_equal(of(R[:1]), 0)


def test_ridge_fits_each_part_of_a_batch_on_the_rest(x64):
    rng = np.random.default_rng(0)
    phi, y, strength = rng.normal(size=(13, 2, 3)), rng.normal(size=(13, 2)), 1e-2
    w = np.asarray(others_fit(jnp.asarray(phi), jnp.asarray(y), strength))
    assert len(w) == 10
    for part in range(10):
        rest = np.arange(13) % 10 != part
        x, z = phi[rest].reshape(-1, 3), y[rest].ravel()
        by_hand = np.linalg.solve(x.T @ x + 13 * strength * np.eye(3), x.T @ z)
        np.testing.assert_allclose(w[part], by_hand, rtol=1e-8)


@pytest.mark.slow
def test_a_critic_takes_noise_off_the_gradient_and_learns_returns():
    fleet = pf.envs.arc(goals=2, held_out=0)
    policy = pf.policies.actor_critic(fleet, hidden=(8,), critic=(8,))
    params = policy.init(jax.random.key(0))
    task = fleet.task(0)
    agent = Sampled(policy, baseline="critic")(task)
    b = agent.sampler.sample(params, jax.random.key(1), 50)
    g = agent.gradient_of(params, b)
    actor = Sampled(policy.actor, baseline="none")(task)
    plain = actor.gradient_of(params["actor"], b)
    A = credit(policy, agent.forms.baseline, task.discount, params, b)
    shift = pf.estimators.policy_gradient(policy.actor.log_prob, params["actor"], b, A.baseline)
    jax.tree.map(lambda x, y, z: np.testing.assert_allclose(x, y - z, rtol=1e-4, atol=1e-5), g["actor"], plain, shift)

    def fit(p):
        return policy.value_fit(p, b, A.returns / largest(b, task.discount))

    better = jax.tree.map(lambda x, d: x + 0.1 * d, params, g)
    assert fit(better) > fit(params), "its part of the gradient climbs its fit"


def largest(b, discount):
    from perfedrl.estimators.gradient import largest_to_go

    return largest_to_go(b, discount)


def test_entropy_is_rewarded_along_with_the_return():
    mdp = pf.gridworld(width=2, horizon=3).task(0)
    policy, theta, key = TableSoftmax(4, 4), jax.random.normal(jax.random.key(0), (4, 4)), jax.random.key(1)
    agents = [Sampled(policy, entropy=c)(mdp) for c in (0.0, 0.5)]
    b = agents[0].sampler.sample(theta, key, 30)
    plain, rewarded = (agent.gradient(theta, key, 30) for agent in agents)

    def bonus(theta):
        p = jax.nn.softmax(theta)[b.obs]
        return jnp.mean(jnp.sum(-jnp.sum(p * jnp.log(p), axis=-1) * 0.9 ** np.arange(4), axis=1))

    np.testing.assert_allclose(rewarded - plain, 0.5 * jax.grad(bonus)(theta), rtol=1e-4, atol=1e-6)


def test_incompatible_forms_are_refused():
    arc, table = pf.envs.arc(), pf.gridworld(width=2)
    for task, policy, settings_ in (
        (arc.task(0), MLPSoftmax((2, 4, 8)), {"baseline": "critic"}),
        (pf.envs.point_navigation().task(0), pf.policies.GaussianMLP((2, 4, 2)), {"curvature": "marginalized"}),
    ):
        agent = Sampled(policy, **settings_)(task)
        params = policy.init(jax.random.key(0))
        with pytest.raises(UserError, match="needs a policy"):
            agent.curvature(params, params, jax.random.key(0), 2)
    with pytest.raises(UserError, match="at least two trajectories"):
        Sampled(TableSoftmax(4, 4), "central-common")(table.task(0)).curvature(
            jnp.zeros((4, 4)), jnp.ones((4, 4)), jax.random.key(0), 1
        )
    for bad in (lambda: forms(entropy=-1.0), lambda: CURVATURES["taypo"](decay=2.0), lambda: BASELINES["ridge"](0.0)):
        with pytest.raises(UserError, match=r"must"):
            bad()
