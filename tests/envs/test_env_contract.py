"""The contract of every registered environment; a new registry entry is tested here without further work.

Families of agents with examples instead of episodes have a contract of their own, at the end of the file. Of the
others, those that JAX can trace are held to all of it; those played in Python (`fleet.traceable` is False) to what a
sampler promises: episodes that depend on parameters and key alone, of H + 1 decisions, and nothing after an end.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from perfedrl.compilation import jit
from perfedrl.envs import ENVS, Fleet, TabularMDP, Task
from perfedrl.envs.base import DataTask
from perfedrl.estimators import Sampled
from perfedrl.policies import POLICIES
from perfedrl.types import Trajectory

ARRAYS = {"P": np.full((3, 2, 2, 2), 0.5).tolist(), "r": np.arange(12.0).reshape(3, 2, 2).tolist()}
PARAMETERS = {
    "arrays": {**ARRAYS, "mu": [[1.0, 0.0]] * 3, "horizon": 2, "discount": 0.5, "held_out": 1},
    "navigation": {"goals": [(0.5, 0.5), (-0.5, 0.0)]},
    "gymnasium": {"id": "CartPole-v1", "vary": {"length": [0.1, 0.9]}, "horizon": 40},
    "gymnax": {"id": "jax_environments:Walk", "vary": {"push": [0.05, 0.3]}, "held_out": 2},
    "brax": {"id": "jax_environments:Cart", "vary": {"drag": [0.0, 0.5]}, "held_out": 2, "horizon": 5},
    "cart-pole with actuators": {"vary": ["gain", "lag", "dead_zone"]},
    "pendulum with actuators": {"vary": ["gain", "lag", "dead_zone"]},
}
"""Required parameters of families, and parameters of the variants below."""

VARIANTS = {"cart-pole with actuators": "cart-pole", "pendulum with actuators": "pendulum"}
"""Fleets beside those of the registry's names, and their families: those whose states have a hidden part."""
NAMES = [*ENVS, *VARIANTS]

DIFFER = {
    "acrobot": {"link_length_2"},
    "arc": {"goal"},
    "arrays": {"r"},
    "bandits": {"r"},
    "brax": {"values.drag"},
    "cart-pole": {"length"},
    "cart-pole with actuators": {"gain", "lag", "dead_zone"},
    "circle": {"goal"},
    "classification": {"examples.inputs", "examples.labels", "test.inputs", "test.labels"},
    "glucose": {"basal", "carbohydrate_ratio", "correction_factor", "physiology", "rest", "weight"},
    "gridworld": {"mu", "r"},
    "gymnax": {"values.push"},
    "homes": {
        *("load", "solar", "test_load", "test_solar"),
        *("home", "capacity", "power", "feed_in", "peak_start"),
    },
    "lqr": {"A", "B"},
    "mountain-car": {"force"},
    "mountain-car-continuous": {"power"},
    "navigation": {"goal"},
    "pendulum": {"l"},
    "pendulum with actuators": {"gain", "lag", "dead_zone"},
    "point-navigation": {"goal"},
    "random-mdps": {"probability"},
    "windy-cliff": {"probability", "r", "successor"},
}
"""The leaves in which the agents of a family differ; all others are equal."""

EARLY = ("cart-pole", "cart-pole with actuators", "gymnasium")
"""Families whose episodes nearly always end early under an untrained policy."""

PYTHON = [name for name in ENVS if "parallel" in ENVS.parameters(name)]
"""Families that are played in Python; a few short episodes suffice."""
FEW = {"agents": 2, "held_out": 0, "horizon": 5, "parallel": 3}

EXAMPLES = [name for name in ENVS if "test_examples" in ENVS.parameters(name)]
"""Families with examples instead of episodes."""
EPISODES = [name for name in NAMES if name not in EXAMPLES]

M = 3
BUILT: list[Fleet] = []


class Played(NamedTuple):
    fleet: Fleet
    policy: Any
    params: Any
    batch: Trajectory
    """Of every training agent: [agent, m, T, ...]."""


@lru_cache
def fleet_of(name: str) -> Fleet:
    BUILT.append(ENVS[VARIANTS.get(name, name)](**{**(FEW if name in PYTHON else {}), **PARAMETERS.get(name, {})}))
    return BUILT[-1]


def policy_of(fleet: Fleet) -> Any:
    if isinstance(fleet.train, TabularMDP):
        return POLICIES["table"](fleet)
    return POLICIES["gaussian-mlp" if fleet.train.actions is None else "mlp"](fleet)


def sample(fleet: Fleet, policy: Any, params: Any, seed: int) -> Trajectory:
    """Episodes of all agents: in one compiled call, or one agent after the other."""
    keys = jax.random.split(jax.random.key(seed), fleet.agents)
    if fleet.traceable:
        return all_agents(fleet.train, policy, params, keys)
    batches = [one_agent(fleet.task(i), policy, params, keys[i]) for i in range(fleet.agents)]
    return jax.tree.map(lambda *xs: np.stack(xs), *batches)


def one_agent(task: Any, policy: Any, params: Any, key: Any) -> Trajectory:
    return Sampled(policy)(task).sampler.sample(params, key, M)


all_agents = jit(jax.vmap(one_agent, in_axes=(0, None, None, 0)))
alone = jit(one_agent)


@lru_cache
def played(name: str) -> Played:
    fleet = fleet_of(name)
    policy = policy_of(fleet)
    params = policy.init(jax.random.key(1))
    return Played(fleet, policy, params, sample(fleet, policy, params, seed=0))


