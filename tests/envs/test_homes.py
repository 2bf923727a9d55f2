"""Homes: the data, the battery's arithmetic by hand and against NumPy, and what happens with wrong settings."""

from importlib.resources import files

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.compilation import jit
from perfedrl.envs.homes import CHARGE, SAVE, SELF_USE, BatteryState, HomeBattery
from perfedrl.envs.homes.convert import STEP
from perfedrl.envs.homes.data import HOMES, MISMETERED, USUAL, measurements, profiles
from perfedrl.estimators import Sampled
from perfedrl.exact.battery import best_schedule
from perfedrl.policies import POLICIES
from perfedrl.simulation.evaluation import MonteCarlo
from perfedrl.types import Trajectory

NONE = np.zeros(0, np.float32)

KWH = {"load": [10543.0, 11179.3, 14657.6], "solar": [7188.9, 7025.7, 6513.3]}
"""Energies of homes 1, 12 and 17 in the CSV files."""


def home(load, solar=None, **settings) -> HomeBattery:
    """A home with these hours as its only episode; its test weeks have twice the load."""
    load = np.asarray([load], np.float32)
    solar = np.zeros_like(load) if solar is None else np.asarray([solar], np.float32)
    return HomeBattery(load, solar, 2 * load, solar, home=1.0, **settings)


@jit
def play(task, state, modes):
    """The observations, rewards and charges of one episode under given modes, as the task steps them."""

    def hour(state, mode):
        after, reward, _ = task.step(state, mode, NONE)
        return after, (task.observe(state), reward, after.charge)

    return jax.lax.scan(hour, state, modes)[1]


def start(charge: float, episode: int = 0) -> BatteryState:
    return BatteryState(jnp.int32(episode), jnp.int32(0), jnp.float32(charge))


def always(mode: int, hours: int = 24):
    return jnp.full(hours, mode, jnp.int32)


def test_a_day_computed_by_hand():
    """Round trip 0.81, so 0.9 each way; 10 kWh, 4 kW; 0.2 dollars, 0.5 from hour 3 for 2 hours; 0.1 for what is fed in.

    A kWh in the battery is worth 0.2 / 0.9. Hour 0, load 1, charge: 4 kWh are bought for 0.8 and store 3.6, worth 0.8.
    Hour 1, solar 3 beyond the load, save: the 3 would have earned 0.3 and store 2.7, worth 0.6: 0.3 are saved. Hour 2,
    load 1, save: nothing. Hour 3, load 5 at the peak, self-use: the power of 4 covers 4, which would have cost 2, and
    takes 4.444 from the store, worth 0.988. Hour 4, load 5, self-use: the rest of the store, 1.856, gives 1.67, which
    would have cost 0.835, and was worth 0.412. Hour 5, solar 1, self-use: 0.9 are stored, worth 0.2 instead of 0.1.
    """
    task = home(
        [1, 1, 1, 5, 5, 0],
        [0, 4, 0, 0, 0, 1],
        **{"efficiency": 0.81, "capacity": 10.0, "power": 4.0, "base_price": 0.2, "peak_price": 0.5},
        **{"feed_in": 0.1, "peak_start": 3.0, "peak_hours": 2.0},
    )
    modes = jnp.asarray([CHARGE, SAVE, SAVE, SELF_USE, SELF_USE, SELF_USE], jnp.int32)
    obs, reward, charge = play(task, start(0.0), modes)
    np.testing.assert_allclose(charge, [3.6, 6.3, 6.3, 6.3 - 4 / 0.9, 0, 0.9], atol=1e-5)
    rest = 6.3 - 4 / 0.9
    expected = [0, 0.3, 0, 2 - 4 / 0.9 * 0.2 / 0.9, rest * (0.9 * 0.5 - 0.2 / 0.9), 0.1]
    np.testing.assert_allclose(reward, expected, atol=1e-5)
    np.testing.assert_allclose(obs[:, 24], [-1, -0.28, 0.26, 0.26, 2 * rest / 10 - 1, -1], atol=1e-5)
    np.testing.assert_allclose(obs[:, 25], [0.5, 0.5, 0.5, 2.5, 2.5, 0], atol=1e-6)
    np.testing.assert_allclose(obs[:, 26], [0, 2, 0, 0, 0, 0.5], atol=1e-6)
    np.testing.assert_array_equal(obs[:, :24], np.eye(24)[:6])
    found = {name: float(x) for name, x in task.outcomes(Trajectory(obs, modes, reward, jnp.ones(6))).items()}
    bill = 0.2 * 5 + 0 + 0.2 * 1 + 0.5 * 1 + 0.5 * (5 - 0.9 * rest) + 0
    assert found == pytest.approx(
        {"savings": sum(expected) * 4, "bill": bill * 4, "solar_used": 1.0, "peak_import": 5.0}, abs=1e-4
    )
    kept = play(task, start(10.0), always(SAVE, 6))
    shares = task.outcomes(Trajectory(kept[0], always(SAVE, 6), kept[1], jnp.ones(6)))
    assert float(shares["solar_used"]) == pytest.approx(1 - 4 / 5), "a full battery feeds in what the home does not use"


