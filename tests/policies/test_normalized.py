"""Normalization: statistics that are parameters, averaged with the others or kept by their agents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_process_fleet import InProcessAgents, new_run
from interruption import StopAt
from real_fleet import MDPS
from simulations import simulation_of

import perfedrl as pf
from perfedrl.algorithms import average
from perfedrl.algorithms.storm import reweighted_gradient
from perfedrl.errors import UserError
from perfedrl.estimators import PolicyObjective, forms
from perfedrl.estimators.advantages import credit
from perfedrl.estimators.curvature import causal
from perfedrl.estimators.objective import _hvp, gradient_of_batch
from perfedrl.experiments.config import make_config
from perfedrl.experiments.training import Interrupted, train
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.request_handler import Agent
from perfedrl.federation.frames import decode
from perfedrl.federation.server.coordinator import Coordinator
from perfedrl.policies import ActorCritic, GaussianMLP, MLPSoftmax, Normalized
from perfedrl.rollout import RolloutSampler
from perfedrl.types import Trajectory

INNER = MLPSoftmax((2, 3, 2))
POLICY = Normalized(INNER, 2, rewards=True, rate=0.5)
KEY, DISCOUNT = jax.random.key(3), 0.9
FORMS = forms()


def a_batch(seed, m=4, T=5):
    """Episodes of a made-up world, some of which end early."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(T) < rng.integers(1, T + 1, (m, 1))).astype(np.float32)
    obs = (3 * rng.normal(size=(m, T, 2)) + [5, -1]).astype(np.float32)
    return Trajectory(obs, rng.integers(0, 2, (m, T)), rng.normal(size=(m, T)).astype(np.float32) * mask, mask)


BATCH = a_batch(0)
PARAMS = {
    **POLICY.init(KEY),
    "normalizer": {
        "observations": {"mean": jnp.asarray([4.0, -2.0]), "square": jnp.asarray([25.0, 8.0])},
        "rewards": {"square": jnp.asarray([2.25])},
    },
}
SEEN = np.clip((BATCH.obs - [4, -2]) / [3, 2], -10, 10).astype(np.float32)
BY_HAND = BATCH._replace(obs=SEEN, reward=BATCH.reward / 1.5)
gradient = jax.jit(gradient_of_batch, static_argnums=(1, 2))


def test_a_normalized_policy_equals_the_inner_one_on_normalized_observations():
    obs, action, u = BATCH.obs[0, 0], jnp.asarray(BATCH.action[0, 0]), jnp.asarray([0.4])
    args = PARAMS["policy"], jnp.asarray(SEEN[0, 0])
    assert POLICY.sample(PARAMS, obs, u) == INNER.sample(*args, u)
    np.testing.assert_allclose(POLICY.log_prob(PARAMS, obs, action), INNER.log_prob(*args, action), rtol=1e-6)
    np.testing.assert_allclose(POLICY.entropy(PARAMS, obs), INNER.entropy(*args), rtol=1e-6)
    assert (POLICY.actions, POLICY.noise) == (2, 1)
    assert POLICY.action_size is POLICY.values is POLICY.value_fit is POLICY.probabilities is None
    np.testing.assert_array_equal(POLICY.seen(PARAMS, jnp.asarray([1e6, -1e6])), [10, -10])


def test_at_the_start_nothing_is_normalized():
    start = POLICY.init(KEY)
    np.testing.assert_array_equal(POLICY.seen(start, jnp.asarray([0.3, -7.0])), np.float32([0.3, -7.0]))
    np.testing.assert_array_equal(POLICY.scaled(start, BATCH.reward), BATCH.reward)


def test_a_constant_component_is_normalized_to_zero():
    still = {"observations": {"mean": jnp.full(2, 7.0), "square": jnp.full(2, 49.0)}}
    np.testing.assert_array_equal(POLICY.seen({"normalizer": still}, jnp.full(2, 7.0)), [0, 0])


