"""SG-MRL and STORM: what they estimate, over everything that can be sampled."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import Listed, batch, enumerate_trajectories, enumerated_return, index_key, law, random_mdp
from simulations import simulation_of
from tiers import some_slow

import perfedrl as pf
from perfedrl import exact
from perfedrl.algorithms import SGMRL, StormPG, local_steps
from perfedrl.algorithms.sg_mrl import ReturnAverage
from perfedrl.algorithms.storm import WeightRecord, no_weights, reweighted_gradient, start
from perfedrl.compilation import jit
from perfedrl.estimators import PolicyObjective, Sampled, StepKeys, forms
from perfedrl.policies import actor_critic
from perfedrl.types import Trajectory

close = {"rtol": 0, "atol": 1e-10}
FLEET, TABLE = pf.envs.random_mdps(agents=4, states=9, actions=4, horizon=5), pf.TableSoftmax(9, 4)
KEY = jax.random.key(7)
BOTH = {"sg-mrl": SGMRL(1.0, 0.3, 3, 3, 3), "per-fedavg-storm": StormPG(1.0, 0.3, 0.4, 3, 3, 3)}


class Plain:
    """A plain Python sampler of the same trajectories as another's."""

    traceable = False

    def __init__(self, sampler):
        self.draw = jit(lambda params, key, m: sampler.sample(params, key, m), static_argnums=2)

    def sample(self, params, key, m):
        return jax.tree.map(np.asarray, self.draw(params, key, m))


def small(seed, shape):
    """A small MDP, two parameter vectors for it, its policy and its trajectories."""
    rng = np.random.default_rng(seed)
    mdp = random_mdp(rng, shape, 0.9)
    theta, other = rng.normal(size=(2, *shape[:2]))
    return mdp, theta, other, exact.softmax_of(mdp), enumerate_trajectories(mdp)


def all_batches(t, m):
    """Every batch of m trajectories, as rows of indices into the list; row i is what the key with number i draws."""
    n = len(t.states)
    return np.arange(n**m)[:, None] // n ** np.arange(m) % n


def written_out_gradient(policy, theta, t, rows, discount, leave_one_out):
    """g(D; theta) of one batch, eq. (2), from logarithms of probabilities and sums of rewards."""
    to_go = np.stack(
        [t.rewards[:, h:] @ discount ** np.arange(h, t.rewards.shape[1]) for h in range(t.rewards.shape[1])]
    )
    weights = jnp.asarray(to_go.T)[rows]
    if leave_one_out:
        weights = weights - weights[::-1]
    log_pi = lambda x: jnp.log(policy.probabilities(x)[t.states, t.actions][rows])  # noqa: E731
    return jax.grad(lambda x: jnp.sum(weights * log_pi(x)) / len(rows))(theta)


def written_out_V(theta, policy, t, discount, alpha, m_in, leave_one_out):
    """V(theta), the sum over all adaptation batches of their probability times the return after their step."""

    def term(rows):
        g = written_out_gradient(policy, theta, t, rows, discount, leave_one_out)
        return jnp.prod(law(policy, theta, t)[rows]) * enumerated_return(policy, theta + alpha * g, t, discount)

    return jnp.sum(jax.vmap(term)(all_batches(t, m_in)))


def mean_direction(algorithm, agent, theta, state, t):
    """The expected local step of length beta = 1, over all inner batches and the outer trajectories after each."""
    rows, numbers = all_batches(t, algorithm.m_in), jnp.arange(len(t.states))

    def inner(i, rows):
        adapted = theta + algorithm.alpha * agent.gradient(theta, index_key(i), algorithm.m_in)
        step = lambda k: algorithm.step(agent, (theta, state), StepKeys(*map(index_key, (i, 0, k))))[0]  # noqa: E731
        after = law(agent.policy, adapted, t)
        return jnp.prod(law(agent.policy, theta, t)[rows]) * jnp.tensordot(after, jax.vmap(step)(numbers) - theta, 1)

    return jnp.sum(jax.vmap(inner)(jnp.arange(len(rows)), rows), axis=0)


