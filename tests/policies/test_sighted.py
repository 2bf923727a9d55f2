"""Agents that see numbers of their own task: what they see, and that nothing else of an episode changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import some_slow

from perfedrl.compilation import jit
from perfedrl.contracts import members
from perfedrl.envs import ENVS, PlayedTask, Task, fleet
from perfedrl.envs.base import environment_part
from perfedrl.envs.control import Pendulum
from perfedrl.policies import POLICIES, Contextual, GaussianMLP, MLPSoftmax, Normalized, normalized, sighted
from perfedrl.policies.mlp import observation_size
from perfedrl.policies.sighted import SightedMembers, SightedPlayedTask, SightedPolicy, SightedTask
from perfedrl.report.episode_strip import can_draw, draw_episode
from perfedrl.rollout import sampler
from perfedrl.types import Trajectory

KEY = jax.random.key(0)
GRAVITY = {"train": [5.0, 9.0, 13.0], "held_out": [11.0]}
PENDULUMS = {"agents": 3, "held_out": 1, "horizon": 5, "vary": {"g": GRAVITY}}
FEW = {"agents": 3, "held_out": 1, "horizon": 5}
FAMILIES = {
    "arc": ("goal", "mlp", {"goals": 3, "held_out": 1, "horizon": 5}),
    "point-navigation": ("goal", "gaussian-mlp", FEW),
    "cart-pole": ("length", "mlp", FEW),
    "pendulum": ("g", "actor-critic", PENDULUMS),
    "lqr": ("A", "linear-gaussian", FEW),
    "gymnasium": ("g", "gaussian-mlp", {"id": "Pendulum-v1", "parallel": 2, **PENDULUMS}),
}
"""Families with a parameter that their agents see and a policy."""


def play(task, policy, params, m=4):
    """Play episodes of one agent."""
    if isinstance(task, PlayedTask):
        return sampler(task, policy).sample(params, KEY, m)
    return jit(rollouts, static_argnums=3)(task, policy, params, m)


def rollouts(task, policy, params, m):
    """Play episodes in JAX."""
    return sampler(task, policy).sample(params, KEY, m)


def ignoring(params, longer, size):
    """Parameters of a policy with more inputs, with zeros for those after the first `size`."""

    def widened(x, y):
        if x.shape == y.shape:
            return x
        axis = int(x.shape[0] == y.shape[0])  # a gain has its inputs second
        first, rest = jnp.split(x, [size], axis=axis)
        gap = list(x.shape)
        gap[axis] = y.shape[axis] - x.shape[axis]
        return jnp.concatenate([first, jnp.zeros(gap), rest], axis=axis)

    return jax.tree.map(widened, params, longer)


@pytest.mark.parametrize("env", some_slow(FAMILIES, ["arc", "pendulum", "lqr", "gymnasium"]))
def test_a_policy_that_ignores_the_numbers_plays_the_same_episodes(env):
    name, kind, parameters = FAMILIES[env]
    plain = ENVS[env](**parameters)
    seeing, size = sighted(plain, [name]), observation_size(plain, kind)
    policy, longer = (POLICIES[kind](fleet=x) for x in (plain, seeing))
    params = policy.init(KEY)
    ignored = ignoring(params, longer.init(KEY), size)
    for i in (0, 3):
        one, two = plain.agent(i), seeing.agent(i)
        expected, found = play(one, policy, params), play(two, longer, ignored)
        own = found._replace(obs=environment_part(two, found.obs))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), own, expected)
        tail = np.broadcast_to(np.asarray(two.seen, np.float32), (*found.obs.shape[:2], len(two.seen)))
        np.testing.assert_array_equal(found.obs[..., size:], tail)
        outcomes = jax.vmap(two.outcomes)(found), jax.vmap(one.outcomes)(expected)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *outcomes)
    plain.close()
    seeing.close()


@pytest.mark.parametrize("env", FAMILIES)
def test_agents_see_their_own_numbers_standardized_over_the_training_agents(env):
    name, _, parameters = FAMILIES[env]
    plain = ENVS[env](**parameters)
    seeing = sighted(plain, [name])
    raw = np.asarray([np.ravel(plain.agent(i).settings[name]) for i in range(4)], float)
    seen = np.asarray([seeing.agent(i).seen for i in range(4)])
    np.testing.assert_allclose(np.asarray(seeing.sight.mean) + seen * np.asarray(seeing.sight.scale), raw, rtol=1e-6)
    differ = np.ptp(raw[:3], axis=0) > 0
    np.testing.assert_allclose(seen[:3].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(seen[:3].std(axis=0), differ, rtol=1e-5)
    assert observation_size(seeing, "mlp") == observation_size(plain, "mlp") + raw.shape[1]


@pytest.mark.parametrize(("env", "given"), [("arc", {"goal": (0.1, -0.4)}), ("gymnasium", {"g": 7.0})])
def test_a_new_agent_sees_its_own_numbers(env, given):
    name, _, parameters = FAMILIES[env]
    seeing = sighted(ENVS[env](**parameters), [name])
    task = seeing.new_agents.task(seeing, given, None)
    np.testing.assert_allclose(task.seen, seeing.sight.numbers(given), rtol=1e-6)
    np.testing.assert_allclose(np.ravel(task.settings[name]), np.ravel(given[name]), rtol=1e-6)


def test_a_linear_system_may_see_what_it_is_made_of():
    """The perturbation is a setting of the family and no leaf of the task, whose matrices follow from it."""
    made = ENVS["lqr"](agents=3, held_out=1)
    seeing = sighted(made, ["perturbation"])
    task = seeing.new_agents.task(seeing, {"perturbation": 0.25}, None)
    np.testing.assert_allclose(task.seen, seeing.sight.numbers({"perturbation": 0.25}))
    u = np.asarray([x["perturbation"] for x in made.new_agents.agents])
    np.testing.assert_allclose(seeing.train.seen[:, 0], (u[:3] - u[:3].mean()) / u[:3].std())


def test_gymnasium_pendulums_and_those_in_jax_see_alike_and_act_on_it():
    """The actions of a nearly deterministic policy are those at the observations that the episodes have."""
    plain = ENVS["gymnasium"](id="Pendulum-v1", parallel=2, **PENDULUMS)
    played, traced = sighted(plain, ["g"]), sighted(ENVS["pendulum"](**PENDULUMS), ["g"])
    assert played.sight == traced.sight
    policy = GaussianMLP((4, 6, 1), initial_std=1e-6)
    params = policy.init(KEY)
    params["mean"][0]["weight"] = 3 * params["mean"][0]["weight"]
    params["mean"][1]["weight"] = 3 * params["mean"][1]["weight"]
    for i in range(4):
        task = traced.agent(i)
        batch = play(played.agent(i), policy, params)
        expected = jax.vmap(jax.vmap(lambda obs: policy.sample(params, obs, jnp.full(1, 0.5))))(batch.obs)
        np.testing.assert_allclose(batch.action, expected, atol=1e-4)

        def after(obs, action, task=task):
            state = jnp.stack([jnp.arctan2(obs[1], obs[0]), obs[2]])
            return task.observe(task.step(state, 2 * jnp.clip(action, -1, 1), jnp.zeros(0))[0])

        here, there = batch.obs[:, :-1], batch.obs[:, 1:]
        np.testing.assert_allclose(jax.vmap(jax.vmap(after))(here, batch.action[:, :-1]), there, atol=1e-4)
    played.close()


@dataclasses.dataclass(frozen=True)
class Weights(PlayedTask):
    """A robot whose only state is the number of its decision; it reports the weight that it carries."""

    weight: float
    horizon: int = 2
    discount: float = 0.9
    observation_size, action_size = 1, 1

    @property
    def settings(self):
        return {"weight": self.weight}

    def sampler(self, policy):
        return WeightsSampler(self, policy)

    def outline(self, m):
        return Trajectory(jnp.zeros((m, 3, 1)), jnp.zeros((m, 3, 1)), jnp.zeros((m, 3)), jnp.ones((m, 3)))


@dataclasses.dataclass(frozen=True)
class WeightsSampler:
    """Plays one decision after the other with the policy's own methods."""

    task: Weights
    policy: object
    traceable = False

    def sample(self, params, key, m):
        times = np.broadcast_to(np.arange(3, dtype=np.float32)[:, None], (m, 3, 1))
        action = jax.vmap(jax.vmap(lambda obs: self.policy.sample(params, obs, jnp.full(1, 0.5))))(times)
        return self.task.outline(m)._replace(obs=times, action=action)


