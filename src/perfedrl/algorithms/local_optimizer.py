"""Optimizers of an agent's local steps: optax's by name, with a state that is averaged, personal or reset."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from perfedrl.algorithms.checks import check_choice
from perfedrl.errors import UserError, nearest
from perfedrl.types import Params, Scalar

OPTIMIZERS = (
    "adabelief",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "amsgrad",
    "lion",
    "nadam",
    "radam",
    "rmsprop",
    "sgd",
    "yogi",
)
"""Functions of optax that take a learning rate; all of them work on parameters of any structure."""

PLAIN = "sgd"
"""The optimizer whose steps are multiples of the gradient."""

STATES = ("averaged", "personal", "reset")


def frozen_settings(settings: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """Make a config's table of an optimizer's settings hashable."""
    if settings is not None and not isinstance(settings, Mapping):
        raise UserError(f"optimizer_settings must be a table such as {{ b1 = 0.9 }}; it is {settings!r}")
    return tuple(sorted((settings or {}).items()))


class LearnerMessage(NamedTuple):
    """The message: what is learned; () or the averaged state of the optimizer; () or the number of the round."""

    learned: PyTree
    moments: PyTree
    round: PyTree


@dataclass(frozen=True)
class LocalOptimizer:
    """An optimizer of optax and what happens to its state between rounds.

    - "averaged": the server averages the state with the parameters, and every agent of a round starts from it.
    - "personal": every agent keeps its own.
    - "reset": every agent starts each round without any.

    Hashable, since programs depend on it; the learning rate is an argument of `step`, so that it may vary.
    """

    name: str = "adam"
    state: Literal["averaged", "personal", "reset"] = "averaged"
    settings: tuple[tuple[str, float | bool], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise UserError(f"there is no optimizer {self.name!r}{nearest(self.name, OPTIMIZERS)}")
        check_choice("optimizer_state", self.state, STATES)
        known = [key for key in inspect.signature(vars(optax)[self.name]).parameters if key != "learning_rate"]
        for key, value in self.settings:
            if key not in known:
                raise UserError(f"the optimizer {self.name!r} has no setting {key!r}{nearest(key, known)}")
            if not isinstance(value, int | float):
                raise UserError(f"the optimizer's {key} must be a number, or true or false; it is {value!r}")

    def init(self, params: Params) -> PyTree:
        """Return the first state; counts are numbers with a fraction, so that states can be averaged."""
        return jax.tree.map(lambda x: jnp.asarray(x, float), self._transformation(1.0).init(params))

    def step(self, params: Params, gradient: Params, state: PyTree, rate: Scalar) -> tuple[Params, PyTree]:
        """Return the change of the parameters in one step of ascent, and the next state."""
        optimizer = self._transformation(rate)
        types = jax.eval_shape(optimizer.init, params)
        exact = jax.tree.map(lambda x, like: jnp.round(x).astype(like.dtype) if is_count(like) else x, state, types)
        descent, exact = optimizer.update(jax.tree.map(jnp.negative, gradient), exact, params)
        state = jax.tree.map(lambda x, like: x.astype(float) if is_count(like) else x, exact, types)
        return descent, state

    @property
    def has_state(self) -> bool:
        """Whether there is anything to remember between steps; for plain ascent there is not."""
        return bool(jax.tree.leaves(jax.eval_shape(self.init, jnp.zeros(()))))

    @property
    def is_averaged(self) -> bool:
        """Whether agents send a state to be averaged."""
        return self.state == "averaged" and self.has_state

    def start(self, params: Params, averaged: PyTree, personal: PyTree) -> PyTree:
        """Return the state in which an agent starts a round."""
        if self.state == "reset" or not self.has_state:
            return self.init(params)
        return averaged if self.state == "averaged" else personal

    def placed(self, state: PyTree) -> tuple[PyTree, PyTree]:
        """Return the part of a state that is averaged, and the part that stays with the agent."""
        return state if self.state == "averaged" else (), state if self.state == "personal" else ()

    def _transformation(self, rate: Scalar) -> optax.GradientTransformation:
        return vars(optax)[self.name](learning_rate=rate, **dict(self.settings))


def is_count(x: Any) -> bool:
    """Whether a part of a state counts something."""
    return jnp.issubdtype(x.dtype, jnp.integer)
