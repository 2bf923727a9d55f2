"""Context adaptation: which parameters move, along which gradient, and what one step identifies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulations import simulation_of
from tiers import some_slow
from untraced import AGENTS, ARC, Played

import perfedrl as pf
from perfedrl.algorithms import ContextAdaptation, FedPPO, ProMP
from perfedrl.algorithms.annealing import Annealing
from perfedrl.algorithms.clipped_steps import improve
from perfedrl.algorithms.learned_adaptation import Learned
from perfedrl.compilation import jit
from perfedrl.envs import classification
from perfedrl.envs.fleet import fleet
from perfedrl.estimators import Sampled
from perfedrl.estimators.batch import make_batch
from perfedrl.experiments.config import make_config
from perfedrl.experiments.files import named_leaves
from perfedrl.policies import Contextual, GaussianMLP, Normalized, context_mlp
from perfedrl.simulation.evaluation import MonteCarlo
from perfedrl.simulation.measurements import step_by_step
from perfedrl.types import Trajectory

LOSSES = ["reward-model", "dynamics-model", "return"]
SMALL = {"local_steps": 2, "m_in": 3, "m_out": 3, "epochs": 2}
POLICY = context_mlp(ARC, (4,), context_size=2, model_hidden=(3,))
AGENT = Sampled(POLICY, advantage="gae")
TWO = pf.arc(2, 0, horizon=5)


def parameters(policy, dtype=np.float32):
    """Parameters away from the start."""
    rng, start = np.random.default_rng(0), policy.init(jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(x + rng.uniform(-0.5, 0.5, x.shape), dtype), start)


def moved(before, after):
    """Names of the parameters of which a bit changed."""
    one, two = named_leaves(before), named_leaves(after)
    return {name for name, x in one.items() if x.tobytes() != two[name].tobytes()}


def numbers(tree):
    return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize("inner_loss", LOSSES)
def test_the_context_moves_along_the_gradient_of_its_loss(inner_loss, x64):
    """Against central differences, in double precision."""
    theta, alpha = parameters(POLICY, float), 0.7
    how = ContextAdaptation(alpha, 0.1, inner_loss=inner_loss).how
    inner = AGENT(ARC.task(1)).batch(theta, jax.random.key(1), 5)
    fit = jit(lambda z: how.fit({**theta, "context": z}, inner))
    z, eps = theta["context"], 1e-5
    slopes = [(fit(z + eps * e) - fit(z - eps * e)) / (2 * eps) for e in np.eye(2)]
    after = how.adapted(Learned(theta, ()), alpha, inner)
    np.testing.assert_allclose(after["context"] - z, alpha * np.asarray(slopes), rtol=1e-6, atol=1e-10)
    assert np.abs(slopes).min() > 1e-4
    assert moved(theta, after) == {"context"}


@pytest.mark.parametrize("variant", ["differentiated", "first-order"])
@pytest.mark.parametrize("inner_loss", ["reward-model", "return"])
def test_a_step_follows_the_gradient_of_the_objective_after_the_adaptation(inner_loss, variant, x64):
    """Central differences along random directions; a first-order step takes the context's change as constant."""
    theta, alpha, weight = parameters(POLICY, float), 0.7, 0.3
    how = ContextAdaptation(
        alpha,
        1.0,
        epochs=1,
        inner_loss=inner_loss,
        model_weight=weight,
        adaptation_steps=2,
        divergence_weight=0.0,
        variant=variant,
        optimizer="sgd",
    ).how
    learned, agent = Learned(theta, ()), AGENT(ARC.task(1))
    inner = agent.batch(theta, jax.random.key(1), 5)
    after = how.adapted(learned, alpha, inner)
    outer = agent.batch(after, jax.random.key(2), 5)
    found, _ = jit(improve, static_argnums=0)(how, learned, how.optimizer.init(learned), alpha, 1.0, inner, outer)
    shift = after["context"] - theta["context"]

    @jit
    def objective(theta):
        if variant == "first-order":
            own = {**theta, "context": theta["context"] + shift}
        else:
            own = how.adapted(Learned(theta, ()), alpha, inner)
        total = outer.surrogate(own, how.clip_ratio)
        modelled = weight * POLICY.model_fit(own, inner.trajectories, "reward")
        return total + modelled if inner_loss == "reward-model" else total

    rng, eps, step = np.random.default_rng(3), 1e-5, jax.tree.map(jnp.subtract, found.theta, theta)
    for _ in range(4):
        v = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), theta)
        ends = [objective(jax.tree.map(lambda x, d, s=s: x + s * eps * d, theta, v)) for s in (1, -1)]
        slope = (ends[0] - ends[1]) / (2 * eps)
        assert float(numbers(step) @ numbers(v)) == pytest.approx(float(slope), rel=1e-5, abs=1e-8)
    assert np.abs(np.asarray(step["model"][0]["weight"])).max() > (1e-4 if inner_loss == "reward-model" else -1)


