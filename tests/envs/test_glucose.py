"""Days of people with type 1 diabetes: meals, sensor, pump, observations, rewards and outcomes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.compilation import jit
from perfedrl.envs.glucose.devices import Pump, Sensor
from perfedrl.envs.glucose.meals import NOISE, OCCASIONS, draw_meals, starting
from perfedrl.envs.glucose.patients import AGE_GROUPS, HELD_OUT, patients
from perfedrl.envs.glucose.risk import RISKS, shares
from perfedrl.envs.glucose.task import REWARD_SCALE, basal_by_weight
from perfedrl.types import Trajectory


def task_of(name, **more):
    return pf.envs.glucose(patients=[name], held_out=[], **more).task(0)


def one_day(task, actions, u):
    """A day under given actions, and its true blood glucose."""

    def decide(state, given):
        action, noise = given
        after, reward, _ = task.step(state, action, noise[None])
        return after, (task.observe(state), action, reward, task.in_blood(after.body))

    state = task.reset(u[: task.reset_noise])
    _, (obs, action, reward, glucose) = jax.lax.scan(decide, state, (actions, u[task.reset_noise :]))
    return Trajectory(obs, action, reward, jnp.ones_like(reward)), glucose


several_days = jit(jax.vmap(one_day, in_axes=(None, None, 0)))


def play(task, action, days=4):
    """Some days under an action, or under one for each decision."""
    actions = jnp.broadcast_to(jnp.asarray(action, jnp.float32), (task.horizon + 1, task.action_size))
    u = jax.random.uniform(jax.random.key(0), (days, task.reset_noise + task.horizon + 1))
    return several_days(task, actions, u)


def own_basal(task):
    """The action that gives a person's own basal rate."""
    return float(np.log(task.basal / basal_by_weight(task.weight)))


def test_thirty_people_of_three_age_groups_of_whom_six_are_held_out():
    fleet = pf.envs.glucose()
    assert (fleet.agents, fleet.held_out_agents) == (24, 6)
    names = [agent["patient"] for agent in fleet.new_agents.agents]
    assert names[24:] == list(HELD_OUT)
    assert sorted(names) == sorted(patients())
    assert all(sum(name.startswith(f"{group}#") for name in names[24:]) == 2 for group in AGE_GROUPS)
    child = patients()["child#008"]
    assert (child.weight, child.carbohydrate_ratio) == (23.73405728, 15)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"patients": ["adult#011"]}, "got 'adult#011'; did you mean 'adult#01"),
        ({"patients": ["adult#001"], "held_out": ["nobody"]}, "adult#001 to adult#010, adolescent#001"),
        ({"patients": ["adult#001"], "held_out": ["adult#001"]}, "adult#001 is there more often"),
        ({"patients": ["adult#001", "adult#001"]}, "adult#001 is there more often"),
        ({"minutes": 7}, "must divide a day of 1440; they are 7"),
        ({"minutes": 0}, "must divide a day"),
        ({"dosing": "log"}, "dosing must be 'factor' or 'linear'"),
        ({"risk": "low"}, "risk must be 'magni' or 'kovatchev'; it is 'low'"),
        ({"discount": 1.0}, "discount must lie in"),
    ],
)
def test_what_does_not_exist_is_said_in_one_sentence(given, words, untyped):
    with pytest.raises(pf.UserError) as error:
        pf.envs.glucose(**given)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_meals_of_the_middle_uniforms_are_the_usual_ones():
    """A uniform of 1/2 is the median: main meals are taken, snacks are not."""
    draw = jit(draw_meals)
    meals = draw(jnp.full(NOISE, 0.5), jnp.asarray(70.0))
    np.testing.assert_allclose(meals.minute, [60 * x.usual for x in OCCASIONS], atol=1)
    np.testing.assert_allclose(meals.carbohydrate, [45_000, 0, 70_000, 0, 80_000, 0], rtol=1e-5)
    child = draw(jnp.full(NOISE, 0.5), jnp.asarray(35.0))
    np.testing.assert_allclose(child.carbohydrate, 0.5**0.75 * meals.carbohydrate, rtol=1e-5)


def test_meals_stay_within_their_hours_and_come_as_often_as_stated():
    u = jax.random.uniform(jax.random.key(0), (20_000, NOISE))
    meals = jit(jax.vmap(lambda u: draw_meals(u, jnp.asarray(70.0))))(u)
    for k, at in enumerate(OCCASIONS):
        assert meals.minute[:, k].min() >= 60 * at.earliest - 1
        assert meals.minute[:, k].max() <= 60 * at.latest
        assert np.mean(meals.carbohydrate[:, k] > 0) == pytest.approx(at.probability, abs=0.02)


