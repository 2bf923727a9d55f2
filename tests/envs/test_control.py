"""Classic control: steps equal Gymnasium's at any physics, and agents with different bodies train in one program."""

import inspect
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulations import simulation_of
from tiers import some_slow

import perfedrl as pf
from perfedrl.envs import ENVS, Acrobot, CartPole, MountainCar, MountainCarContinuous, Pendulum
from perfedrl.envs.control.physics import ACTUATOR, constants
from perfedrl.experiments.config import load_config, make_config
from perfedrl.simulation import compiled as engine
from perfedrl.types import Trajectory

STEPS = 200


class Peer(NamedTuple):
    """A task, Gymnasium's name of the same, where episodes start, and physics unlike the defaults."""

    kind: Any
    id: str
    low: Any
    high: Any
    changed: dict[str, float]


PEERS = {
    "cart-pole": Peer(
        CartPole,
        "CartPole-v1",
        [-0.05] * 4,
        [0.05] * 4,
        {"gravity": 5.0, "masscart": 0.7, "masspole": 0.3, "length": 0.8, "tau": 0.01, "force_mag": 8.0}
        | {"theta_threshold_radians": 0.3, "x_threshold": 0.5},
    ),
    "pendulum": Peer(
        Pendulum,
        "Pendulum-v1",
        [-np.pi, -1],
        [np.pi, 1],
        {"g": 7.0, "m": 0.6, "l": 1.4, "dt": 0.04, "max_torque": 3.0, "max_speed": 5.0},
    ),
    "acrobot": Peer(
        Acrobot,
        "Acrobot-v1",
        [-0.1] * 4,
        [0.1] * 4,
        {"link_length_1": 0.7, "link_length_2": 1.3, "link_mass_1": 1.4, "link_mass_2": 0.6, "link_com_1": 0.4}
        | {"link_moi": 0.8, "torque": 1.5, "max_vel_1": 1.5, "max_vel_2": 2.0, "dt": 0.1},
    ),
    "mountain-car": Peer(
        MountainCar,
        "MountainCar-v0",
        [-0.6, 0],
        [-0.4, 0],
        {"min_position": -0.9, "max_position": 0.5, "max_speed": 0.05, "goal_position": 0.3, "goal_velocity": 0.01}
        | {"force": 0.0014, "gravity": 0.002},
    ),
    "mountain-car-continuous": Peer(
        MountainCarContinuous,
        "MountainCarContinuous-v0",
        [-0.6, 0],
        [-0.4, 0],
        {"min_position": -0.9, "max_position": 0.5, "max_speed": 0.05, "goal_position": 0.3, "goal_velocity": 0.01}
        | {"power": 0.002},
    ),
}


def told(name: str, task: Any) -> dict[str, Any]:
    """What Gymnasium must be told of a task's physics: its constants, and what Gymnasium derives from them."""
    said = {key: getattr(task, key) for key in constants(task) if key not in ACTUATOR}
    if name == "cart-pole":
        said |= {"total_mass": task.total_mass, "polemass_length": task.polemass_length}
    if name == "acrobot":
        said |= {"link_com_pos_1": task.link_com_pos_1, "link_com_pos_2": task.link_com_pos_2}
        torque, dt = said.pop("torque"), said.pop("dt")
        for key in ("gravity", "link_com_1", "link_com_2"):
            del said[key]  # written into Gymnasium's equations, and shares, which it does not know
        return {key.upper(): x for key, x in said.items()} | {"dt": dt, "AVAIL_TORQUE": [-torque, 0.0, torque]}
    if name == "mountain-car-continuous":
        del said["gravity"]
    return said


def gymnasium_episode(name: str, task: Any, actions: np.ndarray, start: np.ndarray) -> list[np.ndarray]:
    """States, observations, rewards and ends along the actions, up to the end of the episode."""
    env = gym.make(PEERS[name].id, disable_env_checker=True).unwrapped
    env.reset(seed=0)
    for key, value in told(name, task).items():
        assert hasattr(env, key), key
        setattr(env, key, value)
    env.state, steps = start.copy(), []
    for action in actions:
        obs, reward, done, *_ = env.step(action)
        steps.append((np.asarray(env.state, float), obs, reward, done))
        if done:
            break
    return [np.asarray(x) for x in zip(*steps, strict=True)]


