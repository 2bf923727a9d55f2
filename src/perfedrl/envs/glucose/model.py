"""Glucose and insulin in the body of a person with type 1 diabetes: the UVA/Padova model of 2008.

Equations of Dalla Man, Rizza and Cobelli (IEEE Transactions on Biomedical Engineering 54:1740, 2007), in which a pump
under the skin takes the place of the pancreas (Kovatchev et al., J. of Diabetes Science and Technology 3:44, 2009).
Names of parameters are those of the papers and of the patients' table. Times are in minutes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.types import Array

Scalar = Float[Array, ""]

STEPS = 1
"""Steps of the integration in a minute; `tests/envs/test_glucose_model.py` bounds their error."""

PMOL_PER_UNIT = 6000.0
"""Picomoles in a unit of insulin."""

EATING_RATE = 5000.0
"""Milligrams of carbohydrate that a person eats in a minute."""


class Physiology(NamedTuple):
    """The parameters of one person, in the units of the papers."""

    kabs: Scalar
    kmax: Scalar
    kmin: Scalar
    b: Scalar
    d: Scalar
    f: Scalar
    Vg: Scalar
    k1: Scalar
    k2: Scalar
    Fsnc: Scalar
    Vm0: Scalar
    Vmx: Scalar
    Km0: Scalar
    p2u: Scalar
    ke1: Scalar
    ke2: Scalar
    kp1: Scalar
    kp2: Scalar
    kp3: Scalar
    ki: Scalar
    Ib: Scalar
    Vi: Scalar
    m1: Scalar
    m2: Scalar
    m4: Scalar
    m30: Scalar
    ka1: Scalar
    ka2: Scalar
    kd: Scalar
    ksc: Scalar


class Body(NamedTuple):
    """The thirteen states of the model."""

    solid: Scalar
    """Carbohydrate in the stomach, solid (mg)."""
    liquid: Scalar
    """Carbohydrate in the stomach, liquid (mg)."""
    gut: Scalar
    """Carbohydrate in the intestine (mg)."""
    plasma_glucose: Scalar
    """Glucose in plasma and tissues in fast exchange with it (mg/kg)."""
    tissue_glucose: Scalar
    """Glucose in tissues in slow exchange (mg/kg)."""
    plasma_insulin: Scalar
    """Insulin in plasma (pmol/kg)."""
    action_on_use: Scalar
    """Delayed effect of insulin on the use of glucose, above its basal level (pmol/l)."""
    delayed_insulin: Scalar
    """The first of two stages by which insulin acts on the liver (pmol/l)."""
    action_on_liver: Scalar
    """The second stage (pmol/l)."""
    liver_insulin: Scalar
    """Insulin in the liver (pmol/kg)."""
    depot: Scalar
    """Insulin below the skin as it is infused (pmol/kg)."""
    dissolved_depot: Scalar
    """Insulin below the skin, dissolved (pmol/kg)."""
    skin_glucose: Scalar
    """Glucose below the skin, where the sensor is (mg/kg)."""


class Digestion(NamedTuple):
    """What the emptying of the stomach depends on, beside its content."""

    meal: Scalar
    """Content of the stomach at the start of the last meal, and what was eaten of it (mg)."""
    eating: Scalar
    """1 while a meal is eaten, otherwise 0."""
    to_eat: Scalar
    """What is left on the plate (mg)."""


def emptying(p: Physiology, content: Scalar, meal: Scalar) -> Scalar:
    """Return the rate at which the stomach empties: slower while between the shares d and b of the meal are left."""
    known = jnp.maximum(meal, 1.0)  # in milligrams; without a meal the rate is kmax
    falling = jnp.tanh(2.5 / (known * (1 - p.b)) * (content - p.b * known))
    rising = jnp.tanh(2.5 / (known * p.d) * (content - p.d * known))
    return jnp.where(meal > 0, p.kmin + (p.kmax - p.kmin) / 2 * (falling - rising + 2), p.kmax)


def derivative(p: Physiology, weight: Scalar, body: Body, meal: Scalar, eaten: Scalar, insulin: Scalar) -> Body:
    """Return the change of the states per minute, under meals in mg/min and insulin in pmol/kg/min."""
    x = body
    leaves_stomach = emptying(p, x.solid + x.liquid, meal) * x.liquid
    appears = p.f * p.kabs * x.gut / weight
    produced = jnp.maximum(p.kp1 - p.kp2 * x.plasma_glucose - p.kp3 * x.action_on_liver, 0.0)
    excreted = p.ke1 * jnp.maximum(x.plasma_glucose - p.ke2, 0.0)
    exchanged = p.k1 * x.plasma_glucose - p.k2 * x.tissue_glucose
    used = (p.Vm0 + p.Vmx * x.action_on_use) * x.tissue_glucose / (p.Km0 + x.tissue_glucose)
    concentration = x.plasma_insulin / p.Vi
    absorbed = p.ka1 * x.depot + p.ka2 * x.dissolved_depot
    # Glucose below zero, which only absurd doses reach, stays as it is.
    return Body(
        solid=eaten - p.kmax * x.solid,
        liquid=p.kmax * x.solid - leaves_stomach,
        gut=leaves_stomach - p.kabs * x.gut,
        plasma_glucose=jnp.where(x.plasma_glucose >= 0, produced + appears - p.Fsnc - excreted - exchanged, 0.0),
        tissue_glucose=jnp.where(x.tissue_glucose >= 0, exchanged - used, 0.0),
        plasma_insulin=absorbed + p.m1 * x.liver_insulin - (p.m2 + p.m4) * x.plasma_insulin,
        action_on_use=p.p2u * (concentration - p.Ib - x.action_on_use),
        delayed_insulin=p.ki * (concentration - x.delayed_insulin),
        action_on_liver=p.ki * (x.delayed_insulin - x.action_on_liver),
        liver_insulin=p.m2 * x.plasma_insulin - (p.m1 + p.m30) * x.liver_insulin,
        depot=insulin - (p.ka1 + p.kd) * x.depot,
        dissolved_depot=p.kd * x.depot - p.ka2 * x.dissolved_depot,
        skin_glucose=jnp.where(x.skin_glucose >= 0, p.ksc * (x.plasma_glucose - x.skin_glucose), 0.0),
    )


def eat(digestion: Digestion, body: Body) -> tuple[Digestion, Scalar]:
    """Return what digestion depends on in a minute, and the milligrams eaten in it."""
    eaten = jnp.minimum(digestion.to_eat, EATING_RATE)
    eating = (eaten > 0).astype(eaten.dtype)
    begins = (eating > 0) & (digestion.eating == 0)
    before = jnp.where(begins, body.solid + body.liquid, digestion.meal)
    return Digestion(before + eaten, eating, digestion.to_eat - eaten), eaten


def minute(
    p: Physiology, weight: Scalar, body: Body, digestion: Digestion, insulin: Scalar, steps: int = STEPS
) -> tuple[Body, Digestion]:
    """Integrate a minute by the midpoint method; `insulin` is a rate in U/min."""
    digestion, eaten = eat(digestion, body)
    infused = insulin * PMOL_PER_UNIT / weight
    for _ in range(steps):
        middle = along(body, derivative(p, weight, body, digestion.meal, eaten, infused), 0.5 / steps)
        body = along(body, derivative(p, weight, middle, digestion.meal, eaten, infused), 1.0 / steps)
    return body, digestion


def along(body: Body, change: Body, minutes: float) -> Body:
    """Return the states after some minutes of constant change."""
    return jax.tree.map(lambda x, dx: x + minutes * dx, body, change)
