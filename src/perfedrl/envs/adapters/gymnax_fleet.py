"""Fleets of environments with gymnax's interface; agents differ in fields of its parameters.

The interface: `reset(key, params) -> obs, state`, `step(key, state, action, params) -> obs, state, reward, done, info`,
`default_params` (a dataclass) and `action_space(params)`, which has `n`, or `low`, `high` and `shape`. Since version 1
gymnax returns `terminated, truncated` in the place of `done`; both are ends here.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
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
from perfedrl.errors import UserError, in_one_line, nearest
from perfedrl.types import Array, Noise, Trajectory


class GymnaxSource(NamedTuple):
    """Where an environment comes from, and the fields of its parameters that all agents share."""

    id: Any
    options: Table = Table()


class ActionSizes(NamedTuple):
    """The environment's actions: a number of choices, or a box, whose limits are those of the shared parameters."""

    choices: int | None
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()


class GymnaxState(NamedTuple):
    """The environment's state, and the observation that came with it."""

    obs: Any
    inner: Any


class GymnaxTask(Task):
    """One agent in an environment with gymnax's interface; `values` are the fields of its own parameters."""

    values: dict[str, Any]
    source: GymnaxSource = eqx.field(static=True)
    sizes: ActionSizes = eqx.field(static=True)
    horizon: int = eqx.field(static=True)
    discount: float = eqx.field(static=True)
    more_outcomes: Callable[[Trajectory], dict[str, Array]] | None = eqx.field(static=True, default=None)

    reset_noise = KEY_UNIFORMS
    step_noise = KEY_UNIFORMS

    @property
    def actions(self) -> int | None:
        return self.sizes.choices

    @property
    def action_size(self) -> int | None:
        return None if self.sizes.choices is not None else len(self.sizes.low)

    @property
    def parameters(self) -> Any:
        """The environment's parameters with the agent's own values."""
        return dataclasses.replace(made(self.source)[1], **self.values)

    @property
    def settings(self) -> dict[str, Any]:
        """The agent's own values, by name."""
        return {name: np.asarray(x) for name, x in self.values.items()}

    def reset(self, u: Noise) -> GymnaxState:
        obs, inner = made(self.source)[0].reset(key_of(u), self.parameters)
        return as_arrays(GymnaxState(obs, inner))

    def observe(self, state: GymnaxState) -> Float[Array, " observed"]:
        return flat(state.obs)

    def step(self, state: GymnaxState, action: Any, u: Noise) -> tuple[GymnaxState, Float[Array, ""], Bool[Array, ""]]:
        env, act = made(self.source)[0], self.to_environment(action)
        obs, inner, reward, *ends, _ = env.step(key_of(u), state.inner, act, self.parameters)
        done = reduce(jnp.logical_or, [jnp.asarray(end, bool) for end in ends])
        return like(GymnaxState(obs, inner), state), jnp.asarray(reward, float), done

    def to_environment(self, action: Any) -> Any:
        """Map [-1, 1] to the bounded components of a box, and clip to it; choices are as they are."""
        if self.sizes.choices is not None:
            return action
        low, high = (np.asarray(x, np.float32) for x in (self.sizes.low, self.sizes.high))
        bounded = np.isfinite(low) & np.isfinite(high)
        center = np.where(bounded, (np.where(bounded, low, 0) + np.where(bounded, high, 0)) / 2, 0)
        half = np.where(bounded, (np.where(bounded, high, 1) - np.where(bounded, low, -1)) / 2, 1)
        return jnp.clip(center + half * action, low, high).reshape(self.sizes.shape)

    def outcomes(self, episode: Trajectory) -> dict[str, Any]:
        """The undiscounted return, as "score", and the outcomes of the user's function."""
        return {"score": jnp.sum(episode.reward), **(self.more_outcomes(episode) if self.more_outcomes else {})}