@pytest.mark.parametrize(
    ("shape", "m_in", "baseline", "seen"),
    some_slow(
        [
            ((2, 2, 1), 1, "none", 0.0),
            ((2, 2, 1), 1, "none", 0.7),
            ((1, 3, 0), 2, "none", 0.0),
            ((2, 2, 1), 2, "leave-one-out", -1.3),
        ],
        [((2, 2, 1), 1, "none", 0.7)],
    ),
)
def test_the_estimate_is_unbiased_for_the_objective_with_a_sampled_step(shape, m_in, baseline, seen):
    mdp, theta, _, policy, t = small(3, shape)
    alpha, algorithm = 1.5, SGMRL(1.5, 1.0, m_in=m_in, m_out=1)
    with jax.enable_x64(True):
        agent = PolicyObjective(Listed(batch(t)), policy, mdp.discount, forms(baseline=baseline))
        state = ReturnAverage(jnp.asarray(0.4 * seen), jnp.asarray(0.4 if seen else 0.0))
        mean = np.asarray(jit(lambda x: mean_direction(algorithm, agent, x, state, t))(theta))
        V = lambda x: written_out_V(x, policy, t, mdp.discount, alpha, m_in, baseline != "none")  # noqa: E731
        expected = np.asarray(jit(jax.grad(V))(theta))
    np.testing.assert_allclose(mean, expected, **close)
    apart = np.abs(expected - exact.meta_gradient([mdp], theta, alpha)).max()
    assert apart > 1e-3, "with few trajectories it is another objective than the paper's"


def test_what_was_seen_is_a_mean_over_earlier_steps_and_0_before():
    seen = ReturnAverage(jnp.zeros(()), jnp.zeros(()))
    assert seen.mean == 0
    assert seen.with_another(jnp.asarray(3.0)).mean == pytest.approx(3)
    two = seen.with_another(jnp.asarray(3.0)).with_another(jnp.asarray(5.0))
    assert two.mean == pytest.approx((0.9 * 3 + 5) / 1.9)


@jit
def one_step(algorithm, state):
    """A local step from 0, and the trajectories that it adapted with."""
    agent, theta, keys = Sampled(TABLE)(FLEET.task(3)), jnp.zeros((9, 4)), StepKeys(*jax.random.split(KEY, 3))
    return algorithm.step(agent, (theta, state), keys), agent.sampler.sample(theta, keys.inner, algorithm.m_in)


@pytest.mark.slow
def test_the_score_baseline_is_from_before_the_step_and_can_be_left_out():
    states = [ReturnAverage(jnp.asarray(x), jnp.ones(())) for x in (0.0, 10.0)]
    (low, inner), (high, _) = (one_step(SGMRL(1.0, 0.3, m_in=4), state) for state in states)
    score = jax.grad(lambda x: jnp.sum(jnp.log(TABLE.probabilities(x))[inner.obs, inner.action]))(jnp.zeros((9, 4)))
    np.testing.assert_allclose(low[0] - high[0], 0.3 * 10 * score, rtol=1e-5, atol=1e-5)
    assert high[1].total - low[1].total == pytest.approx(0.9 * 10), "then this step's return joins"
    without = [one_step(SGMRL(1.0, 0.3, m_in=4, score_baseline=False), state)[0][0] for state in states]
    assert (without[0] == without[1]).all()


def test_a_clipped_step_is_as_long_as_it_may_be():
    (theta, _), _ = one_step(SGMRL(1.0, 0.5, m_in=4, clip=0.01), ReturnAverage(jnp.ones(()), jnp.ones(())))
    assert jnp.linalg.norm(theta) == pytest.approx(0.005, rel=1e-4)


@pytest.mark.slow
def test_with_momentum_1_it_is_first_order_per_fedavg_pg_bit_by_bit():
    def final(algorithm):
        simulation = simulation_of(FLEET, TABLE, [algorithm] * 2, [0, 1])
        return simulation.advance(simulation.start(), 0, 5).server.message

    plain = final(pf.PerFedAvgPG(1.5, 0.3, 4, 5, 1, 6, variant="first-order", clip=0.5))
    assert np.abs(plain).max() > 0.05
    storm = partial(StormPG, 1.5, 0.3, local_steps=4, m_in=5, m_out=6, clip=0.5)
    np.testing.assert_array_equal(final(storm(momentum=1.0)).view(np.int32), plain.view(np.int32))
    assert (final(storm(momentum=0.9)) != plain).any()


