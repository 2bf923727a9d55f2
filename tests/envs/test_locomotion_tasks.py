"""Locomotion tasks in JAX against Gymnasium's environments, on states that MuJoCo computes; and that fleets train."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import ndtri

pytest.importorskip("gymnasium")
pytest.importorskip("mujoco")
pytest.importorskip("mujoco.mjx")

import perfedrl as pf
from perfedrl.envs import ENVS, played_in_python
from perfedrl.envs.locomotion.tasks import BodyState
from perfedrl.errors import UserError
from perfedrl.types import Trajectory

NAMES = ("half-cheetah-dir", "half-cheetah-vel", "ant-dir", "ant-goal", "hopper-mass", "walker-mass")
MORE = {"half-cheetah-vel": {"frame_skip": 2, "velocity_scale": 0.1}}
"""Settings that the other families do not have."""
NEAR = {"rtol": 1e-12, "atol": 1e-12}
CONFIG = """
name = "bodies"
rounds = 1
seeds = 2

[fleet]
env = "half-cheetah-dir"
engine = "ENGINE"
horizon = 3

[policy]
name = "gaussian-mlp"
hidden = [4]

[algorithm]
name = "fedavg-pg"
alpha = 1e-3
beta = 1e-3
m = 2

[evaluation]
name = "monte-carlo"
trajectories = 0
episodes = 2
"""


def twins(name, **settings):
    """The second agent of a family in JAX and in Gymnasium."""
    few = {"agents": 2, "held_out": 0, **MORE.get(name, {}), **settings}
    return ENVS[name](engine="mjx", **few).task(1), ENVS[name](**few).task(1)


def state_of(env):
    """MuJoCo's state, with what Gymnasium reads off it."""
    data = env.unwrapped.data
    return BodyState(*map(jnp.array, (data.qpos, data.qvel, data.qacc_warmstart, data.body(1).xpos, data.cfrc_ext)))


@pytest.mark.parametrize("name", NAMES)
def test_observations_rewards_and_falls_are_gymnasiums(name):
    task, other = twins(name)
    env, rng, falls, touched = other.recipe(), np.random.default_rng(0), [], 0.0
    with jax.enable_x64(True):
        obs, _ = env.reset(seed=0)
        np.testing.assert_allclose(task.observe(state_of(env)), obs, **NEAR)
        for k in range(40):
            if k == 30 and name != "ant-goal":  # thrown up and turned around
                env.unwrapped.set_state(2.5 * env.unwrapped.init_qpos + 0.5, env.unwrapped.init_qvel)
            before, action = state_of(env), rng.uniform(-1.5, 1.5, task.action_size)
            (to_box,) = other.to_actions(action[None])
            obs, reward, terminated, *_ = env.step(to_box)
            after = state_of(env)
            np.testing.assert_allclose(task.observe(after), obs, **NEAR)
            control = np.clip(action, -1, 1).astype(np.float32).astype(float)
            # Gymnasium squares actions in single precision.
            assert float(task.reward(before, after, control)) == pytest.approx(reward, abs=1e-6)
            assert bool(task.fallen(after)) == terminated
            falls, touched = [*falls, terminated], max(touched, np.abs(after.contact_forces).max())
    env.close()
    assert touched > 1
    can_fall = not name.startswith("half-cheetah") and name != "ant-goal"
    assert (any(falls), all(falls)) == (can_fall, False)


LIMITS = {
    "ant-dir": [(2, 0.2), (2, 1.0)],
    "hopper-mass": [(1, 0.7), (2, 0.2), (2, -0.2), (3, 100.0), (3, -100.0)],
    "walker-mass": [(1, 0.8), (1, 2.0), (2, 1.0), (2, -1.0)],
}
"""The positions that end an episode, with their limits."""


@pytest.mark.parametrize("name", LIMITS)
def test_limits_of_standing_are_gymnasiums(name):
    task, other = twins(name)
    env, verdicts = other.recipe(), []
    env.reset(seed=0)
    bare = env.unwrapped
    with jax.enable_x64(True):
        for place, limit in LIMITS[name]:
            for value in (limit - 1e-9, limit, limit + 1e-9):
                qpos = bare.init_qpos.copy()
                qpos[place] = value
                bare.set_state(qpos, bare.init_qvel)
                verdicts.append(bool(task.fallen(state_of(env))))
                assert verdicts[-1] == (not bare.is_healthy)
    env.close()
    assert len(set(verdicts)) == 2


