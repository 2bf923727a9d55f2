"""Environments that others wrote in JAX: the adapter steps them with the agent's parameters and a key of uniforms."""

import dataclasses

import jax
import jax_environments
import numpy as np
import pytest

from perfedrl.envs import ENVS
from perfedrl.envs.adapters.shared import BITS, key_of
from perfedrl.errors import UserError

WALK = {"id": "jax_environments:Walk", "vary": {"push": [0.05, 0.3]}, "agents": 2, "held_out": 1}
CART = {"id": "jax_environments:Cart", "vary": {"drag": [0.0, 0.5]}, "agents": 2, "horizon": 5}


def test_a_key_has_every_bit_of_its_uniforms_once():
    """The 64 bits of the key are 23, 23 and 18 bits of the uniforms, so equally likely uniforms give likely keys."""
    unit = 2.0**-BITS
    seen = []
    for i in range(3):
        for bit in range(BITS):
            u = np.zeros(3, np.float32)
            u[i] = unit * 2**bit
            high, low = (int(x) for x in key_of(jax.numpy.asarray(u)))
            seen.append((i, bit, (high << 32) | low))
    used = [key for _, _, key in seen if key]
    assert sorted(used) == sorted(2**k for k in range(64))
    assert len(seen) - len(used) == 5  # bits of the third uniform that are not needed


def test_gymnaxs_steps_are_those_of_the_environment_with_the_agents_parameters():
    task = ENVS["gymnax"](**WALK, options={"noise": 0.5}).task(1)
    env, params = jax_environments.Walk(), jax_environments.EnvParams(push=task.values["push"], noise=0.5)
    u, v = (jax.numpy.asarray(x) for x in np.random.default_rng(0).random((2, 3), np.float32))
    obs, state = env.reset(key_of(u), params)
    start = task.reset(u)
    np.testing.assert_array_equal(task.observe(start), obs)
    obs, state, reward, done, _ = env.step(key_of(v), state, 1, params)
    after, got, over = task.step(start, jax.numpy.asarray(1), v)
    np.testing.assert_allclose(task.observe(after), obs, rtol=1e-6)
    assert (float(got), bool(over)) == (pytest.approx(float(reward)), bool(done))
    assert task.actions == 2
    assert task.horizon == 11


@pytest.mark.parametrize(("action", "force"), [(-1.0, -2.0), (0.0, 1.0), (1.0, 4.0), (3.0, 4.0)])
def test_actions_are_mapped_to_the_box_of_the_environment(action, force):
    task = ENVS["gymnax"](**{**WALK, "id": "jax_environments:Boxed"}).task(0)
    assert (task.actions, task.action_size) == (None, 1)
    np.testing.assert_allclose(task.to_environment(jax.numpy.asarray([action])), [force])


@pytest.mark.parametrize(("place", "time", "over"), [(0.0, 3, False), (0.9, 3, True), (0.0, 11, True)])
def test_episodes_end_with_either_kind_of_end(place, time, over):
    task = ENVS["gymnax"](**{**WALK, "id": "jax_environments:Boxed"}, options={"noise": 0.0}).task(0)
    u = jax.numpy.zeros(3)
    inner = jax.numpy.asarray(place), jax.numpy.asarray(time)
    assert bool(task.step(task.reset(u)._replace(inner=inner), jax.numpy.ones(1), u)[2]) == over


@pytest.mark.parametrize(
    ("vary", "made"),
    [
        ({"drag": [0.1, 0.5]}, lambda values: jax_environments.Cart(drag=values["drag"])),
        ({"sys.mass": {"train": [[1.0, 2.0], [3.0, 4.0]]}}, None),
        ({"sys.mass": {"train": [1.5, 3.0]}}, None),
    ],
)
def test_braxs_steps_are_those_of_the_environment_with_the_agents_values(vary, made):
    task = ENVS["brax"](**{**CART, "vary": vary}).task(1)
    if made is None:
        env = jax_environments.Cart()
        env.sys = dataclasses.replace(env.sys, mass=jax.numpy.asarray(task.values["sys.mass"]))
    else:
        env = made(task.values)
    u = jax.numpy.asarray(np.random.default_rng(0).random(3, np.float32))
    ours, theirs = task.reset(u), env.reset(key_of(u))
    for action in ([0.5, -0.2], [3.0, 1.0]):
        ours, reward, done = task.step(ours, jax.numpy.asarray(action), u[:0])
        theirs = env.step(theirs, jax.numpy.clip(jax.numpy.asarray(action), -1, 1))
        np.testing.assert_allclose(task.observe(ours), theirs.obs, rtol=1e-6)
        assert (float(reward), bool(done)) == (pytest.approx(float(theirs.reward)), bool(theirs.done))


def test_an_entry_of_observations_that_are_tables_is_seen():
    seen = {"options": {"seen": "table"}}
    one = ENVS["brax"](**CART, **seen, observation="state").task(0)
    both = ENVS["brax"](**CART, **seen).task(0)
    u = jax.numpy.zeros(3)
    assert (one.observe(one.reset(u)).shape, both.observe(both.reset(u)).shape) == ((4,), (8,))


class Bare:
    """No environment."""


class Branches(jax_environments.Walk):
    """A step that JAX cannot trace."""

    def step(self, key, state, action, params):
        return super().step(key, state, 1 if action > 0 else 0, params)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("gymnax", {**WALK, "vary": {"pushh": [0, 1]}}, "there is no parameter 'pushh'; did you mean 'push'"),
        ("gymnax", {**WALK, "vary": {}, "held_out": 0}, "say which parameters of .* differ between agents"),
        ("gymnax", {**WALK, "options": {"nois": 1}}, "there is no parameter 'nois'"),
        ("gymnax", {**WALK, "horizon": -1}, "horizon must be a whole number >= 0"),
        ("gymnax", {**WALK, "id": Branches}, "JAX cannot trace a step of the environment"),
        ("gymnax", {**WALK, "id": "jax_environments:Wolk"}, "cannot be imported"),
        ("brax", {**CART, "vary": {"mass": [0.1, 1]}}, "cannot be made: .*mass"),
        ("brax", {**CART, "vary": {"sys.inertia": [0.1, 1]}}, "the environment has no array sys.inertia"),
        ("brax", {**CART, "vary": {"sys.mass": {"train": [[1.0] * 3] * 2}}}, r"sys.mass has the shape \(2,\)"),
        ("brax", {**CART, "vary": {"sys.mass": {"train": ["heavy", "light"]}}}, "sys.mass must be numbers"),
        ("brax", {**CART, "id": Bare, "vary": {"sys.mass": [0.1, 1]}}, "has no array sys.mass"),
    ],
)
def test_invalid_environments_and_settings_are_rejected(name, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        ENVS[name](**settings)


def test_without_gymnax_its_registered_ids_are_rejected_with_what_to_install():
    try:
        import gymnax  # noqa: F401
    except ImportError:
        with pytest.raises(UserError, match="pip install --no-deps gymnax"):
            ENVS["gymnax"](**{**WALK, "id": "CartPole-v1"})