def bandit(rewards, mask):
    """A policy and a batch in which observations say nothing; the model's prediction of a reward is the context."""
    policy = Contextual(GaussianMLP((2, 1)), 1, 1, ())
    params = policy.init(jax.random.key(0))
    weight = jnp.zeros((3, 2)).at[2, 0].set(1.0)
    params = {**params, "model": ({"weight": weight, "bias": jnp.zeros(2)},)}
    nothing = jnp.zeros((*rewards.shape, 1))
    trajectories = Trajectory(nothing, nothing, rewards * mask, mask)
    forms = Sampled(policy).forms
    return params, make_batch(policy, forms.advantage, forms.baseline, 0.0, 0.9, params, trajectories)


def test_one_step_identifies_the_mean_reward_of_an_agent():
    """The error is (z - r)^2 per decision: with alpha = 1/2 a step goes from 0 to the mean over decisions.

    The second episode ends after one decision. Steps of 1/8 go a quarter of the way each: 1 - (3/4)^3 in three.
    """
    rewards, mask = jnp.asarray([[1.0, 2.0, 6.0], [3.0, 9.0, 9.0]]), jnp.asarray([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    params, inner = bandit(rewards, mask)
    for alpha, steps, expected in ((0.5, 1, 3.0), (0.125, 3, 3.0 * (1 - 0.75**3))):
        how = ContextAdaptation(alpha, 0.1, adaptation_steps=steps).how
        after = how.adapted(Learned(params, ()), alpha, inner)
        np.testing.assert_allclose(after["context"], [expected], rtol=1e-6)


@pytest.mark.parametrize("inner_loss", LOSSES)
@pytest.mark.parametrize("normalized", [False, True], ids=["plain", "normalized"])
def test_personalization_changes_the_context_and_no_bit_of_anything_else(inner_loss, normalized):
    policy = Normalized(POLICY, size=2, rewards=True) if normalized else POLICY
    algorithm, theta = ContextAdaptation(1.0, 0.1, inner_loss=inner_loss), parameters(policy)
    server, state = algorithm.init(theta)
    agent = Sampled(policy, advantage="gae")(ARC.task(0))
    own = algorithm.personalize(server.message, state, agent, jax.random.key(0), 5)
    assert moved(theta, own) == {"policy.context" if normalized else "context"}
    assert moved(theta, algorithm.personalize(server.message, state, agent, jax.random.key(0), 0)) == set()


class Watched:
    """An evaluation whose outcomes are the sizes of the parameters."""

    trajectories, few_shot, repeats, rollouts, float64 = 3, (), 1, 0, False

    def objective(self, task):
        return AGENT(task)

    def decisions(self, task):
        return 0

    def sample(self, task, params, key, m):
        raise NotImplementedError

    def outcomes(self, task, params, key):
        return {name: jnp.sum(jnp.abs(x)) for name, x in named_of(params).items()}


def named_of(params):
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def test_a_run_that_is_followed_step_by_step_adapts_the_context_alone():
    algorithm = ContextAdaptation(1.0, 0.1)
    server, state = algorithm.init(parameters(POLICY))
    run = jit(lambda key: step_by_step(2, 3, None, Watched(), algorithm, server.message, state, ARC.task(0), key))
    changed = {name for name, sizes in run(jax.random.key(0)).items() if np.ptp(sizes) > 0}
    assert changed == {"context"}


def end(algorithm, policy=POLICY, some=ARC):
    agent = Sampled(policy, advantage="gae")
    simulation = simulation_of(some, policy, [algorithm], [0], agent, evaluation=MonteCarlo(agent, 4, 6))
    return simulation.advance(simulation.start(), 0, 2)


def test_without_an_adaptation_and_a_model_context_is_fedppo():
    same = {"local_steps": 2, "epochs": 2}
    own = ContextAdaptation(0.0, 0.05, m_in=2, m_out=3, divergence_weight=0.0, model_weight=0.0, **same)
    both = own, FedPPO(1.0, 0.05, m=3, **same)
    learned = [end(algorithm, some=TWO).server.message.learned.theta for algorithm in both]
    for x, y in zip(*map(jax.tree.leaves, learned), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


def test_played_agents_get_the_numbers_of_compiled_ones():
    """Also where the rate falls on a schedule, for which they count the rounds."""
    played = fleet(*[[Played(task, False) for task in tasks] for tasks in AGENTS])
    annealed = ContextAdaptation(0.5, 0.05, adaptation_steps=2, anneal=4, schedule="cosine", **SMALL)
    ends = [end(annealed, some=some) for some in (ARC, played)]
    for a, b in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    assert [after.server.message.round.item() for after in ends] == [2, 2]


@pytest.mark.parametrize("name", some_slow(["fedppo", "promp"], ["fedppo"]))
def test_under_other_algorithms_all_parameters_of_the_policy_adapt(name):
    """Only the model has no gradient there, and stays."""
    makers = {"promp": ProMP(1.0, 0.05, m_in=20, m_out=20, epochs=1), "fedppo": FedPPO(1.0, 0.05, m=20, epochs=1)}
    algorithm, theta, agent = makers[name], parameters(POLICY), AGENT(ARC.task(0))
    server, state = algorithm.init(theta)
    upload, _ = jit(algorithm.client)(server.message, state, agent, jax.random.key(1))
    own = algorithm.personalize(server.message, state, agent, jax.random.key(0), 20)
    for after in (upload.learned.theta, own):
        assert moved(theta, after) == {name for name in named_leaves(theta) if not name.startswith("model")}


def config(policy="context-mlp", sees=(), server=None, **algorithm):
    parts = {"fleet": {"env": "arc", "goals": 2, "held_out": 1, "horizon": 4}, "advantage": {"name": "gae"}}
    sizes = {"hidden": [4]} if policy == "mlp" else {"hidden": [4], "context_size": 2, "model_hidden": [3]}
    sizes |= {"sees": list(sees)} if sees else {}
    parts |= {"server": server} if server else {}
    algorithm = {"name": "context", "alpha": 1.0, "beta": 0.01, "m_in": 3, "m_out": 3, **algorithm}
    evaluation = {"name": "monte-carlo", "trajectories": 4, "episodes": 4}
    return make_config(
        {
            "name": "tried",
            "seeds": 1,
            "rounds": 1,
            "policy": {"name": policy, **sizes},
            "algorithm": algorithm,
            "evaluation": evaluation,
            **parts,
        }
    )


@pytest.mark.parametrize("seeing", some_slow([False, True], [True]))
def test_the_command_personalize_changes_the_context_alone_and_its_file_acts_with_it(seeing, tmp_path):
    """Also where the server steps and agents see their goals.

    The model then predicts from the goal too, and the file of an agent holds its own goal.
    """
    more = {"sees": ["goal"], "server": {"optimizer": "adam", "rate": 0.05}, "optimizer": "sgd"} if seeing else {}
    run = pf.train(config(**more), tmp_path)
    made, start = run.config.experiment, jax.tree.map(lambda x: x[0], run.params)
    assert np.isfinite(run.history.after).all()
    own = pf.personalize(run, agent=2, trajectories=6, episodes=4)
    assert moved(start, own.params) == {"context"}
    policy = made.fleet.agent(2).policy_in_task(made.policy) if seeing else made.policy
    obs = np.asarray([0.3, -0.2], np.float32)
    log_prob = [float(policy.log_prob(own.params, obs, np.asarray(a))) for a in range(8)]
    saved = pf.load_policy(own.save(tmp_path / "own.safetensors"))
    assert saved.act(obs, deterministic=True) == int(np.argmax(log_prob))
    np.testing.assert_array_equal(saved.params["context"], own.params["context"])


def test_the_rate_falls_on_a_schedule():
    annealed = ContextAdaptation(1.0, 0.1, anneal=4, schedule="cosine")
    assert annealed.annealing == Annealing(4, "cosine")
    assert annealed.uploads_auxiliaries
    assert annealed.init(parameters(POLICY))[0].message.round.item() == 0


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"inner_loss": "reward"}, "inner_loss.*'reward-model', 'dynamics-model' or 'return'"),
        ({"variant": "exact"}, "should be 'first-order' or 'differentiated'"),
        ({"model_weight": -1.0}, "model_weight must be a finite number >= 0"),
        ({"adaptation_steps": 0}, "adaptation_steps must be at least 1"),
        ({"clip_ratio": 0.0}, "clip_ratio must be a finite number > 0"),
        ({"anneal": 0}, "anneal must be at least 1"),
        ({"schedule": "cosine"}, "schedule = 'cosine' needs anneal"),
        ({"server": {"optimizer": "adam", "rate": 0.1}}, "a message of ContextAdaptation holds more than these"),
        ({"policy": "mlp"}, "adapts a policy's context, which MLPSoftmax does not have.*'context-mlp'"),
    ],
)
def test_bad_settings_are_one_sentence_before_compiling(algorithm, said, untyped):
    with pytest.raises(pf.UserError, match=said):
        _ = config(**algorithm).experiment


def test_agents_with_examples_are_rejected():
    with pytest.raises(pf.UserError, match="ContextAdaptation needs agents with episodes"):
        ContextAdaptation(1.0, 0.1).check_supports(classification(agents=2, held_out=0), POLICY)
