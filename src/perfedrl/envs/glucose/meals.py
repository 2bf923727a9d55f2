"""A day's meals: three and snacks, at jittered times, in sizes by body weight."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr
from jaxtyping import Float

from perfedrl.envs.inverse_transform import standard_normal
from perfedrl.types import Array, Noise


class Occasion(NamedTuple):
    """An occasion to eat: how often it is taken, when, and how much a person of 70 kg then eats."""

    probability: float
    earliest: float
    """Hours after midnight, as the next three."""
    usual: float
    latest: float
    spread: float
    """Standard deviation of the time, before it is limited."""
    grams: float
    grams_spread: float


OCCASIONS = (
    Occasion(0.95, 5, 7, 9, 1.0, 45, 10),
    Occasion(0.3, 9, 9.5, 10, 0.5, 10, 5),
    Occasion(0.95, 10, 12, 14, 1.0, 70, 10),
    Occasion(0.3, 14, 15, 16, 0.5, 10, 5),
    Occasion(0.95, 16, 18, 20, 1.0, 80, 10),
    Occasion(0.3, 20, 21.5, 23, 0.5, 10, 5),
)
"""The random scenario of simglucose 0.2.11, for 70 kg."""

NOISE = 3 * len(OCCASIONS)
"""Uniforms that a day's meals take: three for each occasion."""

ADULT = 70.0
"""Body weight (kg) for which the sizes of `OCCASIONS` are."""

APPETITE = 0.75
"""Meals grow with this power of body weight, as the metabolic rate does (Kleiber)."""


class Meals(NamedTuple):
    """The meals of a day: the minutes after midnight at which they begin, and their carbohydrate in mg."""

    minute: Float[Array, " k"]
    carbohydrate: Float[Array, " k"]


def draw_meals(u: Noise, weight: Float[Array, ""]) -> Meals:
    """Draw the meals of a day; one that is not taken has no carbohydrate."""
    taken, when, size = u.reshape(3, len(OCCASIONS))
    at = Occasion(*np.array(OCCASIONS, np.float32).T)
    low, high = ndtr((at.earliest - at.usual) / at.spread), ndtr((at.latest - at.usual) / at.spread)
    hour = at.usual + at.spread * standard_normal(low + (high - low) * when)
    grams = jnp.maximum(at.grams + at.grams_spread * standard_normal(size), 0.0) * appetite(weight)
    return Meals(
        jnp.floor(60 * hour).astype(u.dtype), jnp.where(taken < at.probability, 1000 * grams, 0.0).astype(u.dtype)
    )


def appetite(weight: Float[Array, ""]) -> Float[Array, ""]:
    """Return the size of meals at a body weight, relative to that of an adult of 70 kg."""
    return (weight / ADULT) ** APPETITE


def starting(meals: Meals, minute: Float[Array, ""], minutes: float) -> Float[Array, ""]:
    """Return the carbohydrate (mg) of the meals that begin within some minutes."""
    now = (meals.minute >= minute) & (meals.minute < minute + minutes)
    return jnp.sum(jnp.where(now, meals.carbohydrate, 0.0))