def test_the_gradient_by_hand_and_the_step_of_the_moments_towards_the_batch():
    g = gradient(POLICY, FORMS, DISCOUNT, PARAMS, BATCH)
    by_hand = gradient(INNER, FORMS, DISCOUNT, PARAMS["policy"], BY_HAND)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), g["policy"], by_hand)
    lasted = BATCH.mask.sum(axis=1)
    over = lambda x: np.mean([x[i, : int(n)].mean(axis=0) for i, n in enumerate(lasted)], axis=0)  # noqa: E731
    returns = np.asarray(credit(INNER, FORMS.baseline, DISCOUNT, PARAMS["policy"], BATCH).returns)
    found, now = g["normalizer"], PARAMS["normalizer"]
    for name, target in (("mean", over(BATCH.obs)), ("square", over(BATCH.obs**2))):
        expected = 0.5 * (target - now["observations"][name])
        np.testing.assert_allclose(found["observations"][name], expected, rtol=1e-5)
    expected = 0.5 * (over(returns**2) - now["rewards"]["square"])
    np.testing.assert_allclose(found["rewards"]["square"], expected, rtol=1e-5)


def test_the_curvature_by_hand_which_leaves_the_moments_out():
    v = jax.tree.map(jnp.ones_like, PARAMS)
    product = lambda policy, params, batch, v: _hvp(  # noqa: E731
        policy, causal(), FORMS, DISCOUNT, params, batch, v
    )
    found = jax.jit(lambda: product(POLICY, PARAMS, BATCH, v))()
    by_hand = jax.jit(lambda: product(INNER, PARAMS["policy"], BY_HAND, v["policy"]))()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), found["policy"], by_hand)
    assert not any(np.any(x) for x in jax.tree.leaves(found["normalizer"]))


def test_rewards_in_another_unit_give_the_same_gradient_under_their_moments():
    moments = PARAMS["normalizer"]
    scaled = {**PARAMS, "normalizer": {**moments, "rewards": {"square": 16 * moments["rewards"]["square"]}}}
    one = gradient(POLICY, FORMS, DISCOUNT, PARAMS, BATCH)
    other = gradient(POLICY, FORMS, DISCOUNT, scaled, BATCH._replace(reward=4 * BATCH.reward))
    jax.tree.map(np.testing.assert_array_equal, one["policy"], other["policy"])
    np.testing.assert_array_equal(
        16 * one["normalizer"]["rewards"]["square"], other["normalizer"]["rewards"]["square"], "and moments keep it"
    )


def test_agents_moments_average_to_those_of_all_their_episodes():
    batches = [a_batch(seed) for seed in range(3)]
    found = [POLICY.moments(batch, batch.reward) for batch in batches]
    mean = average(jax.tree.map(lambda *xs: jnp.stack(xs), *found), jnp.ones(3))
    pooled = Trajectory(*(np.concatenate(xs) for xs in zip(*batches, strict=True)))
    together = POLICY.moments(pooled, pooled.reward)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), mean, together)


def test_reweighted_moments_equal_the_batchs_where_parameters_did_not_change():
    again, _ = jax.jit(lambda p: reweighted_gradient(POLICY, FORMS, DISCOUNT, p, p, BATCH, 5.0))(PARAMS)
    plain = gradient(POLICY, FORMS, DISCOUNT, PARAMS, BATCH)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), again, plain)


def test_a_value_network_gets_normalized_observations():
    inner = ActorCritic(GaussianMLP((2, 1)), (3, 1))
    both = Normalized(inner, 2, rate=1.0)
    params = {**PARAMS, "policy": inner.init(KEY)}
    expected = inner.values(params["policy"], BY_HAND)
    np.testing.assert_allclose(both.values(params, BATCH), expected, rtol=1e-5, atol=1e-6)
    assert both.action_size == 1
    assert both.value_fit is not None


# Configs and runs


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)


