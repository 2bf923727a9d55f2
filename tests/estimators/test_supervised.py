"""Supervised objectives: the algorithms that train policies, applied to examples and a likelihood."""

import tomllib
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from simulations import simulation_of
from tiers import some_slow

import perfedrl as pf
from perfedrl.algorithms import ALGORITHMS
from perfedrl.compilation import jit
from perfedrl.envs import Classification, Examples, classification, fleet
from perfedrl.estimators import PAPER, Sampled, StepKeys, first_order_gradient, forms, meta_gradient
from perfedrl.estimators.curvature import CentralDifferences
from perfedrl.estimators.supervised import DataObjective, mean_log_likelihood
from perfedrl.experiments.config import make_config
from perfedrl.policies import MLPSoftmax
from perfedrl.simulation.evaluation import auto, monte_carlo, on_examples
from perfedrl.simulation.measurements import deploy
from perfedrl.simulation.simulator import Simulation

CONFIG = Path(__file__).parents[2] / "configs" / "classification.toml"
LOGISTIC = MLPSoftmax((3, 2))
"""Logistic regression: concave, and small enough to list every batch."""
SMALL = {"agents": 3, "held_out": 2, "classes": 4, "classes_per_agent": 2, "features": 3, "informative": 2}
SMALL |= {"examples": 6, "test_examples": 8}
KEY = jax.random.key(0)
KEYS = StepKeys(*jax.random.split(KEY, 3))
ALPHA = 0.7


@lru_cache
def small() -> pf.Fleet:
    return classification(**SMALL)


def examples(n: int = 4) -> Examples:
    rng = np.random.default_rng(1)
    return Examples(rng.normal(size=(n, 3)), rng.integers(2, size=n))


def near(one, other, **tolerance):
    np.testing.assert_allclose(ravel_pytree(one)[0], ravel_pytree(other)[0], **{"rtol": 1e-10, "atol": 0, **tolerance})


def whole(curvature="causal", policy=LOGISTIC, data=None) -> DataObjective:
    return DataObjective(examples() if data is None else data, policy, forms(curvature), whole=True)


@pytest.mark.parametrize("policy", [LOGISTIC, MLPSoftmax((3, 4, 2))])
@pytest.mark.parametrize("steps", some_slow([1, 2], [2]))
def test_the_meta_gradient_of_all_examples_is_that_of_the_objective_after_adaptation(x64, policy, steps):
    data, theta = examples(), policy.init(jax.random.key(3))

    def f(w):
        return mean_log_likelihood(policy, w, data)

    def F(w):
        for _ in range(steps):
            w = jax.tree.map(lambda x, g: x + ALPHA * g, w, jax.grad(f)(w))
        return f(w)

    estimate = jit(lambda w: meta_gradient(whole(policy=policy), w, ALPHA, KEYS, 1, 1, 1, steps))(theta)
    near(estimate, jax.jit(jax.grad(F))(theta))
    first = jit(lambda w: first_order_gradient(whole(policy=policy), w, ALPHA, KEYS, 1, 1, steps))(theta)
    assert np.abs(ravel_pytree(first)[0] - ravel_pytree(estimate)[0]).max() > 1e-3, "the curvature term matters here"


def test_over_all_batches_gradient_curvature_and_value_are_those_of_all_examples(x64, monkeypatch):
    """Every draw of two examples, each once: the mean is exact, so the estimates have no bias."""
    theta, v = LOGISTIC.init(KEY), LOGISTIC.init(jax.random.key(1))
    agent, all_of_them = DataObjective(examples(), LOGISTIC, forms()), whole()
    batches = jnp.stack(jnp.meshgrid(jnp.arange(4), jnp.arange(4)), axis=-1).reshape(-1, 2)

    def means(estimate):
        def one(drawn):
            monkeypatch.setattr(jax.random, "randint", lambda key, shape, low, high: drawn)
            return estimate(agent)

        mean = jax.tree.map(lambda x: x.mean(axis=0), jax.jit(jax.vmap(one))(batches))
        monkeypatch.undo()
        return mean

    for estimate in (
        lambda agent: agent.gradient(theta, KEY, 2),
        lambda agent: agent.curvature(theta, v, KEY, 2),
        lambda agent: agent.value(theta, KEY, 2),
    ):
        near(means(estimate), estimate(all_of_them))


def test_every_example_is_drawn_equally_often():
    """Chi-squared over 60,000 draws of six examples: a fair draw is refused once in 10,000 tests."""
    agent = Sampled(MLPSoftmax((3, 4)))(small().task(0))
    drawn = np.asarray(agent.batch(KEY, 60_000).inputs)[:, 0]
    counts = np.asarray([(drawn == x).sum() for x in agent.examples.inputs[:, 0]])
    assert counts.sum() == 60_000
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 25.7


