"""From uniforms, the only randomness of an episode, to other distributions."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.types import Array


def standard_normal(u: Float[Array, " k"]) -> Float[Array, " k"]:
    """Standard normal draws from uniforms on [0, 1), by inverse transform."""
    edge = np.nextafter(np.asarray(1, u.dtype), np.asarray(0, u.dtype))
    return np.sqrt(2).astype(u.dtype) * jax.lax.erf_inv(jnp.clip(2 * u - 1, -edge, edge))
