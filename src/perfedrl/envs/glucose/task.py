"""A day of one person with type 1 diabetes: a pump is told how much insulin to give, from what a sensor shows.

A simulator for research; nothing in it is medical advice.
"""

import math
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.envs.base import Task, check_episode
from perfedrl.envs.glucose.devices import Pump, Sensor
from perfedrl.envs.glucose.meals import NOISE, Meals, appetite, draw_meals, starting
from perfedrl.envs.glucose.model import Body, Digestion, Physiology, minute
from perfedrl.envs.glucose.risk import RISKS, shares
from perfedrl.envs.inverse_transform import standard_normal
from perfedrl.errors import UserError
from perfedrl.types import Array, Noise, Trajectory

Scalar = Float[Array, ""]
Dosing = Literal["factor", "linear"]
RiskName = Literal["magni", "kovatchev"]

DAY = 1440
"""Minutes of an episode."""

MORNING = 300.0
"""An episode begins at five o'clock, before the earliest breakfast, so that it ends with the night after dinner."""

READINGS = 4
"""Readings of the sensor in an observation, at the last decisions."""

TYPICAL, UNIT = 140.0, 60.0
"""Observations show readings of the sensor less the first, in units of the second (mg/dL)."""

PORTION = 50_000.0
"""Announced carbohydrate is in units of this, for a person of 70 kg (mg)."""

MEAL = READINGS + 3
"""Where observations have the carbohydrate of the meal that begins."""

DAILY_INSULIN = 0.7
"""Units of insulin that a person is supposed to need in a day, per kg; half of it as basal rate."""

RULE_OF_500 = 500.0
"""A unit of insulin is supposed to cover this many grams of carbohydrate, divided by the daily insulin."""

INSULIN_STAYS, CARBOHYDRATE_STAYS = 120.0, 60.0
"""Minutes after which insulin and announced carbohydrate on board have fallen to 1/e in observations."""

START_SPREAD = 0.1
"""Standard deviation of the glucose at the start, relative to that at rest."""

REWARD_SCALE = 0.01
"""A reward is minus the risk times this."""


class DayState(NamedTuple):
    """The state of a day between two decisions."""

    body: Body
    digestion: Digestion
    meals: Meals
    minute: Scalar
    """Minutes after midnight."""
    error: Scalar
    """The autoregression of the sensor's noise."""
    readings: Float[Array, " readings"]
    """The sensor's last numbers (mg/dL), the newest first."""
    insulin: Scalar
    """Insulin on board (U), as the pump counts it."""
    carbohydrate: Scalar
    """Announced carbohydrate on board (mg)."""