ARC = {"env": "arc", "goals": 3, "held_out": 0, "horizon": 3}
BASE = {
    "name": "scaled",
    "seeds": [4],
    "rounds": 2,
    "evaluate_every": 1,
    "fleet": ARC,
    "policy": {"name": "mlp", "hidden": [3]},
    "algorithm": {"name": "fedavg-pg", "alpha": 0.5, "beta": 0.3, "local_steps": 2, "m": 3},
    "evaluation": {"name": "monte-carlo", "trajectories": 3, "episodes": 4},
}


def asking(observations="none", rewards="none", algorithm=(), **more):
    table = {"observations": observations, "rewards": rewards, **more.pop("table", {})}
    return make_config({**BASE, **more, "algorithm": {**BASE["algorithm"], **dict(algorithm)}, "normalization": table})


LOCAL, FEDERATED = asking("local", "federated"), asking("federated", "federated")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {"local": train(LOCAL, root), "federated": train(FEDERATED, root)}


def test_a_normalization_table_without_effect_equals_no_table():
    plain = make_config(BASE)
    assert asking().digest == plain.digest
    assert asking().experiment.policy == plain.experiment.policy
    digests = [plain.digest, LOCAL.digest, FEDERATED.digest, asking("federated").digest]
    assert len(set(digests)) == 4
    assert pf.make_config(LOCAL.model_dump(exclude_none=True)) == LOCAL


def test_the_default_rate_follows_from_the_step_sizes():
    rate = lambda **sizes: asking("federated", algorithm=sizes).experiment.policy.rate  # noqa: E731
    assert rate(beta=5e-5, alpha=2e-5) == pytest.approx(2000)
    assert rate(beta=0.1, alpha=2.0) == pytest.approx(0.25)
    assert rate(beta=0.1, alpha=0.0) == pytest.approx(1.0)
    one, other, third = (asking("federated", algorithm={"alpha": alpha}) for alpha in (0.1, 0.2, 5.0))
    assert one.trains_with == other.trains_with != third.trains_with, "programs are compiled for a rate"


