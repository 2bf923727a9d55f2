"""Actuators of classic control: identities of gain, lag and dead zone, and none of them where all are ideal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.envs import ENVS, Acrobot, CartPole, MountainCar, MountainCarContinuous, Pendulum
from perfedrl.envs.control.physics import ACTUATOR, NO_NOISE, constants
from perfedrl.envs.fleet import fleet
from perfedrl.estimators import Sampled
from perfedrl.experiments.config import make_config
from perfedrl.policies import POLICIES

KINDS = {
    "acrobot": Acrobot,
    "cart-pole": CartPole,
    "mountain-car": MountainCar,
    "mountain-car-continuous": MountainCarContinuous,
    "pendulum": Pendulum,
}
CONTINUOUS = ("mountain-car-continuous", "pendulum")
STEPS = 30
OWN = {"gain": -0.7, "lag": 0.07, "dead_zone": 0.2}


def some_actions(name):
    rng = np.random.default_rng(0)
    if name in CONTINUOUS:
        return rng.uniform(-2, 2, (STEPS, 1)).astype(np.float32)
    return rng.integers(0, KINDS[name].actions, STEPS)


def opposite(name, actions):
    return -actions if name in CONTINUOUS else KINDS[name].actions - 1 - actions


def play(task, actions):
    """States, observations, rewards and ends of an episode, operation by operation, so that nothing is fused."""
    state, steps = task.reset(jnp.full(task.reset_noise, 0.3, jnp.float32)), []
    for action in actions:
        state, reward, done = task.step(state, jnp.asarray(action), NO_NOISE)
        steps.append((task.body(state), task.observe(state), reward, jnp.asarray(done)))
    return [np.stack(x) for x in zip(*steps, strict=True)]


def bitwise_equal(one, other):
    return all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_an_ideal_actuator_is_bitwise_the_plain_task(name):
    kind, actions = KINDS[name], some_actions(name)
    plain, ideal = kind(), kind(has_actuator=True)
    assert not plain.has_actuator
    assert ideal.reset(jnp.zeros(ideal.reset_noise)).size == plain.reset(jnp.zeros(plain.reset_noise)).size + 1
    assert bitwise_equal(play(plain, actions), play(ideal, actions))
    for field, value in OWN.items():
        assert not bitwise_equal(play(plain, actions), play(kind(**{field: value}), actions)), field


@pytest.mark.parametrize("name", KINDS)
def test_a_gain_of_minus_one_under_opposite_actions_is_bitwise_the_plain_task(name):
    kind, actions = KINDS[name], some_actions(name)
    assert bitwise_equal(play(kind(gain=-1.0), opposite(name, actions)), play(kind(), actions))


@pytest.mark.parametrize("name", KINDS)
def test_programs_of_tasks_without_an_actuator_have_no_operation_of_one(name, monkeypatch):
    """What a plain task compiles is the same as if commands moved the body directly, so that its bits stay."""
    kind = KINDS[name]
    task, action = kind(), jnp.asarray(some_actions(name)[0])
    state = task.reset(jnp.full(task.reset_noise, 0.3))

    def program():
        return str(jax.make_jaxpr(lambda state, action: task.step(state, action, NO_NOISE))(state, action))

    plain = program()
    monkeypatch.setattr(kind, "body", lambda self, state: state)
    monkeypatch.setattr(kind, "followed", lambda self, state, command: command)
    monkeypatch.setattr(kind, "effort", lambda self, followed: followed)
    monkeypatch.setattr(kind, "moved", lambda self, body, followed: body)
    assert program() == plain
    assert " exp " not in plain


def test_a_lag_has_its_closed_form():
    """Under a constant command u the actuator has followed (1 - exp(-n dt / lag)) u after n decisions."""
    task = Pendulum(lag=0.3)
    state = task.reset(jnp.asarray([0.5, 0.5]))
    assert state.shape == (3,)
    assert state[-1] == 0
    for n in range(1, 10):
        state, *_ = task.step(state, jnp.asarray([1.5]), NO_NOISE)
        np.testing.assert_allclose(state[-1], 1.5 * (1 - np.exp(-n * 0.05 / 0.3)), rtol=1e-5)


def test_the_effort_by_hand():
    task = CartPole(gain=-2.0, dead_zone=0.3, force_mag=10.0)
    efforts = [float(task.effort(jnp.asarray(x))) for x in (-10.0, -3.0, 0.0, 2.9, 3.0, 5.0, 10.0)]
    np.testing.assert_allclose(efforts, [14, 0, 0, 0, 0, -4, -14], rtol=1e-6)


def test_the_cost_of_a_torque_is_that_of_the_one_asked_for():
    state, action = jnp.asarray([0.0, 0.0, 0.0]), jnp.asarray([3.0])
    for task in (Pendulum(gain=-0.3), Pendulum(lag=5.0), Pendulum(dead_zone=0.9)):
        np.testing.assert_allclose(task.step(state, action, NO_NOISE)[1], -0.001 * 4.0, rtol=1e-6)


@pytest.mark.parametrize("name", ["cart-pole", "mountain-car"])
def test_success_is_known_although_the_actuators_state_is_hidden(name):
    """Also of an episode whose last decision ends it, which the mask does not show: by the end of a longer one."""
    far = {"lag": 3.0, "force": 0.02, "goal_position": -0.39} if name == "mountain-car" else {}
    task = KINDS[name](**{**OWN, **far}, horizon=59)
    policy = POLICIES["mlp"](fleet([task]), hidden=(4,))
    params = policy.init(jax.random.key(0))
    batch = jax.jit(Sampled(policy)(task).sampler.sample, static_argnums=2)(params, jax.random.key(1), 8)
    lengths = np.asarray(batch.mask.sum(axis=1)).astype(int)
    cut = int(np.sort(lengths)[len(lengths) // 2 - 1])
    assert lengths.min() < cut < lengths.max() <= 60
    short = jax.tree.map(lambda x: x[:, :cut], batch)
    over = lengths <= cut
    success = np.asarray(jax.vmap(task.outcomes)(short)["success"], bool)
    np.testing.assert_array_equal(success, over if name == "mountain-car" else ~over)


def test_agents_of_both_signs_train_and_new_ones_are_made():
    made = pf.cart_pole(agents=4, held_out=2, vary=["gain", "lag"], horizon=9)
    assert made.train.has_actuator
    assert made.held_out.has_actuator
    assert sorted(np.sign(made.train.gain)) == [-1, -1, 1, 1]
    assert sorted(np.sign(made.held_out.gain)) == [-1, 1]
    task = made.new_agents.task(made, {"gain": -1.2, "lag": 0.01}, None)
    assert (task.gain, task.lag, task.has_actuator) == (-1.2, 0.01, True)
    plain = pf.cart_pole(agents=2, held_out=1)
    assert not plain.train.has_actuator
    task = plain.new_agents.task(plain, {"gain": -1.0}, 0)
    assert task.has_actuator
    assert task.observe(task.reset(jnp.zeros(4))).shape == (4,)


@pytest.mark.parametrize("name", KINDS)
def test_usual_actuators_vary_by_their_names_alone(name):
    made = ENVS[name](agents=40, held_out=10, vary=list(ACTUATOR))
    assert {x for x in constants(KINDS[name]) if np.ptp(made.train.settings[x]) > 0} == set(ACTUATOR)
    sizes = np.abs(made.train.gain)
    assert 0.5 <= sizes.min() < 0.6
    assert 1.4 < sizes.max() <= 1.5
    assert made.train.gain.sum() < sizes.sum()
    assert made.train.dead_zone.max() <= 0.3
    assert made.train.lag.max() <= 5 * np.max(made.train.interval)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"lag": -0.1}, "lag must be a finite number >= 0; it is -0.1"),
        ({"dead_zone": 1.0}, "dead_zone must be a finite number >= 0 and < 1; it is 1.0"),
        ({"dead_zone": -0.1}, "dead_zone must be a finite number >= 0 and < 1"),
        ({"gain": float("inf")}, "gain must be a finite number; it is inf"),
        ({"vary": {"gain": {"plus_minus": [-1.0, 1.0]}}}, "gain needs sizes >= 0"),
        ({"vary": {"gain": {"plus_minus": [2.0, 1.0]}}}, "low < high"),
        ({"has_actuator": True}, "no parameter 'has_actuator'"),
    ],
)
def test_invalid_actuators_are_rejected(params, words):
    with pytest.raises(pf.UserError, match=words):
        ENVS["cart-pole"](**ENVS.resolve("cart-pole", params))


def test_a_fleet_of_tasks_with_and_without_an_actuator_is_rejected():
    with pytest.raises(pf.UserError, match="agent 1 has other static fields than agent 0"):
        fleet([CartPole(), CartPole(gain=-1.0)])
    assert fleet([CartPole(has_actuator=True), CartPole(gain=-1.0)]).agents == 2


def test_a_policy_may_see_its_actuator():
    table = {
        "name": "seeing",
        "seeds": 1,
        "fleet": {"env": "pendulum", "agents": 2, "held_out": 1, "vary": ["gain", "lag"], "horizon": 5},
        "policy": {"name": "gaussian-mlp", "hidden": [4], "sees": ["gain"]},
        "algorithm": {"name": "fedavg-pg", "alpha": 0.1, "beta": 0.1, "m": 2, "local_steps": 1},
        "rounds": 1,
    }
    seen = np.asarray(make_config(table).experiment.fleet.train.seen)
    assert (np.sign(seen[:, 0]) == [-1, 1]).all() or (np.sign(seen[:, 0]) == [1, -1]).all()