def test_energy_is_balanced_and_the_battery_keeps_its_limits():
    """Against a NumPy version of the hours, under random modes."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        load, solar = rng.uniform(0, 4, (2, 24)) * (rng.uniform(size=(2, 24)) < 0.7)
        own = {"capacity": rng.uniform(1, 12), "power": rng.uniform(0.5, 5), "efficiency": rng.uniform(0.5, 1)}
        own |= {"feed_in": rng.uniform(0, 0.15), "peak_start": float(rng.integers(24)), "peak_hours": 5.0}
        task = home(load, solar, **own)
        charge, modes = rng.uniform(0, own["capacity"]), rng.integers(0, 3, 24)
        _, reward, charges = play(task, start(charge), jnp.asarray(modes, jnp.int32))
        before, one_way = charge, np.sqrt(own["efficiency"])
        for h in range(24):
            lacking = load[h] - solar[h]
            put = own["power"] if modes[h] == CHARGE else max(-lacking, 0)
            put = min(put, own["power"], (own["capacity"] - charge) / one_way)
            taken = min(max(lacking, 0), own["power"], one_way * charge) if modes[h] == SELF_USE else 0
            charge += one_way * put - taken / one_way
            price = 0.45 if (h - own["peak_start"]) % 24 < 5 else 0.15
            costs = [max(x, 0) * price + min(x, 0) * own["feed_in"] for x in (lacking, lacking + put - taken)]
            np.testing.assert_allclose(charges[h], charge, atol=1e-4)
            value = 0.15 / one_way * (charge - before)
            np.testing.assert_allclose(reward[h], costs[0] - costs[1] + value, atol=1e-4)
            before = charge
        assert (np.asarray(charges) >= -1e-5).all()
        assert (np.asarray(charges) <= own["capacity"] + 1e-5).all()


def test_nothing_is_gained_by_emptying_or_filling_the_battery_at_the_base_price():
    """Filling at the base price changes nothing; taking it out again loses what the battery loses."""
    task = home(np.full(24, 2.0), peak_hours=0.0)
    np.testing.assert_allclose(play(task, start(0.0), always(CHARGE))[1], 0, atol=1e-6)
    np.testing.assert_allclose(play(task, start(3.0), always(SAVE))[1], 0, atol=1e-6)
    emptied = play(task, start(6.4), always(SELF_USE))[1]
    expected = 6.4 * (np.sqrt(0.9) * 0.15 - 0.15 / np.sqrt(0.9))
    np.testing.assert_allclose(emptied.sum(), expected, rtol=1e-4)
    assert expected < 0


@pytest.mark.parametrize("number", [1, 7, 14])
def test_the_linear_program_bounds_every_policy_and_its_schedule_reaches_the_bound(number, untyped):
    fleet = pf.homes(agents=1, held_out=0, vary={"home": {"train": [number]}}, feed_in=0.1, peak_start=8.0 + number)
    task = fleet.task(0)
    rng = np.random.default_rng(number)
    for episode in (0, 100, 200):
        charge = float(rng.uniform(0, 6.4))
        best = best_schedule(task, episode, charge)
        assert scheduled(task, episode, charge, best.metered) == pytest.approx(best.savings, abs=2e-4)
        tries = [always(SELF_USE), always(SAVE), always(CHARGE), *rng.integers(0, 3, (5, 24))]
        for modes in tries:
            saved = play(task, start(charge, episode), jnp.asarray(modes, jnp.int32))[1].sum()
            assert float(saved) <= best.savings + 1e-4


def scheduled(task, episode, charge, metered) -> float:
    """What a schedule saves by the battery's own equations."""
    total, net = 0.0, np.asarray(task.load - task.solar)[episode]
    for hour, wanted in enumerate(metered):
        flows = task.flows(jnp.float32(charge), jnp.float32(wanted))
        np.testing.assert_allclose(flows.metered, wanted, atol=1e-4)
        saved = task.cost(hour, net[hour]) - task.cost(hour, net[hour] + flows.metered)
        total += float(saved + task.stored_value * flows.stored)
        charge += float(flows.stored)
    return total


def test_no_mode_feeds_stored_energy_into_the_grid():
    task = home([1, 1, 3, 0.5], [2, 0.5, 0, 0], power=2.0)
    net = jnp.asarray(task.load - task.solar)[0]
    grid = [net + task.flows(jnp.full(4, 3.0), task.wanted(net, always(mode, 4))).metered for mode in range(3)]
    np.testing.assert_allclose(grid, [[0, 0, 1, 0], [0, 0.5, 3, 0.5], [1, 2.5, 5, 2.5]], atol=1e-6)


