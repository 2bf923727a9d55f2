"""What adapters to environments in JAX share: keys made of uniforms, flat observations, checks before compiling."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, UInt32

from perfedrl.envs.base import Task, check_episode
from perfedrl.errors import UserError, in_one_line
from perfedrl.own_modules import imported
from perfedrl.types import Array, Noise

KEY_UNIFORMS = 3
"""Number of uniforms that make a random key."""

BITS = 23
"""Random bits in a uniform of single precision."""


def key_of(u: Noise) -> UInt32[Array, " 2"]:
    """Make a random key of three uniforms: the first 23 bits of each, of which 64 are the key.

    So an episode is a deterministic function of its uniforms. The key is the pair of numbers that
    `jax.random.PRNGKey` returns; independent uniforms make each of the 2^64 pairs equally likely.
    """
    high, low, rest = jnp.floor(u * 2**BITS).astype(jnp.uint32)
    missing = 32 - BITS
    return jnp.stack([(high << missing) | (rest >> (BITS - missing)), (low << missing) | (rest & (2**missing - 1))])


def flat(obs: Any) -> Float[Array, " observed"]:
    """An observation as one vector."""
    found, _ = ravel_pytree(obs)
    return found.astype(float)


def like(after: Any, before: Any) -> Any:
    """A state with the types of another, since the states of a compiled loop must agree in them."""

    def typed(new: Any, old: Any) -> Any:
        found = jnp.asarray(new)
        return found if found.dtype == old.dtype else found.astype(old.dtype)

    return jax.tree.map(typed, after, before)


def as_arrays(state: Any) -> Any:
    """A state whose plain numbers are arrays."""
    return jax.tree.map(jnp.asarray, state)


def factory_of(source: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function or class that makes an environment, which a config names as `module:name`."""
    made = imported(source, "environment") if isinstance(source, str) else source
    if not callable(made):
        raise UserError(f"id = {source!r}: expected a class or a function that makes an environment")
    return made


class Table(tuple[tuple[str, Any], ...]):
    """A table of a config as its sorted items, which are hashable."""


def arguments(table: Table) -> dict[str, Any]:
    """The table again, as keyword arguments; tables in it are dictionaries too."""
    return {name: arguments(value) if isinstance(value, Table) else value for name, value in table}


def hashable(value: Any) -> Any:
    """A value of a config that can be a part of a compiled program's identity: lists are tuples, tables sorted."""
    if isinstance(value, Mapping):
        return Table((name, hashable(value[name])) for name in sorted(value))
    return tuple(map(hashable, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value


def numbers_of(name: str, value: Any) -> np.ndarray:
    """The value of a varied parameter as an array of finite numbers."""
    try:
        found = np.asarray(value, int if np.issubdtype(np.asarray(value).dtype, np.integer) else float)
    except (TypeError, ValueError) as error:
        raise UserError(f"vary: {name} must be numbers; it is {value!r}") from error
    if not np.isfinite(found).all():
        raise UserError(f"vary: {name} must be finite; it is {value!r}")
    return found


def check_traced(task: Task, name: Any) -> None:
    """Reject an environment that JAX cannot trace, before anything compiles."""
    check_episode(task.horizon, task.discount)

    def decision(u: Any, more: Any) -> Any:
        state = task.reset(u)
        action = jnp.zeros((), jnp.int32) if task.action_size is None else jnp.zeros(task.action_size)
        return task.observe(state), *task.step(state, action, more)[1:]

    u, more = (jax.ShapeDtypeStruct((n,), np.float32) for n in (task.reset_noise, task.step_noise))
    try:
        _, reward, done = jax.eval_shape(decision, u, more)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"id = {name!r}: JAX cannot trace a step of the environment: {in_one_line(error)}") from error
    if (reward.shape, done.shape) != ((), ()):
        raise UserError(f"id = {name!r}: expected a reward and an end that are single numbers, not of a batch")
