"""Recipes for one agent's Gymnasium environment: a registered id or a factory, and the agent's own physics."""

import copy
import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from perfedrl.errors import FAILURES, UserError, in_one_line, nearest
from perfedrl.own_modules import check_not_of_python, imported_module

Factory = Callable[..., Any]

log = logging.getLogger("perfedrl")


def gymnasium() -> Any:
    """Import the package, an optional dependency."""
    try:
        return importlib.import_module("gymnasium")
    except ImportError as error:
        raise UserError("Gymnasium environments need an extra: pip install 'perfedrl[gym]'") from error


@dataclass(frozen=True)
class Recipe:
    """How to make one agent's environment, once for every parallel episode; it is sent to worker processes.

    `values` are the parameters in which this agent differs from others: arguments of the constructor, or attributes
    that the constructor sets. An attribute takes the agent's value at the moment it is set, so that everything the
    constructor derives from it follows from that value.
    """

    source: str | Factory
    values: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the constructor that all agents share."""

    def __call__(self, **more: Any) -> Any:
        gym = gymnasium()
        factory = own_factory(self.source) if isinstance(self.source, str) else self.source
        if factory is not None:
            with self._explaining_errors():
                env = varied(factory, {**self.options, **more}, self.values, self.name)
            if not isinstance(env, gym.Env):
                raise UserError(f"{self.name} must make a gymnasium.Env; it made a {type(env).__name__}")
            return env
        spec = copy.copy(specification(self.name))
        with self._explaining_errors(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            creator = spec.entry_point
            if isinstance(creator, str):
                creator = gym.envs.registration.load_env_creator(creator)
            if creator is None:
                raise UserError(f"the environment {self.name!r} has no entry point, and so it cannot be made")
            spec.entry_point = lambda **arguments: varied(creator, arguments, self.values, self.name)
            return gym.make(spec, disable_env_checker=True, **self.options, **more)

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        """Turn what goes wrong in a constructor into a `UserError`."""
        try:
            yield
        except UserError:
            raise
        except FAILURES as error:
            raise UserError(f"the environment {self.name!r} cannot be made: {in_one_line(error)}") from error

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Make the environment, and close it at the end."""
        env = self()
        try:
            yield env
        finally:
            self.close(env)

    def close(self, env: Any) -> None:
        """Close an environment; one that cannot be closed is reported, since it spoils no episode."""
        try:
            env.close()
        except FAILURES as error:
            log.warning("%s: its environment could not be closed: %s", self.name, in_one_line(error))

    @property
    def name(self) -> str:
        """The id, or the name of the factory."""
        return self.source if isinstance(self.source, str) else getattr(self.source, "__name__", repr(self.source))

    @property
    def described(self) -> str:
        """The name with the agent's own values, in parentheses, for messages."""

        def plain(x: Any) -> str:
            return f"{x:.4g}" if isinstance(x, float | np.floating) else str(x)

        own = ", ".join(f"{key} {plain(value)}" for key, value in self.values.items())
        return f"({self.name}{': ' + own if own else ''})"

    @property
    def longest(self) -> int | None:
        """The number of steps after which Gymnasium truncates an episode, where that is registered."""
        if not isinstance(self.source, str) or own_factory(self.source) is not None:
            return None
        return specification(self.source).max_episode_steps


def own_factory(name: str) -> Factory | None:
    """Import the factory `module:function`; return None for a Gymnasium id, which may have a module before it too."""
    attribute = name.partition(":")[2]
    factory = getattr(imported_module(name, "environment"), attribute, None) if attribute else None
    check_not_of_python(factory, name, "environment")
    return factory if callable(factory) else None


def specification(name: str) -> Any:
    """Return the specification that Gymnasium has registered under an id."""
    gym = gymnasium()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of newer versions
            if ":" in name:
                importlib.import_module(name.partition(":")[0])  # this registers the id
            return gym.spec(name.rpartition(":")[2])
    except (gym.error.Error, ImportError) as error:
        module, _, attribute = name.rpartition(":")
        if module in sys.modules:
            own = nearest(attribute, [key for key, value in vars(sys.modules[module]).items() if callable(value)])
            raise UserError(f"the module {module!r} has no environment {attribute!r}{own}") from error
        close = nearest(name, gym.registry).partition("; known")[0]
        raise UserError(
            f"Gymnasium knows no environment {name!r}{close or '; one of your own is named by module:Class'}"
        ) from error


def varied(factory: Factory, arguments: Mapping[str, Any], values: Mapping[str, Any], name: str) -> Any:
    """Make an environment with an agent's values: as arguments where the factory takes them, else as attributes."""
    try:
        accepted: Mapping[str, inspect.Parameter] = inspect.signature(factory).parameters
    except ValueError:  # functions written in C have no signature
        accepted = {}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values()) and not isinstance(factory, type)
    own = {key: value for key, value in values.items() if key in accepted or takes_all}
    rest = {key: value for key, value in values.items() if key not in own}
    if not rest:
        return factory(**{**arguments, **own})
    if not isinstance(factory, type):
        env = factory(**{**arguments, **own})
        missing = [key for key in rest if not hasattr(env.unwrapped, key)]
        check_known(missing, [*accepted, *public(env.unwrapped)], name)
        for key, value in rest.items():
            setattr(env.unwrapped, key, value)
        return env
    return overridden(factory, {**arguments, **own}, rest, name)


def overridden(kind: type, arguments: Mapping[str, Any], values: Mapping[str, Any], name: str) -> Any:
    """Make an object whose constructor sets attributes to given values instead of its own.

    A temporary subclass overrides them while the constructor runs; later assignments are not affected.
    """
    seen, set_as_usual = set(), cast(Callable[..., None], kind.__setattr__)

    def set_attribute(self: Any, key: str, value: Any) -> None:
        seen.add(key)
        set_as_usual(self, key, values.get(key, value))

    constants = {key: value for key, value in values.items() if hasattr(kind, key)}
    made = type(kind.__name__, (kind,), {"__setattr__": set_attribute, "__module__": kind.__module__, **constants})
    env = made(**arguments)
    env.__class__ = kind
    check_known([key for key in values if key not in seen | set(constants)], public(env), name)
    for key, value in constants.items():
        setattr(env, key, value)
    return env


def check_known(missing: list[str], known: list[str], name: str) -> None:
    """Reject varying parameters that an environment does not have."""
    if missing:
        raise UserError(f"the environment {name!r} has no parameter {missing[0]!r}{nearest(missing[0], known)}")


def public(env: Any) -> list[str]:
    """List the public numeric attributes of an environment and its class."""

    def number(x):
        return isinstance(x, int | float) and not isinstance(x, bool)

    names = {*vars(env), *(key for kind in type(env).__mro__ for key in vars(kind))}
    return sorted(key for key in names if not key.startswith("_") and number(getattr(env, key, None)))
