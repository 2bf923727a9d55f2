"""Planar bodies against MuJoCo in double precision, and the linear algebra that they move by.

Both solve the same convex problem of contacts and limits. Here MuJoCo's solver goes on to its last digit, so that what
is left is rounding: 1e-12 was seen after one step, of which 1e-9 leaves room for other compilers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfedrl.compilation import jit
from perfedrl.envs import ENVS
from perfedrl.envs.locomotion.planar import PlanarPhysics, planar_physics
from perfedrl.envs.locomotion.planar.gpu_kernel import in_one_kernel
from perfedrl.envs.locomotion.planar.model import read_model
from perfedrl.envs.locomotion.planar.physics import BodyEquations, plain
from perfedrl.envs.locomotion.planar.tree import factored, multiplied, solved
from perfedrl.envs.locomotion.tasks import BodyState
from perfedrl.errors import UserError
from perfedrl.gym_environment import mujoco_worlds as worlds

pytest.importorskip("gymnasium")
mujoco = pytest.importorskip("mujoco")

ONE_STEP = 1e-9


def recorded(model, steps):
    """States, controls and next states of MuJoCo under random controls, and how often floor and limits pushed."""
    data, rng = mujoco.MjData(model), np.random.default_rng(0)
    model.opt.tolerance = 0.0
    before, controls, after, contacts, limits = [], [], [], 0, 0
    for k in range(steps):
        if k % 5 == 0:
            data.ctrl[:] = np.clip(1.5 * rng.normal(size=model.nu), -1, 1)
        before.append((data.qpos.copy(), data.qvel.copy()))
        controls.append(data.ctrl.copy())
        mujoco.mj_step(model, data)
        after.append((data.qpos.copy(), data.qvel.copy()))
        contacts, limits = contacts + data.ncon, limits + data.nl
    pairs = [BodyState(*(np.stack(x) for x in zip(*states, strict=True))) for states in (before, after)]
    return pairs[0], np.stack(controls), pairs[1], contacts, limits


def check_parity(physics, model, steps):
    before, controls, after, contacts, limits = recorded(model, steps)
    with jax.enable_x64(True):
        moved = jit(jax.vmap(lambda state, control: physics.advance(state, control, 1)))(before, controls)
    np.testing.assert_allclose(moved.qpos, after.qpos, rtol=0, atol=ONE_STEP)
    np.testing.assert_allclose(moved.qvel, after.qvel, rtol=0, atol=ONE_STEP)
    assert contacts > 50
    assert limits > 50


def test_cheetahs_move_as_in_mujoco():
    env = worlds.make(worlds.BODIES["half-cheetah"])
    check_parity(PlanarPhysics("half-cheetah"), env.model, 400)
    env.close()


@pytest.mark.slow
def test_walkers_move_as_in_mujoco_also_with_bodies_of_their_own():
    rng, plain_model = np.random.default_rng(1), worlds.make(worlds.BODIES["walker"])
    check_parity(PlanarPhysics("walker"), plain_model.model, 400)
    sizes = {name: getattr(plain_model.model, name).size for name in worlds.BODY}
    factors = {name: worlds.Factors(rng.uniform(0.7, 1.5, size)) for name, size in sizes.items()}
    env = worlds.with_factors(worlds.make(worlds.BODIES["walker"]), factors)
    check_parity(planar_physics("walker", factors), env.model, 400)


def test_the_factors_of_a_tree_solve_its_systems_and_keep_its_zeros():
    model, rng = plain("half-cheetah"), np.random.default_rng(0)
    dense = np.zeros((model.dofs, model.dofs))
    entries = {}
    for i in range(model.dofs):
        for j in (*model.above(i), i):
            entries[i, j] = dense[i, j] = dense[j, i] = rng.normal() + 10 * (i == j)
    back, front = [3, 4, 5], [6, 7, 8]
    assert not dense[np.ix_(back, front)].any()
    b = rng.normal(size=model.dofs)
    x = solved(model, factored(model, entries), list(b))
    np.testing.assert_allclose(x, np.linalg.solve(dense, b), rtol=1e-12)
    np.testing.assert_allclose(multiplied(model, entries, list(b)), dense @ b, rtol=1e-12)


def test_a_state_that_is_no_longer_finite_starts_anew_from_rest():
    physics = PlanarPhysics("half-cheetah")
    state = BodyState(jnp.asarray(physics.rest), jnp.full(physics.velocities, jnp.inf))
    after = jax.eval_shape(lambda s: physics.advance(s, jnp.zeros(physics.motors), 1), state)
    assert after.qpos.shape == state.qpos.shape
    anew = physics.anew_where_invalid(state)
    np.testing.assert_array_equal(anew.qpos, physics.rest)
    assert not anew.qvel.any()


def test_bodies_that_the_equations_do_not_cover_are_rejected():
    with pytest.raises(UserError, match="for hopper take 'mjx' or 'gymnasium'"):
        ENVS["hopper-mass"](engine="planar")
    with pytest.raises(UserError, match="for ant take"):
        ENVS["ant-dir"](engine="planar")
    env = worlds.make(worlds.BODIES["hopper"])
    with pytest.raises(UserError, match="parts that touch only the floor"):
        read_model(env.model)
    env.close()


@pytest.mark.slow
def test_decisions_of_a_fleet_are_gymnasiums():
    fleet, played = (ENVS["half-cheetah-dir"](engine=engine) for engine in ("planar", "gymnasium"))
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        step = jit(lambda task, state, action: task.step(state, action, np.zeros(0)))
        for i in range(2):
            env, task = played.task(i).recipe(), fleet.task(i)
            env.reset(seed=0)
            state = task.physics.start(*(jnp.array(x) for x in (env.unwrapped.data.qpos, env.unwrapped.data.qvel)))
            for _ in range(15):
                action = rng.uniform(-1.5, 1.5, 6).astype(np.float32)
                state, reward, fallen = step(task, state, action)
                seen, theirs, *_ = env.step(np.clip(action, -1, 1))
                assert float(reward) == pytest.approx(theirs, abs=1e-6)
                np.testing.assert_allclose(task.observe(state), seen, atol=1e-6)
                assert not fallen
            env.close()


@pytest.mark.slow
@pytest.mark.parametrize("body", ["half-cheetah", "walker"])
def test_one_kernel_moves_bodies_as_the_compiled_equations_do(body):
    """The kernel of a GPU, emulated; walkers bring numbers of their own, since rows of a kernel may have these."""
    factors = {"body_mass": worlds.Factors([1.2] * 8)} if body == "walker" else {}
    physics, rng = planar_physics(body, factors), np.random.default_rng(1)
    qpos = (physics.rest + 0.2 * rng.normal(size=(3, 1, len(physics.rest)))).astype(np.float32)
    qvel = rng.normal(size=(3, 1, physics.velocities)).astype(np.float32)
    control = rng.uniform(-1, 1, size=physics.motors).astype(np.float32)

    def plainly(qpos, qvel):
        found = physics.advance(BodyState(qpos, qvel), control, 2)
        return jnp.concatenate([found.qpos, found.qvel])

    own = [np.asarray(x, np.float32) for x in physics.varied or ()]
    kernel = in_one_kernel(BodyEquations(body, 2), 2 * physics.velocities, interpret=True)
    found = jax.vmap(jax.vmap(lambda qpos, qvel: kernel(jnp.concatenate([qpos, qvel, control, *own]))))(qpos, qvel)
    np.testing.assert_allclose(found, jax.vmap(jax.vmap(plainly))(qpos, qvel), rtol=0, atol=1e-4)
    assert np.abs(found - np.concatenate([qpos, qvel], axis=-1)).max() > 0.1