def test_the_hessian_free_variant_converges_to_the_exact_one_with_the_square_of_its_step(x64):
    theta, v = MLPSoftmax((3, 4, 2)).init(jax.random.key(3)), MLPSoftmax((3, 4, 2)).init(jax.random.key(4))

    def product(form):
        return ravel_pytree(whole(form, MLPSoftmax((3, 4, 2))).curvature(theta, v, KEY, 2))[0]

    errors = [np.linalg.norm(product(CentralDifferences(step)) - product("causal")) for step in (0.1, 0.05, 0.025)]
    assert errors[0] > 1e-6
    np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 4, rtol=0.05)


def test_all_score_function_forms_agree_on_examples():
    v = LOGISTIC.init(jax.random.key(1))
    agents = [DataObjective(examples(), LOGISTIC, x) for x in (forms(), forms(**PAPER), forms("dice", "ridge"))]
    first, *others = (agent.curvature(v, v, KEY, 3) for agent in agents)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


def test_without_adaptation_it_is_fedavg():
    policy = pf.policies.mlp(small(), [3])
    theta = policy.init(KEY)
    meta = pf.PerFedAvgPG(0.0, 0.5, local_steps=2, m_in=3, m_h=3, m_out=3)
    plain = pf.FedAvgPG(0.0, 0.5, local_steps=2, m=3)
    agent = Sampled(policy)(small().task(0))
    uploads = [jit(lambda w, a=a: a.client(w, a.init(w)[1], agent, KEY)[0])(theta) for a in (meta, plain)]
    near(*uploads, rtol=1e-5, atol=1e-7)
    assert np.abs(ravel_pytree(uploads[0])[0] - ravel_pytree(theta)[0]).max() > 0.01


@lru_cache
def simulation(*seeds: int) -> Simulation:
    policy = pf.policies.mlp(small(), [3])
    algorithm = pf.PerFedAvgPG(1.0, 0.3, local_steps=2, m_in=3, m_h=4, m_out=3)
    evaluation = on_examples(small(), Sampled(policy), 5, few_shot=[0, 5], repeats=2)
    return simulation_of(small(), policy, [algorithm] * len(seeds), seeds, evaluation=evaluation)


@lru_cache
def trained(*seeds: int):
    return simulation(*seeds).advance(simulation(*seeds).start(), 0, 4)


@pytest.mark.slow
def test_a_seed_gives_the_same_bits_alone_with_others_and_in_pieces():
    both, there = trained(0, 1), simulation(0, 1)
    pieces = there.advance(there.advance(there.start(), 0, 1), 1, 3)
    for state in (trained(1), pieces):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[-1], y[-1]), state, both)


def test_a_run_is_what_its_agents_do_one_by_one():
    there = simulation(0, 1)
    algorithm, agent = there.algorithms[0], Sampled(there.experiment.policy)
    message = jax.tree.map(lambda x: x[0], there.start().server.message)
    work = jit(lambda message, task, key: algorithm.client(message, (), agent(task), key)[0])
    for k in range(4):
        keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(0), i), k) for i in range(small().agents)]
        uploads = [work(message, small().task(i), key) for i, key in enumerate(keys)]
        message = jax.tree.map(lambda *xs: np.mean(xs, axis=0), *uploads)
    near(message, jax.tree.map(lambda x: x[0], trained(0, 1).server.message), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_agents_are_measured_on_examples_that_they_never_adapt_with():
    there, state = simulation(0, 1), trained(0, 1)
    task, theta = small().task(0, held_out=True), jax.tree.map(lambda x: x[0], state.server.message)
    measured, deployed = there.measure(state, 4), there.deploy(state, 4)
    (one, two), x = theta, task.test.inputs
    outputs = np.tanh(x @ one["weight"] + one["bias"]) @ two["weight"] + two["bias"]
    right = outputs[np.arange(8), task.test.labels] - np.log(np.exp(outputs).sum(axis=-1))
    accuracy = np.mean(outputs.argmax(axis=-1) == task.test.labels)
    np.testing.assert_allclose(measured.held_out_before[0, 0, 0], right.mean(), rtol=1e-4)
    np.testing.assert_allclose(measured.outcomes["held_out_before.accuracy"][0, 0, 0], accuracy, rtol=1e-6)
    np.testing.assert_allclose(deployed.outcomes["accuracy"][0, 0, 0], accuracy, rtol=1e-6)

    poisoned = Classification(task.examples._replace(labels=task.examples.labels * 0), task.test, 4)
    measure = jit(
        lambda task: deploy(there.experiment.evaluation, there.algorithms[0], theta, (), task, KEY)[0]["return"]
    )
    before, after = np.asarray(measure(task) == measure(poisoned))
    assert before
    assert not after, "what an agent adapts with changes what it has learned, not what it is measured on"


def test_names_of_classes_differ_between_agents_as_the_fleet_says():
    """Without noise an input is its prototype: at 0 it has one name everywhere, at 1 the agents' names differ."""

    def names(share):
        pure = classification(
            **SMALL | {"classes_per_agent": 4, "examples": 40}, heterogeneity=share, noise=0, distraction=0
        )
        tasks = [pure.task(i) for i in range(pure.agents)]
        return [sorted({(x.round(3).tobytes(), int(y)) for x, y in zip(*t.examples, strict=True)}) for t in tasks]

    alike, own = names(0.0), names(1.0)
    assert {len(x) for x in (*alike, *own)} == {4}, "an agent has one name for a class"
    assert alike[0] == alike[1] == alike[2]
    assert own[0] != own[1] != own[2]
    half = names(0.5)
    assert all(len(set(x) & set(alike[0])) >= 2 for x in half), "half of the names are the common ones"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"classes": 1}, "classes must be from 2"),
        ({"classes_per_agent": 11}, "classes_per_agent must be from 1 to 10"),
        ({"informative": 17}, "informative must be from 1 to 16"),
        ({"heterogeneity": 1.5}, "expected heterogeneity in"),
        ({"examples": 0}, "examples must be from 1"),
        ({"held_out": -1}, "held_out and seed must be >= 0"),
    ],
)
def test_invalid_classification_fleets_are_refused(settings, said):
    with pytest.raises(pf.UserError, match=said):
        classification(**settings)