REFUSED = {
    "beta": (
        {"table": {"rate": 4.0}, "algorithm": {"alpha": 0.1}},
        "beta times the normalization's rate must be at most",
    ),
    "alpha": ({"table": {"rate": 2.0}}, "alpha times the normalization's rate must be less than"),
    "rate": ({"table": {"rate": 0.0}}, "rate"),
    "where": ({"rewards": "here"}, "rewards"),
    "table": ({"fleet": MDPS, "policy": {"name": "table"}}, "must be vectors of numbers"),
    "curvature": ({"curvature": "central-common"}, "central differences"),
    "optimizer": (
        {"algorithm": {"name": "fedppo"}},
        'set optimizer = "sgd"',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_normalizations_are_rejected_in_one_sentence(case):
    more, why = REFUSED[case]
    with pytest.raises(UserError, match=why):
        asking("federated", **more)


def test_algorithms_that_send_nothing_keep_local_statistics():
    alone = {**BASE, "algorithm": {"name": "local-pg", "beta": 0.1}}
    with pytest.raises(UserError, match="sends nothing"):
        make_config({**alone, "normalization": {"rewards": "federated"}})
    kept = make_config({**alone, "normalization": {"rewards": "local"}}).experiment
    assert (type(kept.algorithm), type(kept.policy)) == (pf.LocalPG, Normalized)


def test_rewards_of_tabular_agents_can_be_normalized():
    parts = asking(rewards="federated", fleet=MDPS, policy={"name": "table"}, evaluation={"name": "auto"}).experiment
    assert parts.policy.states == parts.fleet.train.states
    assert isinstance(parts.evaluation, pf.MonteCarlo), "an exact step would be one in the rewards' own unit"


def test_federated_statistics_travel_and_local_ones_stay(runs):
    moved, kept = (jax.tree.map(lambda x: x[0], runs[which].params["normalizer"]) for which in ("federated", "local"))
    assert np.all(moved["observations"]["square"] != 1)
    np.testing.assert_array_equal(kept["observations"]["square"], [1, 1])
    np.testing.assert_array_equal(kept["observations"]["mean"], [0, 0])
    assert kept["rewards"]["square"] != 1
    per_round = {name: run.history.bytes[1] for name, run in runs.items()}
    assert per_round["federated"] - per_round["local"] == 4 * 4, "four moments are received, but not sent"


@pytest.mark.slow
def test_an_interrupted_run_with_local_statistics_ends_with_the_same_bits(runs, tmp_path):
    with pytest.raises(Interrupted):
        train(LOCAL, tmp_path, observers=[StopAt(1)])
    again = train(LOCAL, tmp_path)
    same(again.message, runs["local"].message)
    np.testing.assert_array_equal(again.history.after, runs["local"].history.after)


class Played:
    """A sampler that JAX cannot trace, as around a robot."""

    traceable = False

    def __init__(self, task, policy):
        self.sample = jax.jit(lambda *args: RolloutSampler(task, policy).sample(*args), static_argnums=2)


@pytest.mark.slow
def test_the_simulator_equals_a_python_loop_over_agents(runs):
    parts = LOCAL.experiment
    simulation = simulation_of(parts.fleet, parts.policy, [parts.algorithm], LOCAL.seeds, parts.agent)
    start = jax.tree.map(lambda x: x[0], simulation.start())
    own = jax.tree.map(lambda x: x[0], start.clients)
    made = [(Played(parts.fleet.task(i), parts.policy), parts.policy, parts.fleet.train.discount) for i in range(3)]
    agents = [PolicyObjective(*parts_of, parts.agent.forms) for parts_of in made]
    server, owns = start.server, [own] * 3
    for k in range(2):
        keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(4), i), k) for i in range(3)]
        done = [parts.algorithm.client(server.message, owns[i], agents[i], keys[i]) for i in range(3)]
        uploads, owns = [upload for upload, _ in done], [own for _, own in done]
        server = parts.algorithm.server(server, jax.tree.map(lambda *xs: jnp.stack(xs), *uploads), jnp.ones(3))
    last = jax.tree.map(lambda x: x[0], runs["local"].message)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), server.message, last)
    seen = [
        parts.algorithm.with_personal_part(server.message, own)["normalizer"]["observations"]["mean"] for own in owns
    ]
    assert len({(0.0, 0.0), *(tuple(np.asarray(x)) for x in seen)}) == 4, "each has its own"


def test_a_new_agent_personalizes_the_policy_and_the_moments(runs):
    own = pf.personalize(runs["federated"].folder, agent=1, trajectories=3, episodes=2)
    assert set(own.params) == {"policy", "normalizer"}
    before = jax.tree.map(lambda x: x[0], runs["federated"].params["normalizer"])
    assert np.all(own.params["normalizer"]["observations"]["square"] != before["observations"]["square"])


@pytest.mark.slow
def test_a_networked_run_keeps_local_statistics_and_has_the_simulators_bits(runs, tmp_path, monkeypatch):
    made = make_agent_config({"fleet": ARC})
    agents = {f"agent-{i}": Agent(made, i, tmp_path / f"agent-{i}") for i in range(3)}
    folder, sent = new_run(tmp_path, LOCAL), []

    def listen(answers):
        sent.extend(decode(frame).tensors for frame in answers.frames.values())

    Coordinator(folder.path, folder.next_generation()).run(InProcessAgents(agents, {("update", 1): listen}))
    run = pf.load_run(tmp_path / "runs" / LOCAL.folder)
    same(run.message, runs["local"].message)
    np.testing.assert_allclose(run.history.after, runs["local"].history.after, rtol=1e-6)
    for tensors in sent:
        kept = [x.shape for name, x in tensors.items() if "observations" in name]
        assert kept == [(0,), (0,)]