def test_a_robot_of_ones_own_sees_what_its_settings_say():
    seeing = sighted(fleet([Weights(1.0), Weights(3.0)], [Weights(5.0)]), ["weight"])
    policy = POLICIES["gaussian-mlp"](fleet=seeing, hidden=[])
    params = policy.init(KEY)
    params["mean"][0]["weight"] = jnp.asarray([[1.0], [10.0]])
    assert seeing.new_agents is None
    for i, seen in enumerate((-1.0, 1.0, 3.0)):
        batch = play(seeing.agent(i), policy, params, 2)
        np.testing.assert_allclose(batch.obs[0], [[0, seen], [1, seen], [2, seen]])
        np.testing.assert_allclose(batch.action[0, :, 0], 10 * seen + np.arange(3), rtol=1e-6)


def test_normalization_leaves_the_numbers_alone():
    """Moments of one agent's own would make its numbers, which are constant, zero."""
    seeing = sighted(ENVS["arc"](goals=3, held_out=1, horizon=4), ["goal"])
    inner = POLICIES["mlp"](fleet=seeing)
    policy = normalized(seeing, inner, True, False, 0.5)
    params = policy.init(KEY)
    params["normalizer"]["observations"] = {"mean": jnp.asarray([0.5, -1.0]), "square": jnp.asarray([4.25, 2.0])}
    obs = np.asarray([[0.5, 1.0, 30.0, -0.2], [2.5, -1.0, 0.1, 0.2]], np.float32)
    expected = np.asarray([[0, 2, 30, -0.2], [1, 0, 0.1, 0.2]], np.float32)
    np.testing.assert_allclose(policy.seen(params, obs), expected, rtol=1e-6)
    u = np.asarray([[0.3], [0.8]], np.float32)
    np.testing.assert_array_equal(policy.in_numpy(params)(obs, u), inner.in_numpy(params["policy"])(expected, u))
    batch = play(seeing.task(1), policy, params)
    moments = policy.moments(batch, batch.reward)["observations"]
    np.testing.assert_allclose(moments["mean"], np.mean(batch.obs[..., :2], axis=(0, 1)), rtol=1e-5)
    assert moments["square"].shape == (2,)


