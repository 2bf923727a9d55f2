"""Common parts of the classic control tasks: physical constants that differ between agents, and their fleets."""

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from perfedrl.envs.base import check_episode
from perfedrl.envs.fleet import Fleet, fleet
from perfedrl.envs.variation import Vary, vary_agents
from perfedrl.errors import UserError
from perfedrl.types import Array, Trajectory

Constant = Float[Array, "*n"] | float
"""A physical constant."""

NO_NOISE = np.zeros(0)
SHARED = ("horizon", "discount")

ACTUATOR = ("gain", "lag", "dead_zone")
"""The constants of an agent's actuator (`actuator.py`), which every task has."""


def like(task: Any, x: Float[Array, "..."]) -> Any:
    """Convert a task's constants to the precision of an array, so that derived values have the same bits anywhere."""
    return jax.tree.map(lambda constant: jnp.asarray(constant, x.dtype), task)


def constants(kind: Any) -> list[str]:
    """List the names of a task's physical constants."""
    fields = [field.name for field in dataclasses.fields(kind) if not field.metadata.get("static", False)]
    return sorted(fields, key=ACTUATOR.__contains__)  # the body's first


def check_physics(task: Any, signed: Sequence[str] = ()) -> None:
    """Check that constants are finite, and positive unless `signed`; traced constants are not checked.

    A gain may have either sign, a lag and a dead zone may be 0, and a dead zone lies below 1.
    """
    check_episode(task.horizon, task.discount)
    for name in constants(task):
        value = getattr(task, name)
        if isinstance(value, jax.Array):
            continue
        if name in ("lag", "dead_zone"):
            fits, what = np.greater_equal(value, 0), " >= 0"
        elif name in (*signed, "gain"):
            fits, what = np.True_, ""
        else:
            fits, what = np.greater(value, 0), " > 0"
        if name == "dead_zone":
            fits, what = fits & np.less(value, 1), " >= 0 and < 1"
        if not np.all(np.isfinite(value) & fits):
            raise UserError(f"{name} must be a finite number{what}; it is {value!r}")


def as_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Convert varying values to floats, so that a list of whole numbers makes no array of integers."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise UserError(f"vary: {name} must be a number; it is {value!r}")
    return {name: float(value) for name, value in values.items()}


def over(task: Any, episode: Trajectory) -> Bool[Array, ""]:
    """Whether an episode ended, also with its last decision; for tasks whose observations are their bodies' states.

    The mask does not show an end at the last step, and so that step is repeated.
    """
    last = jax.tree.map(lambda x: x[-1], episode)
    return (last.mask == 0) | task.step(task.last_state(last.obs, episode.action), last.action, NO_NOISE)[2]


def score(episode: Trajectory) -> Float[Array, ""]:
    """Return the undiscounted sum of an episode's rewards, the score of the literature."""
    return jnp.sum(episode.reward)


def family(kind: Any, vary: str, usual: Mapping[str, tuple[float, float]], doc: str) -> Callable[..., Fleet]:
    """Make the factory of fleets of one kind of task; its parameters are the constants, with the kind's defaults.

    `vary` names the constant that varies by default. `usual` has the range of each constant whose name alone is given,
    as factors of the fleet's value; those of an actuator are `actuator_ranges`. Where one agent needs an actuator, all
    have one, so that their states are alike.
    """
    defaults = {x.name: x.default for x in dataclasses.fields(kind) if x.name in (*SHARED, *constants(kind))}

    def make(agents: int = 8, held_out: int = 3, seed: int = 0, vary: Vary = vary, **given: Any) -> Fleet:
        if unknown := set(given) - set(defaults):
            raise TypeError(f"{kind.__name__} has no {sorted(unknown)}")
        base = {**defaults, **given}
        ranges = {name: [base[name] * low, base[name] * high] for name, (low, high) in usual.items()}
        plain = kind(**base)  # checks the constants before multiples of them
        parts = vary_agents(vary, agents, held_out, seed, constants(kind), {**ranges, **actuator_ranges(plain)})

        def tasks(part, **more):
            return [kind(**{**base, **as_floats(values)}, **more) for values in part]

        needed = any(task.has_actuator for part in parts for task in tasks(part))
        return fleet(tasks(parts.train, has_actuator=needed), tasks(parts.held_out, has_actuator=needed))

    return described(make, kind, defaults, doc)


def actuator_ranges(task: Any) -> dict[str, Any]:
    """The usual variation of an actuator: gains of both signs, lags up to five decisions, and narrow dead zones."""
    return {"gain": {"plus_minus": [0.5, 1.5]}, "lag": [0.0, 5 * task.interval], "dead_zone": [0.0, 0.3]}


def described(make: Callable[..., Fleet], kind: Any, defaults: Mapping[str, Any], doc: str) -> Callable[..., Fleet]:
    """Give a factory a signature that names every constant, against which configs are checked."""
    first = [p for p in inspect.signature(make).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    types = {name: int if name == "horizon" else float for name in defaults}
    order = [*SHARED, *constants(kind)]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=types[name])
        for name in order
    ]
    make.__signature__ = inspect.Signature([*first, *more], return_annotation=Fleet)  # type: ignore[attr-defined]
    make.__doc__ = doc
    return make
