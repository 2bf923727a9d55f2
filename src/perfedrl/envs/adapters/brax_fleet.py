"""Fleets of environments with Brax's interface, which MuJoCo Playground has too.

The interface: `reset(rng) -> State`, `step(state, action) -> State`, where a `State` is a pytree with `obs`, `reward`
and `done`, and `action_size`. Actions are vectors in [-1, 1].
"""

import copy
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from perfedrl.envs.adapters.shared import (
    KEY_UNIFORMS,
    Table,
    arguments,
    as_arrays,
    check_traced,
    factory_of,
    flat,
    hashable,
    key_of,
    like,
    numbers_of,
)
from perfedrl.envs.base import Task
from perfedrl.envs.fleet import Fleet, family_fleet
from perfedrl.envs.gym.fleet import outcomes_of
from perfedrl.envs.new_agents import Settings
from perfedrl.envs.variation import Vary, vary_agents
from perfedrl.errors import UserError, in_one_line
from perfedrl.types import Array, Noise, Trajectory


class BraxSource(NamedTuple):
    """How an environment is made: its factory, and the arguments that all agents share."""

    id: Any
    options: Table = Table()
    observation: str = ""
    """The entry of observations that are tables."""


class BraxTask(Task):
    """One agent in an environment with Brax's interface; `values` are its own arguments and numbers of its model."""

    values: dict[str, Any]
    source: BraxSource = eqx.field(static=True)
    action_size: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)
    discount: float = eqx.field(static=True)
    more_outcomes: Callable[[Trajectory], dict[str, Array]] | None = eqx.field(static=True, default=None)

    reset_noise = KEY_UNIFORMS
    step_noise = 0

    @property
    def environment(self) -> Any:
        """The environment with the agent's own values, which JAX may be tracing."""
        return environment_of(self.source, self.values)

    @property
    def settings(self) -> dict[str, Any]:
        """The agent's own values, by name."""
        return {name: np.asarray(x) for name, x in self.values.items()}

    def reset(self, u: Noise) -> Any:
        return as_arrays(self.environment.reset(key_of(u)))

    def observe(self, state: Any) -> Float[Array, " observed"]:
        return flat(state.obs[self.source.observation] if self.source.observation else state.obs)

    def step(self, state: Any, action: Float[Array, " k"], u: Noise) -> tuple[Any, Float[Array, ""], Bool[Array, ""]]:
        after = self.environment.step(state, jnp.clip(action, -1, 1))
        return like(after, state), jnp.asarray(after.reward, float), jnp.asarray(after.done, float) > 0.5

    def outcomes(self, episode: Trajectory) -> dict[str, Any]:
        """The undiscounted return, as "score", and the outcomes of the user's function."""
        return {"score": jnp.sum(episode.reward), **(self.more_outcomes(episode) if self.more_outcomes else {})}


def brax_fleet(
    id: str | Callable[..., Any],
    horizon: int,
    vary: Vary = (),
    agents: int = 8,
    held_out: int = 0,
    seed: int = 0,
    discount: float = 0.99,
    options: Mapping[str, Any] | None = None,
    observation: str = "",
    outcomes: Any = None,
) -> Fleet:
    """Agents in environments with Brax's interface, made by a class or function ("module:name" in a config).

    `options` are its arguments for all agents. `vary` names arguments that differ between agents, or, with a dot,
    arrays inside the environment: "sys.body_mass" replaces that array of its attribute `sys`, and one number stands
    for all of an array's. `observation` names the entry to see where observations are tables. The key of a reset is
    made of three uniforms.
    """
    source, split = BraxSource(id, hashable(options or {}), observation), vary_agents(vary, agents, held_out, seed)
    if not split.train[0]:
        raise UserError(f"vary: say which arguments or arrays of {id!r} differ between agents")
    first = {name: numbers_of(name, x) for name, x in split.train[0].items()}
    try:
        action_size = int(environment_of(source, first).action_size)
    except AttributeError as error:
        raise UserError(f"id = {id!r}: an environment of Brax's interface has action_size: {error}") from error

    def make(_: Any, settings: Settings) -> BraxTask:
        values = {name: numbers_of(name, x) for name, x in settings.items()}
        return BraxTask(values, source, action_size, horizon, discount, outcomes_of(outcomes))

    check_traced(make(None, split.train[0]), id)
    return family_fleet(make, split.train, split.held_out)


def environment_of(source: BraxSource, values: Mapping[str, Any]) -> Any:
    """Make an agent's environment."""
    own = {name: value for name, value in values.items() if "." not in name}
    factory = factory_of(source.id)
    try:
        env = factory(**arguments(source.options), **own)
    except Exception as error:
        raise UserError(f"id = {source.id!r} cannot be made: {in_one_line(error)}") from error
    for path, value in values.items():
        if "." in path:
            env = with_array(env, path, value)
    return env


def with_array(env: Any, path: str, value: Any) -> Any:
    """A copy of an environment with one array replaced, which `path` names from an attribute on."""
    attribute, *inner = path.split(".")
    try:
        whole = getattr(env, attribute)
        old = reduce(getattr, inner, whole)
        new = jnp.broadcast_to(jnp.asarray(value, jnp.result_type(old)), jnp.shape(old))
    except AttributeError as error:
        raise UserError(f"vary: the environment has no array {path}: {error}") from error
    except ValueError as error:
        raise UserError(f"vary: {path} has the shape {jnp.shape(old)}, got {np.shape(value)}") from error
    changed = copy.copy(env)
    setattr(changed, attribute, eqx.tree_at(lambda tree: reduce(getattr, inner, tree), whole, new))
    return changed