def gymnax_fleet(
    id: str | Callable[[], Any],
    vary: Vary = (),
    agents: int = 8,
    held_out: int = 0,
    seed: int = 0,
    horizon: int | None = None,
    discount: float = 0.99,
    options: Mapping[str, Any] | None = None,
    outcomes: Any = None,
) -> Fleet:
    """Agents in environments with gymnax's interface: an id that gymnax registers, or `module:name` of a class.

    `vary` names fields of the environment's parameters that differ between agents; `options` are fields that all
    agents share. An episode ends when the environment ends it, or after `horizon` + 1 decisions; without `horizon`
    as many as the field `max_steps_in_episode` says. The key of every reset and step is made of three uniforms.
    """
    source = GymnaxSource(id, hashable(options or {}))
    env, params = made(source)
    fields = {field.name: field.default for field in dataclasses.fields(params)}
    split = vary_agents(vary, agents, held_out, seed, fields)
    if horizon is None:
        if "max_steps_in_episode" not in fields:
            raise UserError(f"episodes of {id!r} have no length: give a horizon, the number of decisions less 1")
        horizon = int(params.max_steps_in_episode) - 1
    sizes, decisions_less_one = action_sizes(env, params, id), horizon

    def make(_: Any, settings: Settings) -> GymnaxTask:
        values = {name: numbers_of(name, x) for name, x in settings.items()}
        return GymnaxTask(values, source, sizes, decisions_less_one, discount, outcomes_of(outcomes))

    if not split.train[0]:
        raise UserError(f"vary: say which parameters of {id!r} differ between agents, from {', '.join(fields)}")
    check_traced(make(None, split.train[0]), id)
    return family_fleet(make, split.train, split.held_out)


@lru_cache
def made(source: GymnaxSource) -> tuple[Any, Any]:
    """The environment and the parameters that all agents share."""
    if isinstance(source.id, str) and ":" not in source.id:
        env, params = registered(source.id)
    else:
        env, params = from_factory(source.id)
    names = [field.name for field in dataclasses.fields(params)]
    for name, _ in source.options:
        if name not in names:
            raise UserError(f"options: there is no parameter {name!r}{nearest(name, names)}")
    return env, dataclasses.replace(params, **arguments(source.options))


def from_factory(source: str | Callable[..., Any]) -> tuple[Any, Any]:
    """Make an environment by a user's own class or function, without arguments."""
    try:
        env = factory_of(source)()
        params = env.default_params
        dataclasses.fields(params)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"id = {source!r}: expected gymnax's interface, an environment made without arguments whose default_params "
            f"is a dataclass: {in_one_line(error)}"
        ) from error
    return env, params


def registered(name: str) -> tuple[Any, Any]:
    """Make an environment that gymnax registers."""
    try:
        gymnax = importlib.import_module("gymnax")
    except ImportError as error:
        raise UserError(
            f"id = {name!r} is of gymnax, which cannot be imported ({error}): pip install flax seaborn six, then "
            "pip install --no-deps gymnax, which asks for an older Gymnasium; or name an environment as module:name"
        ) from error
    try:
        return gymnax.make(name)
    except ValueError as error:
        raise UserError(f"gymnax registers no environment {name!r}{nearest(name, gymnax.registered_envs)}") from error


def action_sizes(env: Any, params: Any, name: Any) -> ActionSizes:
    """Return the sizes of an environment's actions."""
    space = vars(env.action_space(params))
    if "n" in space:
        return ActionSizes(int(space["n"]))
    if {"low", "high", "shape"} <= set(space):
        shape = tuple(map(int, space["shape"]))
        low, high = (np.broadcast_to(np.asarray(space[x], float), shape).ravel() for x in ("low", "high"))
        return ActionSizes(None, tuple(low.tolist()), tuple(high.tolist()), shape)
    raise UserError(f"id = {name!r}: expected discrete actions (n) or a box (low, high and shape), got {space}")
