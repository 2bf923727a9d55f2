"""MJX against Gymnasium's MuJoCo, in double precision: decisions with contacts, whole trajectories, bodies that differ.

Both stop the solver of contacts at the same tolerance, 1e-8 of the model's scale, and take the same Newton steps from
the same first guess. So they agree far better than the tolerance: 1e-13 was seen after one decision and 1e-9 after
forty. 1e-9 after one decision and 1e-7 after twenty leave room for other compilers.
"""

import subprocess
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("mujoco")
pytest.importorskip("mujoco.mjx")

from perfedrl.compilation import jit
from perfedrl.envs import ENVS
from perfedrl.envs.locomotion import mjx_physics
from perfedrl.envs.locomotion.mjx_physics import DERIVED, MjxPhysics
from perfedrl.envs.locomotion.tasks import BodyState
from perfedrl.errors import UserError
from perfedrl.estimators import Sampled
from perfedrl.gym_environment import mujoco_worlds as worlds
from perfedrl.policies import POLICIES

ONE, TWENTY = 1e-9, 1e-7
SLOW = [pytest.param(body, marks=pytest.mark.slow) for body in ("ant", "hopper", "walker")]


def state_of(env, like):
    """MuJoCo's state, with the parts that another state has."""
    data = env.unwrapped.data
    found = BodyState(*map(np.array, (data.qpos, data.qvel, data.qacc_warmstart, data.body(1).xpos, data.cfrc_ext)))
    return BodyState(*(None if old is None else new for new, old in zip(found, like, strict=True)))


def differ(one, other):
    """The largest difference of two states; of forces relative to their size."""
    gap = jax.tree.map(lambda x, y: np.max(np.abs(x - y) / np.maximum(1, np.abs(y))), one, other)
    return max(gap.qpos, gap.qvel, *(x for x in (gap.torso, gap.contact_forces) if x is not None))


@pytest.mark.parametrize("body", ["half-cheetah", *SLOW])
def test_decisions_and_trajectories_are_mujocos(body):
    env, physics, rng = worlds.make(worlds.BODIES[body]), MjxPhysics(body), np.random.default_rng(0)
    env.reset(seed=0)
    contacts, steps = 0, env.frame_skip
    with jax.enable_x64(True):
        advance = jax.jit(lambda state, control: physics.advance(state, control, steps))
        along = physics.start(*(np.array(x) for x in (env.data.qpos, env.data.qvel)))
        for _ in range(20):
            control = rng.uniform(-1, 1, physics.motors)
            alone = advance(state_of(env, along), control)
            along = advance(along, control)
            env.step(control)
            after = state_of(env, along)
            assert differ(alone, after) < ONE
            assert differ(along, after) < TWENTY
            contacts += env.data.ncon
        # MuJoCo starts anew from rest where a state is no longer finite, and so does a body here.
        broken = advance(along._replace(qvel=along.qvel * np.inf), control)
    env.close()
    assert contacts >= 3
    np.testing.assert_array_equal(broken.qpos, physics.rest)
    assert not broken.qvel.any()


def arrays(model):
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves}


@pytest.mark.parametrize("body", ["hopper", "walker"])
def test_a_body_holds_all_numbers_of_its_model_that_masses_and_other_factors_change(body):
    """MJX's model of the multiplied body differs from the plain one in nothing else."""
    rng, plain = np.random.default_rng(0), mjx_physics.plain(body)
    factors = {name: worlds.Factors(rng.uniform(0.5, 2, getattr(plain, name).size)) for name in worlds.BODY}
    env = worlds.with_factors(worlds.make(worlds.BODIES[body]), factors)
    mjx = mjx_physics.mjx()
    ours, theirs = (arrays(mjx.put_model(model, impl="jax")) for model in (env.model, plain))
    env.close()
    changed = {name for name, x in ours.items() if not np.array_equal(x, theirs[name], equal_nan=True)}
    unused = {"dof_M0", "actuator_acc0", "cam_poscom0", "light_poscom0", "stat.meanmass", "stat.meaninertia"}
    assert changed - unused == {*worlds.BODY, *DERIVED}
    held = mjx_physics.mjx_physics(body, factors).model
    for name, x in held.items():
        np.testing.assert_array_equal(x.astype(np.float32), ours[name])


@pytest.mark.slow
def test_bodies_that_differ_are_one_program_and_each_moves_as_in_gymnasium():
    few = {"agents": 2, "held_out": 0, "vary": list(worlds.BODY)}
    fleet, played = ENVS["hopper-mass"](engine="mjx", **few), ENVS["hopper-mass"](**few)
    envs, rng = [played.task(i).recipe() for i in range(2)], np.random.default_rng(0)
    for env in envs:
        env.reset(seed=0)
    with jax.enable_x64(True):
        step = jax.jit(jax.vmap(lambda task, state, action: task.step(state, action, np.zeros(0))))
        states = jax.vmap(lambda task, q, v: task.physics.start(q, v))(
            fleet.train, *(np.stack([getattr(env.data, x) for env in envs]) for x in ("qpos", "qvel"))
        )
        for _ in range(20):
            action = rng.uniform(-1, 1, (2, 3)).astype(np.float32)
            states, rewards, falls = step(fleet.train, states, action)
            for i, env in enumerate(envs):
                _, reward, fallen, *_ = env.step(action[i])
                assert float(rewards[i]) == pytest.approx(reward, abs=1e-6)
                assert bool(falls[i]) == fallen
                np.testing.assert_allclose(states.qpos[i], env.data.qpos, rtol=TWENTY, atol=TWENTY)
    assert envs[0].data.ncon + envs[1].data.ncon > 0
    assert (states.qpos[0] != states.qpos[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["half-cheetah-dir", "ant-dir", "hopper-mass"])
def test_episodes_keep_the_contract_of_tasks(name):
    fleet = ENVS[name](engine="mjx", agents=2, held_out=0, horizon=14)
    policy = POLICIES["gaussian-mlp"](fleet, initial_std=1.0)
    params, keys = policy.init(jax.random.key(1)), jax.random.split(jax.random.key(0), 2)
    sample = lambda task, key: Sampled(policy)(task).sampler.sample(params, key, 3)  # noqa: E731
    together = jit(jax.vmap(sample))(fleet.train, keys)
    assert together.reward.shape == (2, 3, 15)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(together))
    assert not together.reward[together.mask == 0].any()
    alone = jit(sample)(fleet.task(1), keys[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[1], rtol=1e-2, atol=1e-2), alone, together)
    task = fleet.task(0)
    with jax.enable_x64(True):  # single uniforms start episodes in single precision
        before = jax.eval_shape(task.reset, jax.ShapeDtypeStruct((task.reset_noise,), np.float32))
        action, none = (jax.ShapeDtypeStruct((n,), np.float32) for n in (task.action_size, 0))
        after, *_ = jax.eval_shape(task.step, before, action, none)
    assert before == after


def test_without_mjx_the_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco.mjx", None)
    for name in ("half-cheetah-dir", "hopper-mass"):
        with pytest.raises(UserError, match=r"pip install 'perfedrl\[mjx\]'"):
            ENVS[name](engine="mjx")


def test_mjx_is_imported_for_its_engine_only_and_prints_nothing():
    code = """
import sys
from perfedrl.envs import ENVS
ENVS["half-cheetah-dir"]()
assert "mujoco.mjx" not in sys.modules
ENVS["half-cheetah-dir"](engine="mjx")
assert "mujoco.mjx" in sys.modules
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout == ""