@jax.jit
def our_episode(task: Any, actions: jax.Array, start: jax.Array):
    def step(state, action):
        state, reward, done = task.step(state, action, jnp.zeros(0))
        return state, (state, task.observe(state), reward, jnp.asarray(done))

    return jax.lax.scan(step, start, actions)[1]


@jax.jit
def our_steps(task: Any, actions: jax.Array, states: jax.Array):
    return jax.vmap(lambda state, action: task.step(state, action, jnp.zeros(0))[:2])(states, actions)


def played(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Actions and a start: at random, or pushing now here now there, which ends episodes of cars and carts late."""
    rng, swing = np.random.default_rng(seed), np.arange(STEPS)
    start = rng.uniform(PEERS[name].low, PEERS[name].high)
    actions = getattr(PEERS[name].kind, "actions", None)
    if seed == 0:
        return (rng.integers(0, actions, STEPS) if actions else rng.uniform(-4, 4, (STEPS, 1))), start
    if not actions:
        return np.where(swing // 40 % 2, 1.5, -1.5)[:, None], start
    return (swing // 40 % 2 * 2 if name == "mountain-car" else swing % actions), start


@pytest.mark.parametrize("changed", some_slow([False, True], [True]), ids=["default", "changed"])
@pytest.mark.parametrize("name", PEERS)
def test_steps_rewards_and_ends_equal_gymnasiums(name, changed, x64):
    """In double precision, as in Gymnasium: errors of single precision would grow in a chaotic system."""
    task = PEERS[name].kind(**(PEERS[name].changed if changed else {}))
    assert set(PEERS[name].changed) <= set(constants(task))
    for seed in (0, 1):
        actions, start = played(name, seed)
        theirs = gymnasium_episode(name, task, actions, start)
        ours = our_episode(task, actions, start)
        n = len(theirs[0])
        for own, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(own[:n], other, atol=1e-5)
        if name != "mountain-car-continuous":  # whose state Gymnasium rounds to single precision
            np.testing.assert_allclose(ours[0][:n], theirs[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", PEERS)
def test_a_step_in_single_precision_is_gymnasiums_rounded(name):
    task = PEERS[name].kind()
    actions, start = played(name, 0)
    states, _, rewards, _ = gymnasium_episode(name, task, actions, start)
    before = np.concatenate([start[None], states[:-1]]).astype(np.float32)
    own, reward = our_steps(task, actions[: len(states)], before)
    assert own.dtype == reward.dtype == np.float32
    np.testing.assert_allclose(own, states, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(reward, rewards, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PEERS)
def test_episodes_start_where_gymnasiums_do(name):
    task = PEERS[name].kind()
    for u, edge in ((0.0, PEERS[name].low), (1.0, PEERS[name].high)):
        np.testing.assert_allclose(task.reset(jnp.full(task.reset_noise, u)), edge, atol=1e-6)
    env = gym.make(PEERS[name].id, disable_env_checker=True).unwrapped
    for seed in range(20):
        env.reset(seed=seed)
        assert (np.asarray(PEERS[name].low) <= env.state).all()
        assert (env.state <= np.asarray(PEERS[name].high)).all()


@pytest.mark.parametrize("name", PEERS)
def test_defaults_and_observations_are_gymnasiums(name):
    env = gym.make(PEERS[name].id, disable_env_checker=True).unwrapped
    for key, value in told(name, PEERS[name].kind()).items():
        np.testing.assert_allclose(getattr(env, key), value, rtol=1e-12, err_msg=key)
    task = ENVS[name](agents=1, held_out=0).task(0)
    obs = task.observe(task.reset(jnp.full(task.reset_noise, 0.5)))
    assert obs.shape == env.observation_space.shape
    assert task.horizon + 1 <= gym.spec(PEERS[name].id).max_episode_steps


def test_a_fallen_pole_stays_where_it_fell():
    state = jnp.asarray([0.0, 3.0, 0.3, 5.0])
    after, _, done = CartPole().step(state, jnp.asarray(1), jnp.zeros(0))
    np.testing.assert_array_equal(after, state)
    assert done


def test_a_car_must_be_fast_enough_at_the_goal():
    arrives = lambda speed: MountainCar(goal_velocity=0.03).step(  # noqa: E731
        jnp.asarray([0.49, speed]), jnp.asarray(2), jnp.zeros(0)
    )
    assert [bool(arrives(speed)[2]) for speed in (0.02, 0.04)] == [False, True]


def test_the_center_of_mass_scales_with_the_length_of_the_link():
    """Derived constants are properties: they cannot lie when an agent's body is changed."""
    assert Acrobot(link_length_1=0.6).link_com_pos_1 == 0.3
    assert CartPole(masspole=0.5, length=2.0).polemass_length == 1.0
    assert CartPole(masspole=0.5).total_mass == 1.5


def episode_of(obs: Any, action: Any, reward: Any, mask: Any) -> Trajectory:
    return Trajectory(*(jnp.asarray(x) for x in (obs, action)), *(jnp.asarray(x, jnp.float32) for x in (reward, mask)))


def test_outcomes_of_episodes_by_hand():
    stands, falls = jnp.zeros(4), jnp.asarray([0.0, 0.0, 0.2, 5.0])
    last = lambda obs, mask: episode_of(jnp.stack([stands, obs]), [0, 1], [1, mask], [1, mask])  # noqa: E731
    said = [CartPole().outcomes(last(*how)) for how in ((stands, 1), (falls, 1), (stands, 0))]
    assert [(float(x["score"]), float(x["success"])) for x in said] == [(2, 1), (2, 0), (1, 0)]
    below, near = jnp.asarray([-0.5, 0.0]), jnp.asarray([0.49, 0.05])
    ride = lambda obs, mask: episode_of(jnp.stack([below, obs]), [0, 2], [-1, -mask], [1, mask])  # noqa: E731
    said = [MountainCar().outcomes(ride(*how)) for how in ((below, 1), (near, 1), (below, 0))]
    assert [(float(x["score"]), float(x["success"])) for x in said] == [(-2, 0), (-2, 1), (-1, 1)]
    swing = lambda reward, mask: episode_of(jnp.zeros((2, 6)), [0, 0], reward, mask)  # noqa: E731
    said = [Acrobot().outcomes(swing(*how)) for how in (([-1, -1], [1, 1]), ([-1, 0], [1, 1]), ([0, 0], [1, 0]))]
    assert [float(x["success"]) for x in said] == [0, 1, 1]
    angles = jnp.asarray([0.0, 0.2, 0.3, np.pi])
    obs = jnp.stack([jnp.cos(angles), jnp.sin(angles), 0 * angles], axis=-1)
    assert Pendulum().outcomes(episode_of(obs, jnp.zeros((4, 1)), -angles, jnp.ones(4)))["upright"] == 0.5


@pytest.mark.parametrize("name", PEERS)
def test_a_sketch_draws_an_agents_own_body(name):
    task = ENVS[name]().task(0)
    lines = task.sketch(np.asarray(task.observe(task.reset(jnp.full(task.reset_noise, 0.5)))))
    assert all(line.ndim == 2 and line.shape[1] == 2 and np.isfinite(line).all() for line in lines)
    long = {"cart-pole": ("length", 2.0), "pendulum": ("l", 1.0), "acrobot": ("link_length_2", 1.0)}
    if name in long:
        field, factor = long[name]
        rod = np.linalg.norm(np.diff(lines[-1], axis=0))
        np.testing.assert_allclose(rod, factor * getattr(task, field), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("cart-pole", {"length": 0.0}, ["length", "> 0", "0.0"]),
        ("cart-pole", {"vary": {"length": [-0.2, -0.1]}}, ["length", "> 0"]),
        ("cart-pole", {"vary": {"length": {"list": ["a", "b", "c", "d", "e"]}}, "agents": 2}, ["length", "number"]),
        ("cart-pole", {"vary": "lenght"}, ["lenght", "'length'"]),
        ("cart-pole", {"vary": {"weight": [1, 2]}}, ["no parameter 'weight'"]),
        ("cart-pole", {"mass": 1.0}, ["no parameter 'mass'"]),
        ("cart-pole", {"gravity": "9.8"}, ["gravity", "number"]),
        ("cart-pole", {"vary": 3}, ["vary"]),
        ("pendulum", {"m": float("inf")}, ["m must be", "inf"]),
        ("pendulum", {"horizon": -1}, ["horizon", "-1"]),
        ("acrobot", {"discount": 1.0}, ["discount", "1.0"]),
        ("mountain-car", {"goal_position": 0.7}, ["goal_position", "0.7"]),
        ("mountain-car-continuous", {"vary": {"min_position": [-0.5, -0.3]}}, ["min_position"]),
    ],
)
def test_invalid_physical_constants_are_rejected(name, params, words):
    with pytest.raises(pf.UserError) as error:
        ENVS[name](**ENVS.resolve(name, params))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("vary", "names"),
    [
        ("length", {"length"}),
        (["length", "gravity"], {"length", "gravity"}),
        ({"masspole": {"list": [1, 2, 3, 4, 5, 6]}, "tau": [0.01, 0.03]}, {"masspole", "tau"}),
        ({"masscart": {"train": [1.0, 2.0, 3.0, 4.0], "held_out": [5.0, 6.0]}}, {"masscart"}),
    ],
)
def test_a_config_states_the_varying_constants_by_name_by_names_or_in_a_table(vary, names, tmp_path):
    table = {
        "name": "poles",
        "seeds": 1,
        "fleet": {"env": "cart-pole", "agents": 4, "held_out": 2, "vary": vary},
        "policy": {"name": "mlp"},
        "algorithm": {"name": "fedavg-pg", "alpha": 0.1, "beta": 0.1, "m": 2, "local_steps": 1},
        "rounds": 1,
    }
    config = make_config(table)
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert load_config(tmp_path / "config.toml").digest == config.digest
    poles = config.experiment.fleet.train
    assert {key for key in constants(CartPole) if len(set(getattr(poles, key))) > 1} == names
    assert poles.masspole.dtype == float


