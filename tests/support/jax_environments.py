"""Two small environments with the interfaces of gymnax and of Brax, which are not installed for the tests."""

import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnvParams:
    push: float = 0.1
    noise: float = 0.01
    max_steps_in_episode: int = 12


class Walk:
    """gymnax's interface: a point that is pushed left or right, with noise, until it leaves [-1, 1]."""

    default_params = EnvParams()

    def reset(self, key, params):
        x = jax.random.uniform(key, (), minval=-0.5, maxval=0.5)
        return jnp.stack([x, 0.0]), (x, 0)

    def step(self, key, state, action, params):
        x, time = state
        x = x + params.push * (2 * action - 1) + params.noise * jax.random.normal(key)
        done = (jnp.abs(x) > 1) | (time + 1 >= params.max_steps_in_episode)
        return jnp.stack([x, time + 1.0]), (x, time + 1), -(x**2), done, {}

    def action_space(self, params):
        return SimpleNamespace(n=2)


class Boxed(Walk):
    """The same with a force in [-2, 4], and the two kinds of ends that gymnax has since version 1."""

    def step(self, key, state, action, params):
        obs, (x, time), reward, _, info = super().step(key, state, (action[0] + 1) / 2, params)
        return obs, (x, time), reward, jnp.abs(x) > 1, time >= params.max_steps_in_episode, info

    def action_space(self, params):
        return SimpleNamespace(low=-2.0, high=4.0, shape=(1,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class System:
    mass: Any


class State(NamedTuple):
    pipeline_state: Any
    obs: Any
    reward: Any
    done: Any
    info: dict


class Cart:
    """Brax's interface: carts on a rail, with forces as actions."""

    def __init__(self, carts=2, drag=0.1, seen="plain"):
        self.sys, self.drag, self.seen, self.action_size = System(jnp.ones(carts)), drag, seen, carts

    def seen_of(self, x):
        return x if self.seen == "plain" else {"state": x, "privileged": -x}

    def reset(self, rng):
        rng, own = jax.random.split(rng)
        x = jnp.concatenate([jax.random.uniform(own, (self.action_size,)), jnp.zeros(self.action_size)])
        return State(x, self.seen_of(x), jnp.zeros(()), jnp.zeros(()), {"rng": rng})

    def step(self, state, action):
        place, speed = jnp.split(state.pipeline_state, 2)
        speed = (1 - self.drag) * speed + action / self.sys.mass
        x = jnp.concatenate([place + 0.1 * speed, speed])
        far = jnp.max(jnp.abs(x[: self.action_size])) > 2
        return State(x, self.seen_of(x), -jnp.sum(x**2), far.astype(float), state.info)