def test_every_meal_is_announced_once_and_eaten():
    task = task_of("adult#003")
    u = jax.random.uniform(jax.random.key(3), (task.reset_noise,))
    meals = task.reset(u).meals
    announced = jax.vmap(lambda k: starting(meals, 300.0 + 15 * k, 15))(jnp.arange(96.0))
    assert float(jnp.sum(announced)) == pytest.approx(float(jnp.sum(meals.carbohydrate)))
    assert np.sum(announced > 0) <= len(OCCASIONS)


def test_the_sensors_noise_is_an_autoregression_of_the_stated_variance(untyped):
    sensor = Sensor()
    assert sensor.next_error(1.0, 0.0, 15) == pytest.approx(0.7)
    assert sensor.next_error(0.0, 1.0, 15) == pytest.approx(0.7), "e' = 0.7 (e + n)"
    for minutes in (5, 15):
        keeps = sensor.next_error(1.0, 0.0, minutes)
        innovation = sensor.next_error(0.0, 1.0, minutes)
        assert keeps**2 * sensor.variance + innovation**2 == pytest.approx(sensor.variance)
    assert sensor.next_error(1.0, 0.0, 5) ** 3 == pytest.approx(0.7)
    by_hand = -5.47 + 15.9574 * np.sinh((0.3 + 0.5444) / 1.6898)
    assert sensor.read(jnp.asarray(120.0), jnp.asarray(0.3)) == pytest.approx(120 + by_hand, rel=1e-5)
    assert sensor.read(jnp.asarray(5.0), jnp.asarray(-1.0)) == 39
    assert sensor.read(jnp.asarray(700.0), jnp.asarray(0.0)) == 600


def test_the_pump_rounds_and_clips_and_tells_what_it_clips():
    pump = Pump()
    basal, bolus = pump.infuse(jnp.asarray([-1.0, 0.52, 40.0]), jnp.asarray([3.33, -0.1, 99.0]))
    np.testing.assert_allclose(basal, [0.0, 0.5, 30.0], atol=1e-6)
    np.testing.assert_allclose(bolus, [3.35, 0.0, 30.0], atol=1e-5)
    refused = pump.refuses(jnp.asarray([-1.0, 1.0, 1.0, 31.0]), jnp.asarray([0.0, 0.0, -0.1, 0.0]))
    assert refused.tolist() == [True, False, True, True]


def test_published_risks_and_their_inverse():
    levels = jnp.asarray([54.0, 70.0, 180.0, 250.0])
    np.testing.assert_allclose(RISKS["magni"].of(levels), [48.3, 25.0, 3.48, 17.6], rtol=0.01)
    np.testing.assert_allclose(RISKS["kovatchev"].of(levels), [18.46, 7.755, 7.729, 22.44], rtol=1e-3)
    levels = jnp.asarray([12.0, 40.0, 69.0, 71.0, 105.0, 160.0, 181.0, 320.0, 600.0])
    for risk in RISKS.values():
        np.testing.assert_allclose(risk.glucose(risk.of(levels), levels * 1.03), levels, rtol=1e-3)
        assert np.isfinite(risk.of(jnp.asarray([-5.0, 0.0, 1e6]))).all()


def test_shares_of_time_by_hand():
    found = shares(jnp.asarray([50.0, 60.0, 70.0, 180.0, 181.0, 251.0, 100.0, 100.0]))
    expected = {"in_range": 4, "below_70": 2, "below_54": 1, "above_180": 2, "above_250": 1}
    assert {name: round(8 * float(x)) for name, x in found.items()} == expected


def test_an_action_scales_what_body_weight_suggests():
    factor, linear = task_of("adult#001"), task_of("adult#001", dosing="linear")
    grams = jnp.asarray(50.0)
    by_weight = basal_by_weight(factor.weight), 50 * 0.7 * factor.weight / 500
    np.testing.assert_allclose(factor.doses(jnp.zeros(2), grams), by_weight, rtol=1e-5)
    np.testing.assert_allclose(linear.doses(jnp.zeros(2), grams), by_weight, rtol=1e-5)
    np.testing.assert_allclose(factor.doses(jnp.log(jnp.asarray([2.0, 3.0])), grams)[1], 3 * by_weight[1], rtol=1e-5)
    expected = -by_weight[0], 4 * by_weight[1]
    np.testing.assert_allclose(linear.doses(jnp.asarray([-2.0, 3.0]), grams), expected, rtol=1e-5)


def test_negative_doses_are_clipped_to_nothing_and_counted():
    task = task_of("adolescent#002", dosing="linear")
    below, glucose = play(task, np.where(np.arange(96)[:, None] % 4 == 0, -3.0, -1.0))
    none, same = play(task, (-1.0, -1.0))
    np.testing.assert_array_equal(glucose, same)
    day = jax.tree.map(lambda x: x[0], below)
    assert task.outcomes(day)["clipped"] == pytest.approx(0.25)
    assert task.outcomes(jax.tree.map(lambda x: x[0], none))["clipped"] == 0