class Given:
    """Random numbers of Gymnasium, by inverse transform of given uniforms."""

    def __init__(self, u):
        self.u = list(u)

    def take(self, count):
        taken, self.u = self.u[:count], self.u[count:]
        return np.asarray(taken)

    def uniform(self, low, high, size):
        return low + (high - low) * self.take(size)

    def standard_normal(self, size):
        return ndtri(self.take(size))


@pytest.mark.parametrize("name", NAMES)
def test_episodes_start_as_in_gymnasium(name):
    task, other = twins(name)
    u = np.random.default_rng(1).random(task.reset_noise)
    env = other.recipe()
    env.reset(seed=0)
    env.unwrapped.np_random = Given(u)
    obs = env.reset()[0]
    with jax.enable_x64(True):
        start = task.reset(jax.numpy.asarray(u))
        np.testing.assert_allclose(task.observe(start), obs, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(start.qpos, env.unwrapped.data.qpos, rtol=1e-9, atol=1e-12)
    env.close()


@pytest.mark.parametrize("name", NAMES)
def test_agents_sizes_and_outcomes_do_not_depend_on_the_engine(name):
    few = {"agents": 2, "held_out": 0 if name == "half-cheetah-dir" else 1, "seed": 3}
    ours, theirs = ENVS[name](engine="mjx", **few), ENVS[name](**few)
    assert (ours.traceable, theirs.traceable) == (True, False)
    assert list(ours.new_agents.agents) == list(theirs.new_agents.agents)
    one, other = ours.agent(ours.agents + ours.held_out_agents - 1), theirs.agent(theirs.agents + few["held_out"] - 1)
    assert (one.horizon, one.discount, one.action_size) == (other.horizon, other.discount, other.action_size)
    made_up = jax.tree.map(lambda x: x[0], other.outline(1))
    episode = Trajectory(np.random.default_rng(0).random(made_up.obs.shape, np.float32), *made_up[1:])
    assert one.observe(one.reset(np.zeros(one.reset_noise, np.float32))).shape == episode.obs.shape[1:]
    expected, found = other.outcomes(episode), one.outcomes(episode)
    assert list(found) == list(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5)


def test_a_fleet_is_played_in_python_only_by_gymnasiums_engine():
    assert played_in_python({"env": "ant-dir"})
    assert played_in_python({"env": "ant-dir", "engine": "gymnasium"})
    assert not played_in_python({"env": "ant-dir", "engine": "mjx"})
    assert not played_in_python({"env": "gridworld"})


def test_new_agents_are_made_from_settings():
    fleet = ENVS["hopper-mass"](engine="mjx", agents=2, held_out=0, vary=["body_mass", "geom_friction"])
    again = fleet.new_agents.task(fleet, {}, like=1)
    jax.tree.map(np.testing.assert_array_equal, again, fleet.task(1))
    assert set(again.settings) == {"body_mass", "geom_friction"}
    assert set(ENVS["half-cheetah-dir"](engine="mjx").task(0).settings) == {"direction"}
    mass = [2.0] * 5
    other = fleet.new_agents.task(fleet, {"body_mass": mass}, like=1)
    plain = ENVS["hopper-mass"](agents=1, held_out=0).task(0).recipe
    env = plain()
    masses = env.model.body_mass / plain.values["body_mass"]
    env.close()
    np.testing.assert_allclose(other.physics.model["body_mass"], 2 * masses)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"engine": "mjxx"}, "engine = 'mjxx' is unknown; did you mean 'mjx'"),
        ({"engine": "mjx", "parallel": 4}, "parallel is for engine = 'gymnasium'"),
        ({"engine": "mjx", "processes": True}, "processes is for engine = 'gymnasium'"),
        ({"engine": "mjx", "horizon": -1}, "horizon must be a whole number >= 0"),
        ({"engine": "mjx", "held_out": -1}, "a fleet needs agents >= 1 and held_out >= 0"),
    ],
)
def test_invalid_settings_of_engines_are_rejected(untyped, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        ENVS["hopper-mass"](**settings)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["mjx", "planar"])
def test_a_fleet_that_compiles_trains_in_one_program(tmp_path, engine):
    config = tmp_path / "bodies.toml"
    config.write_text(CONFIG.replace("ENGINE", engine))
    assert np.isfinite(pf.train(config, tmp_path / "runs").history.before).all()
