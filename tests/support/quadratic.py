"""An agent's objective in closed form, for tests that compute by hand what an algorithm should do."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp


class Quadratic(eqx.Module):
    """J(theta) = -|theta - maximizer|^2 / 2, without noise; parameters are an array or a pytree."""

    maximizer: Any

    traceable = True

    def gradient(self, params, key, m):
        return jax.tree.map(jnp.subtract, self.maximizer, params)

    def curvature(self, params, v, key, m):
        return jax.tree.map(jnp.negative, v)

    def value(self, params, key, m):
        return -sum(jnp.sum(x**2) for x in jax.tree.leaves(self.gradient(params, key, m))) / 2