def test_usual_ranges_are_those_of_the_literature_and_scale_with_the_given_value():
    poles = ENVS["cart-pole"](agents=500, held_out=0).train.length
    assert 0.1 <= poles.min() < 0.11 < 0.89 < poles.max() <= 0.9
    rods = ENVS["pendulum"](agents=500, held_out=0, l=2.0).train.l
    assert 1.0 <= rods.min() < 1.05 < 2.95 < rods.max() <= 3.0


def test_parameters_of_a_family_are_the_constants_of_its_task():
    for name, peer in PEERS.items():
        named = inspect.signature(ENVS[name]).parameters
        assert list(named)[:6] == ["agents", "held_out", "seed", "vary", "horizon", "discount"]
        assert list(named)[6:] == constants(peer.kind)
    with pytest.raises(TypeError, match="weight"):
        ENVS["cart-pole"](weight=1.0)


@pytest.mark.slow
def test_a_thousand_poles_of_different_lengths_train_in_one_compiled_call():
    jax.clear_caches()
    fleet = ENVS["cart-pole"](agents=1000, held_out=0, horizon=9)
    assert len(set(fleet.train.length)) == 1000
    algorithm = pf.PerFedAvgPG(0.1, 0.1, 1, 2, 0, 2, variant="first-order")
    simulation = simulation_of(fleet, pf.MLPSoftmax((4, 4, 2)), [algorithm], [0])
    begin, before = simulation.start(), engine.advance_replicas.compilations()
    end = simulation.advance(simulation.advance(begin, 0, 1), 1, 1)
    assert engine.advance_replicas.compilations() == before + 1
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), begin.server.message, end.server.message)
    assert all(0 < x < np.inf for x in jax.tree.leaves(moved))