def test_the_data_are_those_of_the_source():
    """Sums of the CSV files over the 364 days, to the rounding of 8,736 numbers per home."""
    load, solar = measurements()
    assert load.shape == solar.shape == (17, 364, 24)
    assert len(HOMES) == 17
    assert set(USUAL) == set(HOMES) - set(MISMETERED)
    np.testing.assert_allclose(STEP * load.sum((1, 2))[[0, 11, 16]], KWH["load"], atol=2)
    np.testing.assert_allclose(STEP * solar.sum((1, 2))[[0, 11, 16]], KWH["solar"], atol=2)
    assert (solar[:, :, [0, 1, 2, 3, 22, 23]] == 0).all()
    folder = files("perfedrl.envs.homes")
    assert "MIT License" in folder.joinpath("LICENSE-CityLearn.txt").read_text()
    assert len(folder.joinpath("fontana.npz").read_bytes()) < 400_000


@pytest.mark.parametrize("days", [1, 2, 7])
def test_weeks_for_learning_and_for_tests_have_no_day_in_common(days):
    learned, tested = (profiles(3, days, test) for test in (False, True))
    assert learned.load.shape == learned.solar.shape == (39 * (8 - days), 24 * days)
    assert tested.load.shape == (13 * (8 - days), 24 * days)
    first, second = ({x.tobytes() for x in part.load.reshape(-1, 24)} for part in (learned, tested))
    assert len(first) == 273
    assert len(second) == 91
    assert not first & second
    two = profiles(3, 2, test=False)
    whole = (STEP * measurements()[0][2]).astype(np.float32)
    np.testing.assert_array_equal(two.load[6], whole[7:9].ravel())


def test_agents_are_measured_on_other_days_than_they_learn_from():
    task = home(np.ones(24))
    fleet = pf.envs.fleet([task])
    policy = POLICIES["mlp"](fleet)
    params, key = policy.init(jax.random.key(0)), jax.random.key(1)
    evaluation = MonteCarlo(Sampled(policy), episodes=3)
    learned = evaluation.objective(task).sampler.sample(params, key, 3)
    measured = evaluation.sample(task, params, key, 3)
    np.testing.assert_allclose(learned.obs[..., 25], 1 / 2)
    np.testing.assert_allclose(measured.obs[..., 25], 2 / 2)
    np.testing.assert_allclose(
        evaluation.outcomes(task, params, key)["savings"], measured.reward.sum(1).mean(), rtol=1e-4
    )


def test_homes_that_see_their_tariff_are_measured_on_the_test_weeks_too():
    fleet = pf.policies.sighted(pf.homes(agents=2, held_out=0, vary=["home", "peak_start"]), ["peak_start"])
    task = fleet.task(0)
    np.testing.assert_array_equal(task.measured_on.task.load, task.task.test_load)
    np.testing.assert_array_equal(task.measured_on.observe(start(1.0))[-1:], np.asarray(task.seen, np.float32))


def test_held_out_homes_are_homes_that_do_not_train():
    fleet = pf.homes()
    train, unseen = (set(np.asarray(part.home).tolist()) for part in (fleet.train, fleet.held_out))
    assert (fleet.agents, fleet.held_out_agents, len(train), len(unseen)) == (22, 8, 11, 4)
    assert train | unseen == set(USUAL)
    assert not train & unseen
    few = pf.homes(agents=3, held_out=2, vary=["home"])
    assert len({*np.asarray(few.train.home).tolist(), *np.asarray(few.held_out.home).tolist()}) == 5


def test_a_new_home_takes_the_measurements_of_its_number():
    fleet = pf.homes(agents=2, held_out=1, vary=["home"])
    task = fleet.new_agents.task(fleet, {"home": 12, "peak_start": 9}, 0)
    np.testing.assert_array_equal(task.load, profiles(12, 1, test=False).load)
    assert (task.peak_start, task.capacity) == (9.0, 6.4)


MISTAKES = [
    ({"home": 18, "vary": {"capacity": [5, 9]}}, "there is no home 18: the homes are 1 to 17"),
    ({"vary": {"home": {"train": [1, 2.5]}}, "agents": 2, "held_out": 0}, "there is no home 2.5"),
    ({"vary": {"home": {"list": ["a", "b"]}}, "agents": 2, "held_out": 0}, "home must be a number"),
    ({"days": 8}, "days must be a whole number from 1 to 7"),
    ({"days": 0}, "days must be a whole number from 1 to 7"),
    ({"capacity": 0.0}, "capacity must be a number > 0; it is 0.0"),
    ({"power": float("nan")}, "power must be a number > 0"),
    ({"efficiency": 1.2}, "efficiency must be a number > 0 and <= 1"),
    ({"feed_in": 0.3}, "feed_in must be from 0 to base_price"),
    ({"peak_price": 0.1}, "peak_price must be at least base_price"),
    ({"peak_start": 24.0}, "peak_start must be an hour of the day"),
    ({"peak_hours": -1.0}, "peak_hours must be from 0 to 24"),
    ({"vary": "tariff"}, "no usual range is known of 'tariff'"),
    ({"agents": 15, "vary": ["home"]}, "held_out asks for 8 agents unlike all others"),
]


@pytest.mark.parametrize(("settings", "words"), MISTAKES)
def test_mistakes_are_one_sentence(settings, words):
    with pytest.raises(pf.UserError) as caught:
        pf.homes(**settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