def test_a_fleet_of_ones_own_examples():
    def own(labels):
        return Classification(Examples(np.zeros((2, 3), np.float32), np.asarray(labels)), examples(2), 2)

    assert fleet([own([0, 1]), own([1, 1])]).agents == 2
    with pytest.raises(pf.UserError, match="labels must be from 0 to 1"):
        own([0, 2])
    with pytest.raises(pf.UserError, match="as many labels as inputs"):
        own([0])


@pytest.mark.parametrize("name", ["sg-mrl", "per-fedavg-storm"])
def test_algorithms_that_need_trajectories_are_refused_before_compiling(name):
    policy = pf.policies.mlp(small())
    with pytest.raises(pf.UserError, match=f"{name} needs agents that show their trajectories"):
        ALGORITHMS[name](alpha=0.1, beta=0.1).check_supports(small(), policy)
    with pytest.raises(pf.UserError, match=f"{name} needs agents that show their trajectories"):
        simulation_of(small(), policy, [ALGORITHMS[name](alpha=0.1, beta=0.1)], [0])


def test_options_that_examples_do_not_support_are_refused():
    policy, critic = pf.policies.mlp(small()), pf.policies.actor_critic(small())
    with pytest.raises(pf.UserError, match="have examples to learn from and no episodes"):
        monte_carlo(small(), Sampled(policy))
    with pytest.raises(pf.UserError, match="needs agents with examples"):
        on_examples(pf.gridworld(), Sampled(policy))
    with pytest.raises(pf.UserError, match="do not explore"):
        Sampled(policy, entropy=0.1)(small().task(0))
    with pytest.raises(pf.UserError, match="to fit a critic"):
        Sampled(critic)(small().task(0))
    with pytest.raises(pf.UserError, match="exact evaluation needs"):
        pf.simulate(small(), policy, pf.FedAvgPG(0.1, 0.1), rounds=1, noiseless=True)
    assert auto(small(), Sampled(policy)).trajectories == 100


def short_config(**algorithm):
    """The committed config with fewer agents, seeds and rounds."""
    table = tomllib.loads(CONFIG.read_text())
    table |= {"seeds": 1, "rounds": 100, "evaluate_every": 100, "name": "short"}
    table["fleet"] |= {"agents": 20, "held_out": 10}
    table["algorithm"] = algorithm or table["algorithm"]
    return make_config(table)


def accuracies(run):
    return [run.history.outcomes[f"held_out_{when}.accuracy"][:, -1].mean() for when in ("before", "after")]


@pytest.mark.slow
def test_one_step_makes_a_shared_classifier_an_agents_own_and_more_so_if_it_was_trained_for_that(tmp_path):
    """A small version of the committed config. Class names differ between agents: one shared classifier must guess."""
    meta = pf.train(short_config(), tmp_path / "runs", compile_cache=False)
    plain = short_config(name="fedavg-pg", alpha=3.0, beta=0.3, local_steps=5, m=150)
    before, after = accuracies(meta)
    assert before < 0.2
    assert after > 0.7
    assert after > accuracies(pf.train(plain, tmp_path / "runs", compile_cache=False))[1] + 0.05
    assert (np.diff(meta.deployed.outcomes["accuracy"].mean(axis=(0, 2))) > 0).all(), "more examples, better classifier"
    own = pf.personalize(meta, agent=25, trajectories=50)
    assert own.after["accuracy"].mean > own.before["accuracy"].mean + 0.3
    assert len(pf.evaluate(meta)) == 30
    steps = pf.assess(meta, steps=2, trajectories=50).rows
    assert steps[2].mean["accuracy"].mean > steps[0].mean["accuracy"].mean + 0.3
    assert (steps[2].trajectories, own.cost) == (100, 50)


def test_the_command_line_shows_agents_with_examples_or_says_why_not(run):
    code, out, err = run("inspect", CONFIG)
    assert (code, err) == (0, "")
    assert "an episode of these agents cannot be drawn" in out
    code, _, err = run("estimators", CONFIG)
    assert code == 2
    assert "no episodes, which this needs" in err
    code, _, err = run("theory", CONFIG)
    assert code in (0, 2)
    assert "Traceback" not in err