def test_a_round_by_hand():
    agent, theta, a = Sampled(TABLE, baseline="none")(FLEET.task(3)), jax.random.normal(KEY, (9, 4)), 0.3
    algorithm, plain = StormPG(1.5, 0.7, a, 2, 5, 6), Plain(agent.sampler)
    upload, _ = jit(lambda x: algorithm.client(x, no_weights(), agent, KEY))(theta)
    again = partial(jit(reweighted_gradient, static_argnums=(1, 2)), agent.policy, agent.forms, agent.discount)

    def carried(at, key, m, last=None):
        played = plain.sample(at, key, m)
        g = agent.gradient_of(at, played)
        return g if last is None else g + (1 - a) * (last[1] - again(at, last[0], played, 2.0)[0])

    inner = outer = None
    for keys in jax.random.split(KEY, (2, 3)):
        inner = theta, carried(theta, keys[0], 5, inner)
        adapted = theta + 1.5 * inner[1]
        outer = adapted, carried(adapted, keys[2], 6, outer)
        theta = theta + 0.7 * outer[1]
    np.testing.assert_allclose(upload, theta, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("m", "how"),
    some_slow([(1, {}), (2, {"baseline": "leave-one-out"}), (1, {"entropy": 0.3})], [(1, {"entropy": 0.3})]),
)
def test_the_reweighted_gradient_is_unbiased_for_the_gradient_at_the_last_parameters(m, how):
    mdp, theta, last, policy, t = small(4, (2, 2, 1))
    rows, how = all_batches(t, m), forms(**{"baseline": "none", **how})
    with jax.enable_x64(True):
        agent = PolicyObjective(Listed(batch(t)), policy, mdp.discount, how)
        of = lambda rows: jax.tree.map(lambda x: x[rows], batch(t))  # noqa: E731
        again = lambda rows: reweighted_gradient(policy, how, mdp.discount, theta, last, of(rows), 1e9)[0]  # noqa: E731
        both = jit(jax.vmap(lambda rows: (again(rows), agent.gradient_of(last, of(rows)))))
        here, there = both(rows)
        mean = np.tensordot(np.prod(law(policy, theta, t)[rows], axis=1), here, 1)
        expected = np.tensordot(np.prod(law(policy, last, t)[rows], axis=1), there, 1)
    np.testing.assert_allclose(mean, expected, **close)
    if not how.entropy:
        np.testing.assert_allclose(mean, exact.gradient(mdp, last), **close)


def test_weights_by_hand_clipped_and_counted():
    """One state, two actions: from evens to nine to one, the weights are 1.8 and 0.2."""
    policy, last, zeros = pf.TableSoftmax(1, 2), jnp.log(jnp.asarray([[0.9, 0.1]])), jnp.zeros((4, 1), int)
    played = Trajectory(zeros, jnp.asarray([[0], [1], [0], [0]]), jnp.asarray([[2.0], [5], [2], [2]]), jnp.ones((4, 1)))
    g, weights = reweighted_gradient(policy, forms(baseline="none"), 0.9, jnp.zeros((1, 2)), last, played, 1.5)
    np.testing.assert_allclose(weights, [1.8, 0.2, 1.8, 1.8], rtol=1e-5)
    by_hand = (3 * 1.5 * 2 * np.asarray([0.1, -0.1]) + 0.2 * 5 * np.asarray([-0.9, 0.9])) / 4
    np.testing.assert_allclose(g[0], by_hand, rtol=1e-5)
    counted = no_weights().with_more(weights, 1.5, jnp.ones(())).with_more(jnp.ones(4), 1.5, jnp.ones(()))
    assert counted.with_more(weights, 1.5, jnp.zeros(())) == counted, "a round's first step has no weights"
    said = StormPG(1.0, 0.3, clip_weight=1.5).diagnostics(counted)
    assert said["weights clipped"] == 3 / 8
    assert said["mean weight"] == pytest.approx((3 * 1.5 + 0.2 + 4) / 8)
    assert said["largest weight"] == pytest.approx(1.8)


def test_no_weight_is_too_large_for_a_number():
    policy, zeros, far = pf.TableSoftmax(1, 2), jnp.zeros((1, 1), int), jnp.asarray([[-400.0, 0.0]])
    one = Trajectory(zeros, zeros, jnp.ones((1, 1)), jnp.ones((1, 1)))
    g, weights = reweighted_gradient(policy, forms(baseline="none"), 0.9, far, -far, one, 2.0)
    assert np.isfinite(g).all()
    assert 1e30 < weights[0] < np.inf


@pytest.mark.slow
def test_diagnostics_are_of_the_last_round():
    algorithm = StormPG(2.0, 1.0, 0.3, 4, 5, 6, clip_weight=1.2)
    simulation = simulation_of(FLEET, TABLE, [algorithm], [0])
    state = simulation.advance(simulation.start(), 0, 6).clients
    np.testing.assert_array_equal(state.drawn, np.full((1, FLEET.agents), 3 * (5 + 6)))
    said = algorithm.diagnostics(state)
    assert all(x.shape == (1, FLEET.agents) for x in said.values())
    assert (said["mean weight"] <= 1.2).all()
    assert (said["largest weight"] > 1.2).any()
    np.testing.assert_array_equal(said["weights clipped"] > 0, said["largest weight"] > 1.2)
    one = StormPG(2.0, 1.0, local_steps=1).client
    _, alone = jit(lambda theta: one(theta, no_weights(), Sampled(TABLE)(FLEET.task(0)), KEY))(TABLE.init())
    assert alone == WeightRecord(0, 0, 0, 0), "a single step carries nothing over"