def test_sighted_tasks_state_every_member_of_the_contract():
    for kind, base in ((SightedTask, Task), (SightedPlayedTask, PlayedTask)):
        stated = set(vars(kind)) | set(vars(SightedMembers)) | set(kind.__annotations__)
        assert set(members(base)) <= stated
        assert "__getattr__" not in stated


def test_a_policy_in_a_task_is_the_policy_with_the_numbers_appended():
    inner = POLICIES["actor-critic"](fleet=sighted(ENVS["pendulum"](**PENDULUMS), ["g"]))
    policy, numbers = Normalized(inner, 3), np.asarray([0.7])
    view, params = SightedPolicy(policy, numbers), policy.init(KEY)
    obs, u, action = jnp.asarray([0.1, 0.2, 0.3]), jnp.asarray([0.4]), jnp.asarray([0.5])
    whole = jnp.append(obs, 0.7)
    batch = Trajectory(*(x[None, None] for x in (obs, action)), jnp.ones((1, 1)), jnp.ones((1, 1)))
    longer = batch._replace(obs=whole[None, None])
    for name, own, other in (
        ("sample", (obs, u), (whole, u)),
        ("log_prob", (obs, action), (whole, action)),
        ("entropy", (obs,), (whole,)),
        ("distribution", (obs,), (whole,)),
        ("values", (batch,), (longer,)),
        ("value_fit", (batch, batch.reward), (longer, batch.reward)),
        ("moment_fit", (batch, batch.reward), (longer, batch.reward)),
    ):
        found, expected = getattr(view, name)(params, *own), getattr(policy, name)(params, *other)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_context_and_its_model_are_those_of_the_policy_with_the_numbers_appended():
    policy, numbers = Contextual(MLPSoftmax((5, 2)), 3, 2), np.asarray([0.7])
    view, params = SightedPolicy(policy, numbers), policy.init(KEY)
    obs, rewards = jnp.asarray([[[0.1, 0.2], [0.3, -0.4]]]), jnp.asarray([[1.0, 2.0]])
    batch = Trajectory(obs, jnp.asarray([[0, 1]]), rewards, jnp.ones((1, 2)))
    longer = batch._replace(obs=jnp.concatenate([obs, jnp.full((1, 2, 1), 0.7)], axis=-1))
    assert view.is_context(params) == policy.is_context(params)
    for target in ("reward", "dynamics"):
        np.testing.assert_array_equal(
            view.model_fit(params, batch, target), policy.model_fit(params, longer, target), strict=True
        )


def test_episodes_of_agents_that_see_their_task_are_drawn():
    for env in ("arc", "pendulum"):
        name, _, parameters = FAMILIES[env]
        seeing = sighted(ENVS[env](**parameters), [name])
        policy = POLICIES["mlp" if env == "arc" else "gaussian-mlp"](fleet=seeing)
        params = policy.init(KEY)
        one = jax.tree.map(lambda x: np.asarray(x)[0], play(seeing.task(0), policy, params, 1))
        assert can_draw(seeing.task(0), one)
        assert draw_episode(seeing.task(0), policy, params, one, "an episode").axes


def test_observations_are_bounded_together_with_the_numbers():
    seeing = sighted(ENVS["arc"](goals=3, held_out=1), ["goal"])
    assert seeing.train.observation_bound == pytest.approx(np.sqrt(2 + np.sum(seeing.train.seen**2, axis=1).max()))
    assert sighted(ENVS["pendulum"](**PENDULUMS), ["g"]).train.observation_bound is None
    assert isinstance(seeing.task(0).task, type(ENVS["arc"]().task(0)))
    assert isinstance(sighted(ENVS["pendulum"](**PENDULUMS), ["g"]).task(0).task, Pendulum)


def test_policies_without_a_description_or_numpy_have_none_in_a_task():
    class Silent(MLPSoftmax):
        """A policy that describes itself nowhere."""

        in_numpy = description = None

    view = SightedPolicy(Silent((3, 2)), np.ones(1))
    assert view.in_numpy is view.description is view.values is view.model_fit is view.is_context is None
