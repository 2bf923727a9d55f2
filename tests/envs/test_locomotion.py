"""Locomotion families: rewards computed by hand, bodies that differ as documented, splits that depend on the seed."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

pytest.importorskip("mujoco")
pytest.importorskip("gymnasium")

from perfedrl.envs import ENVS
from perfedrl.envs.locomotion import families
from perfedrl.errors import UserError
from perfedrl.experiments.config import load_config
from perfedrl.gym_environment import mujoco_worlds as worlds
from perfedrl.policies import POLICIES, sighted

NAMES = ("half-cheetah-dir", "half-cheetah-vel", "ant-dir", "ant-goal", "hopper-mass", "walker-mass")
CONFIGS = Path(__file__).parents[2] / "configs"
FEW = {"agents": 2, "held_out": 1, "parallel": 2, "workers": 1}
DERIVED = {
    "body_invweight0",
    "body_subtreemass",
    "dof_invweight0",
    "dof_M0",
    "actuator_acc0",
    "cam_poscom0",
    "light_poscom0",
}
"""Constants that MuJoCo computes from masses."""


def decisions(env, count=4, seed=0):
    """What happens in a few random decisions: positions before and after, the action, the reward, contact forces.

    Of the torso too, which MuJoCo keeps as it was at the start of the last of a decision's steps, as the papers had it.
    """
    env.reset(seed=seed)
    rng, bare = np.random.default_rng(seed), env.unwrapped
    for _ in range(count):
        action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
        place = lambda: (bare.data.qpos.copy(), bare.data.body(1).xpos.copy())  # noqa: E731
        before, torso_before = place()
        obs, reward, terminated, *_ = env.step(action)
        assert not terminated
        after, torso = place()
        yield SimpleNamespace(
            before=before, after=after, moved=torso - torso_before, action=action, reward=reward, obs=obs,
            contact=0.5 * 1e-3 * np.sum(np.clip(bare.data.cfrc_ext, -1, 1) ** 2), effort=np.sum(action**2),
        )  # fmt: skip
    env.close()


@pytest.mark.parametrize("frame_skip", [1, 5])
@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_reward_of_a_cheetah_with_a_direction(direction, frame_skip):
    for x in decisions(worlds.half_cheetah_direction(direction, frame_skip)):
        v = (x.after[0] - x.before[0]) / (0.01 * frame_skip)
        assert x.reward == pytest.approx(direction * v - 0.5 * 1e-1 * x.effort, abs=1e-6)


def test_reward_of_a_cheetah_with_a_target_velocity():
    for x in decisions(worlds.half_cheetah_velocity(1.3)):
        assert x.reward == pytest.approx(-abs((x.after[0] - x.before[0]) / 0.05 - 1.3) - 0.05 * x.effort, abs=1e-6)


def test_reward_of_an_ant_with_a_direction():
    for x in decisions(worlds.ant_direction(2.0)):
        v = x.moved[:2] @ [np.cos(2.0), np.sin(2.0)] / 0.05
        assert x.reward == pytest.approx(v + 1 - 0.5 * x.effort - x.contact, abs=1e-6)


def test_reward_of_an_ant_with_a_goal_which_observes_its_position():
    goal = (1.0, -2.0)
    for x in decisions(worlds.ant_to_goal(goal)):
        assert x.reward == pytest.approx(-np.abs(x.after[:2] - goal).sum() - 0.1 * x.effort - x.contact, abs=1e-6)
        np.testing.assert_array_equal(x.obs[:2], x.after[:2])


@pytest.mark.parametrize("world", [worlds.hopper, worlds.walker])
def test_reward_of_hoppers_and_walkers(world):
    for x in decisions(world(), count=2):
        assert x.reward == pytest.approx((x.after[0] - x.before[0]) / 0.008 + 1 - 1e-3 * x.effort, abs=1e-6)


def test_velocity_scale_multiplies_the_observed_velocities():
    plain, other = worlds.half_cheetah_velocity(1.0), worlds.half_cheetah_velocity(1.0, velocity_scale=0.1)
    for x, y in zip(decisions(plain), decisions(other), strict=True):
        np.testing.assert_allclose(np.r_[x.obs[:8], 0.1 * x.obs[8:]], y.obs)
        assert x.reward == y.reward


def test_a_fall_ends_the_episode_of_an_ant_unless_it_has_a_goal():
    for world, ends in ((worlds.ant_to_goal((1.0, 1.0)), False), (worlds.ant_direction(0.0), True)):
        world.reset(seed=0)
        bare = world.unwrapped
        bare.set_state(np.r_[0, 0, 2.0, bare.init_qpos[3:]], bare.init_qvel)  # thrown up; 0.2 to 1 is healthy
        assert world.step(np.zeros(8, np.float32))[2] == ends
        world.close()


def arrays(model):
    found = {name: getattr(model, name) for name in dir(model) if not name.startswith("_")}
    return {name: x for name, x in found.items() if isinstance(x, np.ndarray) and x.dtype.kind in "fiub"}


@pytest.mark.parametrize("name", ["hopper-mass", "walker-mass"])
def test_bodies_differ_in_the_named_parts_and_in_constants_derived_from_them(name):
    fleet = ENVS[name](**FEW)
    env = fleet.task(1).recipe()
    plain = (worlds.hopper if name == "hopper-mass" else worlds.walker)()
    factors = fleet.task(1).recipe.values["body_mass"]
    np.testing.assert_allclose(env.model.body_mass, plain.model.body_mass * factors)
    assert np.all(np.abs(np.log(factors) / np.log(1.5)) <= 3)
    assert len(set(factors)) == len(env.model.body_mass)
    ours, theirs = arrays(env.model), arrays(plain.model)
    differ = {key for key, x in ours.items() if not np.array_equal(x, theirs[key], equal_nan=x.dtype.kind == "f")}
    assert "body_mass" in differ
    assert differ <= {"body_mass", *DERIVED}
    np.testing.assert_allclose(env.model.body_subtreemass[0], env.model.body_mass.sum())


def test_varying_more_parts_of_a_body_does_not_change_its_masses():
    every = ENVS["hopper-mass"](vary=list(worlds.BODY), **FEW).task(0).recipe
    mass = ENVS["hopper-mass"](**FEW).task(0).recipe
    assert every.values["body_mass"] == mass.values["body_mass"]
    env, plain = every(), worlds.hopper()
    for name in worlds.BODY:
        ours, theirs = getattr(env.model, name), getattr(plain.model, name)
        np.testing.assert_allclose(ours, theirs * np.reshape(every.values[name], theirs.shape))
    assert max(np.abs(np.log(every.values["dof_damping"]))) <= 3 * np.log(1.3)


@pytest.mark.parametrize("name", NAMES)
def test_the_split_follows_from_the_seed(name):
    say = lambda fleet: [task.recipe.values for part in (fleet.train, fleet.held_out or ()) for task in part]  # noqa: E731
    few = {**FEW, "held_out": 0} if name == "half-cheetah-dir" else FEW
    first = say(ENVS[name](**few))
    assert first == say(ENVS[name](**few))
    if name == "half-cheetah-dir":
        assert sorted(x["direction"] for x in first) == [-1.0, 1.0]
    else:
        assert len({repr(x) for x in (*first, *say(ENVS[name](**few, seed=1)))}) == 6


def test_velocities_directions_and_goals_have_the_papers_distributions():
    say = lambda fleet, key: np.asarray([task.recipe.values[key] for task in fleet.train])  # noqa: E731
    many = {"agents": 30, "held_out": 0}
    slow, fast = (say(ENVS["half-cheetah-vel"](**many, fastest=x), "velocity") for x in (2.0, 3.0))
    np.testing.assert_allclose(fast, 1.5 * slow)
    assert 0 < slow.min() < 0.4
    assert 1.6 < slow.max() < 2
    far = np.linalg.norm([families.in_disk(*u) for u in np.random.default_rng(0).random((20_000, 2))], axis=1)
    assert far.max() <= 3
    assert np.mean(far < 1.5) == pytest.approx(0.25, abs=0.02)  # six standard errors
    line = ENVS["ant-dir"](agents=2, held_out=0, directions="line")
    np.testing.assert_allclose(sorted(np.cos(say(line, "angle"))), [-1, 1])


@pytest.mark.parametrize("name", NAMES)
def test_episodes_have_a_hundred_decisions_and_depend_on_the_key_alone(name):
    fleet = ENVS[name](**{**FEW, "held_out": 0})
    policy = POLICIES["gaussian-mlp"](fleet, hidden=(4,), initial_std=0.1)
    play = lambda key: fleet.task(0).sampler(policy).sample(policy.init(jax.random.key(0)), jax.random.key(key), 2)  # noqa: E731
    one, again, other = play(0), play(0), play(1)
    assert one.reward.shape == (2, 100)
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert (one.obs != other.obs).any()
    if name.startswith("half-cheetah") or name == "ant-goal":
        assert one.mask.all()
    fleet.close()
    assert all(not task._player.slots._environments for task in fleet.train)


@pytest.mark.parametrize("name", ["half-cheetah-dir", "hopper-mass"])
def test_workers_play_the_same_bits_as_one_process(name):
    batches = []
    for workers in (1, 2):
        fleet = ENVS[name](agents=1, held_out=0, parallel=4, horizon=29, workers=workers)
        policy = POLICIES["gaussian-mlp"](fleet, hidden=(64, 64))
        batches.append(fleet.task(0).sampler(policy).sample(policy.init(jax.random.key(0)), jax.random.key(1), 7))
        fleet.close()
    jax.tree.map(np.testing.assert_array_equal, *batches)
    assert ENVS.parameters(name)["workers"].default == "auto"


@pytest.mark.parametrize("name", ["half_cheetah_dir", "half_cheetah_vel"])
def test_configs_of_cheetahs_take_the_decisions_that_they_say(name):
    file = CONFIGS / f"{name}.toml"
    config = load_config(file)
    trajectories = config.experiment.algorithm.trajectories_after(config.rounds)
    assert config.fleet["agents"] * trajectories * (config.fleet["horizon"] + 1) == 16e6
    assert "16 million decisions" in file.read_text()
    assert config.server.anneal == config.rounds


def test_outcomes_of_locomotion_tasks_by_hand():
    """Velocities are read off observations, where Gymnasium has them after the positions."""
    for world, at in ((worlds.half_cheetah_velocity(1.0), 8), (worlds.ant_direction(0.0), 13)):
        obs, _ = world.reset(seed=0)
        assert obs[at] == world.unwrapped.data.qvel[0]
        world.close()
    said = {"ant-dir": {"velocity", "upright"}, "ant-goal": {"distance"}, "walker-mass": {"stood", "upright"}}
    for name, outcomes in {**said, "half-cheetah-dir": {"velocity"}}.items():
        task = ENVS[name](agents=2, held_out=0).task(0)
        episode = jax.tree.map(lambda x: x[0], task.outline(1))
        assert set(task.outcomes(episode)) == {"score", *outcomes}
    goal = ENVS["ant-goal"](agents=2, held_out=0).task(1)
    away = goal.outcomes(jax.tree.map(lambda x: x[0], goal.outline(1)))["distance"]
    assert away == pytest.approx(np.linalg.norm(goal.recipe.values["goal"]))


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("half-cheetah-dir", {"held_out": 1}, "held_out asks for 1 agents unlike all others, and 0 distinct tasks"),
        ("ant-dir", {"directions": "line", "agents": 1, "held_out": 2}, "1 distinct tasks are left when 1 agents"),
        ("half-cheetah-dir", {"frame_skip": 0}, "frame_skip must be a finite number > 0"),
        ("half-cheetah-vel", {"fastest": 0.0}, "fastest must be a finite number > 0"),
        ("hopper-mass", {"vary": ["body_mas"]}, "a body has no 'body_mas'"),
        ("hopper-mass", {"vary": []}, "vary must be a list"),
        ("walker-mass", {"limit": -1.0}, "limit must be a finite number > 0"),
        ("ant-goal", {"agents": 0}, "a fleet needs agents >= 1"),
        ("ant-goal", {"held_out": -1}, "a fleet needs agents >= 1 and held_out >= 0"),
    ],
)
def test_invalid_settings_are_rejected(name, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        ENVS[name](**settings)


def test_without_mujoco_the_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco", None)
    for name in NAMES:
        with pytest.raises(UserError, match=r"pip install 'perfedrl\[mujoco\]'"):
            ENVS[name]()


def test_making_an_environment_prints_nothing_and_writes_no_file(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    worlds.half_cheetah_velocity(1.0).close()
    worlds.hopper().close()
    assert capfd.readouterr() == ("", "")
    assert not list(Path(tmp_path).iterdir())


def test_mujoco_is_imported_when_a_fleet_is_made():
    code = "import sys, perfedrl.envs; assert 'half-cheetah-dir' in perfedrl.envs.ENVS; print('mujoco' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "parameter", "new"),
    [
        ("half-cheetah-dir", "direction", 0.5),
        ("half-cheetah-vel", "velocity", 1.2),
        ("ant-dir", "angle", 0.3),
        ("ant-goal", "goal", (0.5, -0.5)),
        ("hopper-mass", "body_mass", (1.1, 0.9, 1.3, 0.7, 1.5)),
    ],
)
def test_agents_may_see_what_they_differ_in(name, parameter, new):
    few = {**FEW, "held_out": 0} if name == "half-cheetah-dir" else FEW  # there are two directions
    seeing = sighted(ENVS[name](**few, horizon=2), [parameter])
    task = seeing.new_agents.task(seeing, {parameter: new}, None)
    for own in (*seeing.train, *(seeing.held_out or ()), task):
        numbers = np.asarray(seeing.sight.mean) + np.asarray(own.seen) * np.asarray(seeing.sight.scale)
        np.testing.assert_allclose(numbers, np.ravel(own.task.recipe.values[parameter]), atol=1e-12)
    assert np.ravel(task.task.recipe.values[parameter]) == pytest.approx(np.ravel(new))
    assert task.observation_size == task.task.observation_size + len(numbers)
