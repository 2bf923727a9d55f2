"""The body's equations against simglucose 0.2.11, whose trajectories `tests/support/simglucose_oracle.py` saved.

Tolerances are distances of blood glucose in mg/dL. They are larger for adult#006, whose stomach empties most abruptly.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from perfedrl.compilation import jit
from perfedrl.envs.glucose.model import Body, Digestion, Physiology, minute
from perfedrl.envs.glucose.patients import patients

SAVED = np.load(Path(__file__).parent / "glucose_trajectories.npz")
WHO = [str(name) for name in SAVED["names"]]
SAVED_EVERY = 15
"""Minutes between two saved states."""
GLUCOSE = Body._fields.index("plasma_glucose")


def integrate(names, meals, insulin, steps, dtype):
    """States of some people after every minute: [person, minute, 13]."""
    people = [patients()[name] for name in names]

    def day(physiology, rest, weight, meals, insulin):
        zero = jnp.zeros((), dtype)

        def one_minute(at, given):
            body, digestion = at
            grams, rate = given
            served = digestion._replace(to_eat=digestion.to_eat + 1000 * grams)
            after = minute(Physiology(*physiology), weight, body, served, rate, steps)
            return after, jnp.stack(after[0])

        return jax.lax.scan(one_minute, (Body(*rest), Digestion(zero, zero, zero)), (meals, insulin))[1]

    rows = [[x.physiology for x in people], [x.rest for x in people], [x.weight for x in people], meals, insulin]
    return np.asarray(jit(jax.vmap(day))(*(jnp.asarray(np.array(x), dtype) for x in rows)))


def distances(steps, dtype):
    """The largest distances from the saved states, by person: of blood glucose, and of all states by their largest."""
    meals, insulin, saved = ([SAVED[f"{what}{i}"] for i in range(len(WHO))] for what in ("meals", "insulin", "states"))
    found = integrate(WHO, meals, insulin, steps, dtype)[:, SAVED_EVERY - 1 :: SAVED_EVERY]
    away = np.abs(found - saved)
    glucose = away[:, :, GLUCOSE].max(axis=1) / [volume(name) for name in WHO]
    return dict(zip(WHO, glucose, strict=True)), (away / np.max(saved, axis=1, keepdims=True)).max(axis=(1, 2))


def volume(name):
    return patients()[name].physiology[Physiology._fields.index("Vg")]


def test_in_small_steps_days_are_those_of_simglucose():
    with jax.enable_x64(True):
        glucose, states = distances(6, np.float64)
    assert glucose.pop("adult#006") < 0.15
    assert max(glucose.values()) < 0.02
    assert states.max() < 5e-3


def test_steps_of_a_minute_in_single_precision_are_close_to_simglucose():
    glucose, _ = distances(1, np.float32)
    assert glucose.pop("adult#006") < 0.9
    assert max(glucose.values()) < 0.2


def test_saved_days_have_meals_pauses_and_both_sides_of_the_range():
    levels = [SAVED[f"states{i}"][:, GLUCOSE] / volume(name) for i, name in enumerate(WHO)]
    assert min(x.min() for x in levels) < 95
    assert max(x.max() for x in levels) > 290
    assert all((SAVED[f"insulin{i}"] == 0).any() and (SAVED[f"meals{i}"] > 0).sum() == 5 for i in range(len(WHO)))


def test_everybody_stays_at_rest_under_the_own_basal_rate():
    step = jit(minute)
    for person in patients().values():
        nothing = Digestion(*np.zeros(3))
        after, _ = step(Physiology(*person.physiology), person.weight, Body(*person.rest), nothing, person.basal / 60)
        np.testing.assert_allclose(np.stack(after), person.rest, rtol=1e-5, atol=1e-5)


def test_what_is_eaten_is_absorbed_or_still_inside():
    """Without meals before: eaten = stomach + gut + absorbed, at any time."""
    meals, insulin = np.zeros(600), np.zeros(600)
    meals[10] = 60
    with jax.enable_x64(True):
        (states,) = integrate(["adult#001"], [meals], [insulin], 1, np.float64)
    kabs = patients()["adult#001"].physiology[Physiology._fields.index("kabs")]
    inside = states[:, :3].sum(axis=1)
    gut = states[:, 2]
    absorbed = kabs * np.cumsum((gut + np.concatenate([[0], gut[:-1]])) / 2)
    np.testing.assert_allclose((inside + absorbed)[30:], 60_000, rtol=3e-4)