@pytest.mark.parametrize("minutes", [5, 15])
def test_without_meals_the_own_basal_rate_keeps_glucose_where_it_starts(minutes):
    """But for the rounding of the pump; uniforms of 0.999 mean that no meal is taken."""
    task = task_of("adult#007", minutes=minutes)
    state = task.reset(jnp.asarray([*[0.999] * NOISE, 0.5, 0.5]))
    action = jnp.asarray([own_basal(task), 0.0])
    start = task.in_blood(state.body)
    assert state.meals.carbohydrate.sum() == 0
    step = jit(lambda *given: task.step(*given))
    for _ in range(240 // minutes):
        state, reward, done = step(state, action, jnp.asarray([0.5]))
    assert not done
    assert task.in_blood(state.body) == pytest.approx(float(start), rel=0.02)
    assert reward == pytest.approx(-REWARD_SCALE * float(RISKS["magni"].of(task.in_blood(state.body))), rel=1e-4)
    assert state.minute == 300 + 240


def test_less_insulin_means_more_glucose_and_a_meal_raises_it():
    task = task_of("child#005")
    none, little, much = (play(task, (a, a))[1] for a in (-5.0, -1.0, 0.5))
    assert (none > little).all()
    assert (little[:, 8:] > much[:, 8:]).all()


def test_observations_show_what_a_pump_and_a_sensor_know():
    task = task_of("adult#002")
    episode, _ = play(task, (0.0, 0.0))
    obs = np.asarray(episode.obs[0])
    assert obs.shape == (96, 9)
    for lag in (1, 2, 3):
        np.testing.assert_array_equal(obs[lag:, lag], obs[:-lag, 0])
    np.testing.assert_allclose(obs[0, 5:7], [np.sin(2 * np.pi * 5 / 24), np.cos(2 * np.pi * 5 / 24)], atol=1e-6)
    meals = obs[:, 7] > 0
    assert 2 <= meals.sum() <= 6
    later = np.flatnonzero(meals)[0] + 1
    assert obs[later, 4] > obs[later - 1, 4], "the bolus is on board"
    assert obs[later, 8] > obs[later - 1, 8]
    np.testing.assert_allclose(obs[0, 4], 0.7 / 48 / 60 * 120 / 0.07, rtol=1e-5)


def test_without_announcement_meals_are_hidden_and_the_basal_rate_is_the_only_action():
    task = task_of("adult#002", announced=False)
    assert task.action_size == 1
    assert task.observe(task.reset(jnp.full(task.reset_noise, 0.5))).shape == (7,)
    told, _ = play(task_of("adult#002"), (0.0, -10.0))
    hidden, glucose = play(task, (0.0,))
    np.testing.assert_allclose(told.reward, hidden.reward, atol=0.02)
    assert "clipped" in task.outcomes(jax.tree.map(lambda x: x[0], hidden))
    assert glucose.max() > 250, "meals are eaten all the same"


def test_outcomes_are_those_of_the_blood_glucose_which_is_not_in_the_observations():
    """The side of the best value is taken from the sensor: shares of time are right within half a percent."""
    task = task_of("adolescent#008")
    episodes, glucose = play(task, (0.0, 1.0), days=40)
    found = jax.vmap(task.blood_glucose)(episodes)
    wrong = np.abs(np.asarray(found - glucose)) > 0.01 * np.asarray(glucose)
    assert np.mean(wrong & ((np.asarray(glucose) > 180) | (np.asarray(found) > 180))) < 0.005
    true, said = jax.vmap(shares)(glucose), jax.vmap(task.outcomes)(episodes)
    for name, x in true.items():
        np.testing.assert_allclose(np.mean(said[name]), np.mean(x), atol=0.005)
    np.testing.assert_allclose(said["risk"], np.mean(RISKS["magni"].of(glucose), axis=1), rtol=1e-4)
    np.testing.assert_allclose(np.mean(said["risk_index"]), np.mean(RISKS["kovatchev"].of(glucose)), rtol=0.02)


def test_hidden_differences_stay_hidden():
    """Two people of one weight see and are given the same; only their bodies answer differently."""
    one = task_of("adult#001")
    other = dataclasses.replace(task_of("adult#006"), weight=one.weight)
    u = jnp.full(one.reset_noise, 0.5)
    assert one.doses(jnp.ones(2), jnp.asarray(40.0)) == other.doses(jnp.ones(2), jnp.asarray(40.0))
    np.testing.assert_array_equal(one.observe(one.reset(u))[4:], other.observe(other.reset(u))[4:])
    assert (
        one.step(one.reset(u), jnp.ones(2), jnp.asarray([0.5]))[1]
        != other.step(other.reset(u), jnp.ones(2), jnp.asarray([0.5]))[1]
    )