@pytest.mark.parametrize("baseline", some_slow(["ridge", "critic"], ["critic"]))
def test_where_nothing_moved_the_reweighted_gradient_is_the_plain_one(baseline):
    fleet = pf.point_navigation(agents=1, held_out=0, horizon=5)
    agent = Sampled(actor_critic(fleet, (4,), (4,)), baseline=baseline)(fleet.task(0))
    params = agent.policy.init(KEY)
    played = jit(lambda x: agent.sampler.sample(x, KEY, 6))(params)
    compiled = jit(reweighted_gradient, static_argnums=(1, 2))
    g, weights = compiled(agent.policy, agent.forms, agent.discount, params, params, played, 2.0)
    np.testing.assert_array_equal(weights, 1)
    same = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(same, g, agent.gradient_of(params, played))
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(g)), "the critic's part too"


def test_carrying_over_takes_noise_off_both_gradients_where_steps_are_short():
    task, theta = pf.gridworld(width=3, horizon=6).task(3), jax.random.normal(jax.random.key(1), (9, 4))
    agent = Sampled(TABLE, baseline="none")(task)
    error = lambda d: jnp.sum((d.gradient - jax.grad(partial(exact.J, TABLE, task))(d.at)) ** 2)  # noqa: E731

    @jit
    def errors(algorithm):
        def one(key):
            end = local_steps(partial(algorithm.step, agent), start(theta), agent, key, algorithm.local_steps)
            return jnp.stack([error(end.inner), error(end.outer)])

        return jnp.mean(jax.vmap(one)(jax.random.split(KEY, 200)), axis=0)

    carried, plain = (errors(StormPG(0.5, 0.05, momentum, 8, 5, 5)) for momentum in (0.3, 1.0))
    assert (carried < 0.35 * plain).all(), (carried, plain)


@pytest.mark.parametrize("algorithm", BOTH.values(), ids=BOTH)
def test_the_same_algorithms_run_on_a_plain_python_sampler(algorithm, x64):
    traced = Sampled(TABLE, entropy=0.1)(FLEET.task(3))
    plain = PolicyObjective(Plain(traced.sampler), TABLE, traced.discount, traced.forms)
    theta = np.random.default_rng(0).normal(size=(9, 4))
    state = algorithm.init(theta)[1]
    expected = jit(lambda *carry: algorithm.client(*carry, traced, KEY))(theta, state)
    came = algorithm.client(theta, state, plain, KEY)
    assert np.abs(came[0] - theta).max() > 0.01
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-12), came, expected)


@pytest.mark.parametrize("algorithm", BOTH.values(), ids=BOTH)
def test_what_comes_after_the_end_of_an_episode_does_not_count(algorithm):
    mask = jnp.asarray([[1.0, 1, 0], [1, 0, 0], [1, 1, 1]])
    obs, action = jnp.asarray([[0, 1, 1], [1, 0, 0], [1, 0, 1]]), jnp.asarray([[1, 0, 0], [1, 1, 0], [0, 0, 1]])

    @jit
    def client(obs, action):
        listed = Listed(Trajectory(obs, action, mask * 1.5, mask))
        agent = PolicyObjective(listed, pf.TableSoftmax(2, 2), 0.9, forms(baseline="none", entropy=0.1))
        theta = jnp.asarray([[0.1, 0.5], [-0.3, 0.2]])
        return algorithm.client(theta, algorithm.init(theta)[1], agent, KEY)

    other = lambda x: jnp.where(mask > 0, x, 1 - x)  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, client(obs, action), client(other(obs), other(action)))


@pytest.mark.parametrize("name", BOTH)
def test_agents_without_trajectories_are_refused(name):
    with pytest.raises(pf.UserError, match=f"{name} needs agents that show their trajectories.*ExactObjective"):
        pf.simulate(FLEET, TABLE, BOTH[name], rounds=1, seeds=1, noiseless=True)


@pytest.mark.parametrize("change", [{"momentum": 0.0}, {"momentum": 1.5}, {"clip_weight": 0.5}, {"clip": -1.0}])
def test_settings_that_make_no_sense_are_refused(change):
    with pytest.raises(pf.UserError, match=next(iter(change))):
        StormPG(1.0, 0.3, **change)
    with pytest.raises(pf.UserError, match="clip"):
        SGMRL(1.0, 0.3, clip=0.0)