class GlucoseDay(Task):
    """One person's days; a decision is a basal rate and, with `announced` meals, a bolus for the meal that begins.

    Both are relative to what body weight alone suggests, which is all that a clinic knows of a new patient here: an
    action a gives e^a times as much (`dosing = "factor"`), or 1 + a times (`"linear"`, where doses may be negative).
    The pump clips doses to its limits. The reward is minus the risk of the blood glucose at the end of the interval.
    """

    weight: Any
    basal: Any
    carbohydrate_ratio: Any
    correction_factor: Any
    physiology: Any
    rest: Any
    minutes: int = eqx.field(static=True, default=15)
    announced: bool = eqx.field(static=True, default=True)
    dosing: Dosing = eqx.field(static=True, default="factor")
    risk: RiskName = eqx.field(static=True, default="magni")
    discount: float = eqx.field(static=True, default=0.99)
    sensor: Sensor = eqx.field(static=True, default=Sensor())
    pump: Pump = eqx.field(static=True, default=Pump())

    reset_noise = NOISE + 2
    step_noise = 1

    def __check_init__(self) -> None:
        if not isinstance(self.minutes, int) or self.minutes < 1 or DAY % self.minutes:
            raise UserError(f"minutes between decisions must divide a day of {DAY}; they are {self.minutes}")
        if self.dosing not in ("factor", "linear"):
            raise UserError(f"dosing must be 'factor' or 'linear'; it is {self.dosing!r}")
        if self.risk not in RISKS:
            raise UserError(f"risk must be {' or '.join(map(repr, RISKS))}; it is {self.risk!r}")
        check_episode(self.horizon, self.discount)

    @property
    def horizon(self) -> int:
        return DAY // self.minutes - 1

    @property
    def action_size(self) -> int:
        return 2 if self.announced else 1

    def reset(self, u: Noise) -> DayState:
        weight = jnp.asarray(self.weight, u.dtype)
        normal = standard_normal(u[NOISE:])
        body = Body(*jnp.asarray(self.rest, u.dtype))
        factor = 1 + START_SPREAD * jnp.clip(normal[0], -3, 3)
        glucose = {"plasma_glucose", "tissue_glucose", "skin_glucose"}
        body = Body(*(x * factor if name in glucose else x for name, x in zip(Body._fields, body, strict=True)))
        zero = jnp.zeros((), u.dtype)
        error = self.sensor.variance**0.5 * normal[1]
        reading = self.sensor.read(self.below_skin(body), error)
        return DayState(
            body=body,
            digestion=Digestion(zero, zero, zero),
            meals=draw_meals(u[:NOISE], weight),
            minute=jnp.asarray(MORNING, u.dtype),
            error=error,
            readings=jnp.repeat(reading, READINGS),
            insulin=basal_by_weight(weight) / 60 * INSULIN_STAYS,
            carbohydrate=zero,
        )

    def observe(self, state: DayState) -> Float[Array, " k"]:
        """Readings, insulin on board, time of day, and the carbohydrate of the meal that begins and of earlier ones."""
        weight = jnp.asarray(self.weight, state.minute.dtype)
        angle = 2 * np.pi / DAY * state.minute
        seen = [
            *((state.readings - TYPICAL) / UNIT),
            state.insulin / (DAILY_INSULIN / 10 * weight),
            jnp.sin(angle),
            jnp.cos(angle),
        ]
        if self.announced:
            portion = PORTION * appetite(weight)
            seen += [self.begins(state) / portion, state.carbohydrate / portion]
        return jnp.stack(seen)

    def announced_grams(self, obs: Float[Array, "*T k"]) -> Float[Array, "*T"]:
        """Read the announced carbohydrate (g) of the meal that begins from an observation."""
        portion = PORTION / 1000 * appetite(jnp.asarray(self.weight, obs.dtype))
        return portion * obs[..., MEAL] if self.announced else jnp.zeros_like(obs[..., 0])

    def reading(self, obs: Float[Array, "*T k"]) -> Float[Array, "*T"]:
        """Read the sensor's last number (mg/dL) from an observation."""
        return TYPICAL + UNIT * obs[..., 0]

    def begins(self, state: DayState) -> Scalar:
        """The carbohydrate (mg) of the meals that begin before the next decision."""
        return starting(state.meals, state.minute, self.minutes)

    def doses(self, action: Float[Array, "*T k"], grams: Float[Array, "*T"]) -> tuple[Any, Any]:
        """Return the basal rate (U/h) and the bolus (U) that an action asks the pump for."""
        weight = jnp.asarray(self.weight, action.dtype)
        amount = jnp.exp(jnp.clip(action, -10, 10)) if self.dosing == "factor" else 1 + action
        basal = basal_by_weight(weight) * amount[..., 0]
        bolus = grams * DAILY_INSULIN * weight / RULE_OF_500 * amount[..., 1] if self.announced else 0.0 * basal
        return basal, bolus

    def step(self, state: DayState, action: Float[Array, " k"], u: Noise) -> tuple[DayState, Scalar, bool]:
        carbohydrate = self.begins(state)
        basal, bolus = self.pump.infuse(*self.doses(action.astype(u.dtype), carbohydrate / 1000))
        rate = basal / 60 + bolus / self.minutes
        weight = jnp.asarray(self.weight, u.dtype)
        person = Physiology(*jnp.asarray(self.physiology, u.dtype))

        def one_minute(i: Any, at: tuple[Body, Digestion]) -> tuple[Body, Digestion]:
            body, digestion = at
            served = starting(state.meals, state.minute + i, 1)
            return minute(person, weight, body, digestion._replace(to_eat=digestion.to_eat + served), rate)

        body, digestion = jax.lax.fori_loop(0, self.minutes, one_minute, (state.body, state.digestion))
        error = self.sensor.next_error(state.error, standard_normal(u)[0], self.minutes)
        reading = self.sensor.read(self.below_skin(body), error)
        after = DayState(
            body=body,
            digestion=digestion,
            meals=state.meals,
            minute=state.minute + self.minutes,
            error=error,
            readings=jnp.concatenate([reading[None], state.readings[:-1]]),
            insulin=state.insulin * math.exp(-self.minutes / INSULIN_STAYS) + rate * self.minutes,
            carbohydrate=(state.carbohydrate + carbohydrate) * math.exp(-self.minutes / CARBOHYDRATE_STAYS),
        )
        return after, -REWARD_SCALE * RISKS[self.risk].of(self.in_blood(body)), False

    def in_blood(self, body: Body) -> Scalar:
        """The blood glucose (mg/dL)."""
        return body.plasma_glucose / self.distribution_volume(body.plasma_glucose)

    def below_skin(self, body: Body) -> Scalar:
        """Glucose below the skin (mg/dL), which follows that of the blood with a delay."""
        return body.skin_glucose / self.distribution_volume(body.skin_glucose)

    def distribution_volume(self, like: Scalar) -> Scalar:
        """The volume (dl/kg) in which glucose is distributed."""
        return jnp.asarray(self.physiology, like.dtype)[Physiology._fields.index("Vg")]

    def blood_glucose(self, episode: Trajectory) -> Float[Array, " T"]:
        """The blood glucose (mg/dL) at the end of every interval of an episode.

        It follows from the reward but for the side of the best value, which the sensor's next reading tells.
        """
        reading = self.reading(episode.obs)
        following = jnp.concatenate([reading[1:], reading[-1:]])
        return RISKS[self.risk].glucose(-episode.reward / REWARD_SCALE, following)

    def outcomes(self, episode: Trajectory) -> dict[str, Array]:
        """The score, shares of time by blood glucose, mean risks, and the share of doses outside the pump's limits."""
        level = self.blood_glucose(episode)
        refused = self.pump.refuses(*self.doses(episode.action, self.announced_grams(episode.obs)))
        return {
            "score": jnp.sum(episode.reward),
            **shares(level),
            "risk": jnp.mean(RISKS["magni"].of(level)),
            "risk_index": jnp.mean(RISKS["kovatchev"].of(level)),
            "clipped": jnp.mean(refused.astype(episode.reward.dtype)),
        }


def basal_by_weight(weight: Any) -> Any:
    """Return the basal rate (U/h) that body weight alone suggests: half of the daily insulin."""
    return DAILY_INSULIN * weight / 48
