"""Actuators of classic control: what reaches the body of a command, by the agent's own gain, lag and dead zone."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.envs.base import Task
from perfedrl.envs.control.physics import ACTUATOR, Constant, like
from perfedrl.types import Array


class ActuatedTask(Task):
    """A task whose command, a force or a torque, reaches the body through an actuator.

    The actuator follows the command with a lag, then ignores what lies within its dead zone, then multiplies by its
    gain. At every decision, with the command u, of which U is the largest, and the interval dt between decisions:

        y <- k y + (1 - k) u with k = exp(-dt / lag),   effort = gain sign(y) max(|y| - dead_zone U, 0).

    y is 0 at the start of an episode. It is the last component of the state and not observed. `lag` is a time constant
    in seconds, `dead_zone` a share of U, and a negative `gain` turns the effort around.

    Where all agents have gain 1, no lag and no dead zone, states and compiled programs have no actuator, so that
    results are those of the plain task bit for bit.
    """

    gain: Constant = eqx.field(default=1.0, kw_only=True)
    lag: Constant = eqx.field(default=0.0, kw_only=True)
    dead_zone: Constant = eqx.field(default=0.0, kw_only=True)
    has_actuator: bool = eqx.field(static=True, default=False, kw_only=True)
    """Whether states and steps have an actuator: set where this task needs one. All tasks of a fleet must agree."""

    def __post_init__(self) -> None:
        self.has_actuator = self.has_actuator or not all(is_value(getattr(self, name), x) for name, x in IDEAL.items())

    @abstractmethod
    def command(self, action: Any) -> Float[Array, ""]:
        """Return the force or torque that an action asks for."""

    @property
    @abstractmethod
    def largest_command(self) -> Constant:
        """The largest force or torque that an action can ask for."""

    @property
    @abstractmethod
    def interval(self) -> Constant:
        """The time between two decisions."""

    def at_rest(self, body: Float[Array, " n"]) -> Float[Array, " s"]:
        """Return the state in which an episode starts: a body, and an actuator at rest."""
        return jnp.append(body, jnp.zeros((), body.dtype)) if self.has_actuator else body

    def body(self, state: Float[Array, " s"]) -> Float[Array, " n"]:
        """Return a state without the actuator's."""
        return state[:-1] if self.has_actuator else state

    def moved(self, body: Float[Array, " n"], followed: Float[Array, ""]) -> Float[Array, " s"]:
        """Return the state of a body that has moved, and of its actuator."""
        return jnp.append(body, followed) if self.has_actuator else body

    def followed(self, state: Float[Array, " s"], command: Float[Array, ""]) -> Float[Array, ""]:
        """Return y, what the actuator has followed of the commands up to this one."""
        if not self.has_actuator:
            return command
        keep = jnp.exp(-self.interval / self.lag)  # 0 without a lag
        return keep * state[-1] + (1 - keep) * command

    def effort(self, followed: Float[Array, ""]) -> Float[Array, ""]:
        """Return the force or torque on the body."""
        if not self.has_actuator:
            return followed
        beyond = jnp.maximum(jnp.abs(followed) - self.dead_zone * self.largest_command, 0)
        return self.gain * (jnp.sign(followed) * beyond)

    def last_state(self, obs: Float[Array, " n"], actions: Any) -> Float[Array, " s"]:
        """Return the state at the last decision, from the body's state there and the actions up to it.

        What the actuator has followed is a function of the actions before.
        """
        if not self.has_actuator:
            return obs
        its = like(self, obs)

        def follow(state: Float[Array, " s"], action: Any) -> tuple[Float[Array, " s"], None]:
            return its.moved(obs, its.followed(state, its.command(action))), None

        return jax.lax.scan(follow, its.at_rest(obs), actions[:-1])[0]


IDEAL = {name: ActuatedTask.__dataclass_fields__[name].default for name in ACTUATOR}
"""The constants of an actuator that passes every command on as it is."""


def is_value(constant: Constant, value: float) -> bool:
    """Whether a constant has a certain value for all agents; not known, and so False, while JAX traces it."""
    return not isinstance(constant, jax.core.Tracer) and bool(np.all(np.asarray(constant) == value))
