"""Rules without learning: basal rate and bolus by a patient's own clinical numbers, and a PID controller."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.compilation import jit
from perfedrl.envs.glucose import GlucoseDay, glucose
from perfedrl.types import Array, Trajectory

TARGET, CORRECT_ABOVE = 140.0, 150.0
"""The glucose that corrections aim at, and the reading above which a bolus corrects (mg/dL)."""

GAINS = tuple(itertools.product((0.5, 1.0, 2.0, 4.0, 8.0), (0.0, 0.1, 0.3), (0.0, 30.0, 100.0)))
"""Gains among which the PID controller's are chosen: of the error, its integral over hours and its slope per minute,
all relative to 100 mg/dL and to the own basal rate."""

INTEGRAL_LIMIT = 300.0
"""The integral of the error stays within this many mg/dL times hours."""


class Doses(NamedTuple):
    """What a rule asks for: a basal rate (U/h) and a bolus (U)."""

    basal: Float[Array, ""]
    bolus: Float[Array, ""]


Rule = Callable[[GlucoseDay, Float[Array, ""], Float[Array, " k"]], tuple[Float[Array, ""], Doses]]
"""(task, the rule's memory, observation) -> (memory, doses)."""


def basal_bolus(task: GlucoseDay, memory: Float[Array, ""], obs: Float[Array, " k"]) -> tuple[Float[Array, ""], Doses]:
    """The own basal rate; at meals the carbohydrate by the own ratio, and a correction by the own factor."""
    reading, grams = task.reading(obs), task.announced_grams(obs)
    correction = jnp.where(reading > CORRECT_ABOVE, (reading - TARGET) / task.correction_factor, 0.0)
    bolus = jnp.where(grams > 0, grams / task.carbohydrate_ratio + correction, 0.0)
    return memory, Doses(jnp.asarray(task.basal, obs.dtype), bolus.astype(obs.dtype))


def pid(gains: Float[Array, " 3"]) -> Rule:
    """A PID controller of the basal rate around the own one; it is not told of meals."""

    def rule(task: GlucoseDay, memory: Float[Array, ""], obs: Float[Array, " k"]) -> tuple[Float[Array, ""], Doses]:
        error = task.reading(obs) - TARGET
        slope = (task.reading(obs) - task.reading(obs[1:])) / task.minutes
        memory = jnp.clip(memory + error * task.minutes / 60, -INTEGRAL_LIMIT, INTEGRAL_LIMIT)
        share = (gains[0] * error + gains[1] * memory + gains[2] * slope) / 100
        return memory, Doses((task.basal * (1 + share)).astype(obs.dtype), jnp.zeros_like(error))

    return rule


def as_action(task: GlucoseDay, doses: Doses, obs: Float[Array, " k"]) -> Float[Array, " 2"]:
    """Return the action that asks for these doses, where actions are factors; no dose below 0 can be asked for."""
    basal, bolus = task.doses(jnp.zeros(2, obs.dtype), task.announced_grams(obs))
    ratio = jnp.stack([doses.basal / basal, doses.bolus / jnp.maximum(bolus, 1e-6)])
    return jnp.log(jnp.maximum(ratio, 1e-4)).astype(obs.dtype)


def one_day(task: GlucoseDay, rule: Rule, u: Float[Array, " n"]) -> Trajectory:
    """A day under a rule; the uniforms are those of the reset and of every decision."""

    def decide(at: Any, noise: Any) -> tuple[Any, Any]:
        state, memory = at
        obs = task.observe(state)
        memory, doses = rule(task, memory, obs)
        action = as_action(task, doses, obs)
        after, reward, _ = task.step(state, action, noise[None])
        return (after, memory), (obs, action, reward)

    start = task.reset(u[: task.reset_noise]), jnp.zeros((), u.dtype)
    _, (obs, action, reward) = jax.lax.scan(decide, start, u[task.reset_noise :])
    return Trajectory(obs, action, reward, jnp.ones_like(reward))


def play(tasks: GlucoseDay, rule: Rule, seed: int, days: int) -> Trajectory:
    """Days of several patients under a rule: [patient, day, T, ...]."""
    size = tasks.reset_noise + tasks.horizon + 1
    u = jax.random.uniform(jax.random.key(seed), (tasks.weight.shape[0], days, size))
    return jax.vmap(lambda task, u: jax.vmap(lambda u: one_day(task, rule, u))(u))(tasks, u)


def outcomes(tasks: GlucoseDay, rule: Rule, seed: int, days: int) -> dict[str, Float[Array, " patient"]]:
    """Mean outcomes of several patients under a rule."""
    episodes = play(tasks, rule, seed, days)
    found = jax.vmap(lambda task, days: jax.vmap(task.outcomes)(days))(tasks, episodes)
    return {name: x.mean(axis=-1) for name, x in found.items()}


def tuned_gains(tasks: GlucoseDay, seed: int, days: int) -> Float[np.ndarray, " 3"]:
    """The gains with the lowest mean risk index over some patients."""

    def mean_risk(gains: Float[Array, " 3"]) -> Float[Array, ""]:
        return outcomes(tasks, pid(gains), seed, days)["risk_index"].mean()

    risks = jit(lambda all_gains: jax.lax.map(mean_risk, all_gains))(jnp.asarray(GAINS, jnp.float32))
    return np.asarray(GAINS[int(np.argmin(risks))])


class RuleOutcomes(NamedTuple):
    """Outcomes of the unseen patients, by rule and name of the outcome; gains of the PID controller."""

    basal_bolus: dict[str, Float[np.ndarray, " patient"]]
    pid: dict[str, Float[np.ndarray, " patient"]]
    gains: Float[np.ndarray, " 3"]


def rule_outcomes(unseen: Sequence[str], seed: int, days: int, tuning_days: int) -> RuleOutcomes:
    """Play both rules on the unseen patients; the gains are chosen on all others."""
    fleet = glucose(held_out=unseen, risk="kovatchev")
    gains = tuned_gains(fleet.train, seed, tuning_days)
    measured = jit(lambda tasks, gains: [outcomes(tasks, rule, seed, days) for rule in (basal_bolus, pid(gains))])
    found = measured(fleet.held_out, jnp.asarray(gains, jnp.float32))
    rule, controller = ({name: np.asarray(x) for name, x in outcome.items()} for outcome in found)
    return RuleOutcomes(rule, controller, gains)