TRACEABLE = [name for name in NAMES if name not in PYTHON]
STEPPED = [name for name in TRACEABLE if name not in EXAMPLES]


@pytest.fixture(autouse=True, scope="module")
def close_environments():
    yield
    for fleet in BUILT:
        fleet.close()


@pytest.mark.parametrize("name", NAMES)
def test_traceable_tells_fleets_in_jax_from_played_ones(name):
    assert fleet_of(name).traceable == (name in TRACEABLE)


@pytest.mark.parametrize("name", EPISODES)
def test_episodes_depend_on_their_key_alone(name):
    fleet, policy, params, batch = played(name)
    jax.tree.map(np.testing.assert_array_equal, batch, sample(fleet, policy, params, seed=0))
    other = sample(fleet, policy, params, seed=1)
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(batch), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize("name", EPISODES)
def test_an_episode_has_horizon_plus_one_decisions_and_ends_once(name):
    fleet, *_, batch = played(name)
    T = fleet.train.horizon + 1
    assert all(x.shape[:3] == (fleet.agents, M, T) for x in jax.tree.leaves(batch))
    mask = np.asarray(batch.mask)
    assert (mask[..., 0] == 1).all(), "the first decision always counts"
    assert set(np.unique(mask)) <= {0.0, 1.0}
    assert (np.diff(mask) <= 0).all(), "an episode that ended stays ended"
    assert (np.asarray(batch.reward)[mask == 0] == 0).all()
    assert np.isfinite(batch.reward).all()
    if name in EARLY:
        assert (mask[..., -1] == 0).any()


@pytest.mark.parametrize("name", EPISODES)
def test_episodes_are_in_single_precision(name):
    batch = played(name).batch
    assert batch.reward.dtype == batch.mask.dtype == np.float32
    assert all(x.dtype in (np.float32, np.int32) for x in jax.tree.leaves((batch.obs, batch.action)))


@pytest.mark.parametrize("name", EPISODES)
def test_outcomes_of_an_episode_are_finite_scalars_and_shares(name):
    fleet, *_, batch = played(name)
    task = fleet.task(0)
    said = jit(lambda episode: task.outcomes(episode))(jax.tree.map(lambda x: x[0, 0], batch))
    assert all(np.shape(x) == () and np.isfinite(x) for x in said.values())
    assert all(0 <= said.get(share, 0) <= 1 for share in ("success", "upright"))
    if "score" in said:
        np.testing.assert_allclose(said["score"], np.sum(batch.reward[0, 0]), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", STEPPED)
def test_stepped_fleets_are_made_of_tasks(name):
    fleet = fleet_of(name)
    assert fleet.agents >= 1
    assert isinstance(fleet.task(0), Task)


@pytest.mark.parametrize("name", STEPPED)
def test_an_agents_episodes_are_the_same_alone_and_in_a_vmapped_fleet(name):
    fleet, policy, params, batch = played(name)
    keys = jax.random.split(jax.random.key(0), fleet.agents)
    last = alone(fleet.task(fleet.agents - 1), policy, params, keys[-1])
    near = lambda x, y: np.testing.assert_allclose(x, y[-1], rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(near, last, batch)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", STEPPED)
def test_a_step_keeps_the_states_structure_and_precision(name, x64):
    """Whatever precision is enabled: what single uniforms start stays in single precision."""
    task = fleet_of(name).task(0)
    uniforms = lambda n: jax.ShapeDtypeStruct((n,), np.float32)  # noqa: E731
    size = task.action_size
    action = jax.ShapeDtypeStruct((), np.int32) if size is None else jax.ShapeDtypeStruct((size,), np.float32)
    with jax.enable_x64(x64):
        before = jax.eval_shape(task.reset, uniforms(task.reset_noise))
        after, reward, done = jax.eval_shape(task.step, before, action, uniforms(task.step_noise))
        assert jax.eval_shape(task.observe, before) == jax.eval_shape(task.observe, after)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    same = [
        x.shape == y.shape and x.dtype == y.dtype for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True)
    ]
    assert all(same)
    assert reward.shape == ()
    assert x64 or reward.dtype == np.float32, "finite MDPs keep rewards in double precision where there is any"
    assert (np.shape(done), np.result_type(done)) == ((), np.bool_)


@pytest.mark.parametrize("name", TRACEABLE)
def test_agents_differ_exactly_in_the_leaves_listed_for_their_family(name):
    assert name in DIFFER, f"say in DIFFER in what the agents of {name!r} differ"
    fleet = fleet_of(name)
    leaves = jax.tree_util.tree_leaves_with_path(fleet.train)
    differ = {jax.tree_util.keystr(path, simple=True, separator=".") for path, x in leaves if (x != x[:1]).any()}
    assert differ == DIFFER[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_agents_with_examples_are_data_tasks_with_disjoint_test_examples(name):
    fleet = fleet_of(name)
    task = fleet.task(fleet.agents - 1)
    assert isinstance(task, DataTask)
    assert not isinstance(task, Task)
    for part in (task.examples, task.test):
        assert part.inputs.shape == (len(part.labels), task.observation_size)
        assert (part.inputs.dtype, part.labels.dtype) == (np.float32, np.int32)
    learned, tested = ({x.tobytes() for x in part.inputs} for part in (task.examples, task.test))
    assert not learned & tested
    again = ENVS[name](**PARAMETERS.get(name, {}))
    jax.tree.map(np.testing.assert_array_equal, fleet, again)
