"""Draws from distributions by inverse transform of uniforms, which are the only randomness of an episode."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from perfedrl.types import Array


def inverse_cdf(p: Float[Array, " k"], u: Float[Array, ""]) -> Int[Array, ""]:
    """Draw an index from the distribution p with one uniform u in [0, 1).

    Scaling u by the computed sum of p, which may differ from 1 by rounding, keeps entries of probability 0 unreachable
    in any precision.
    """
    cdf = jnp.cumsum(p)
    return jnp.sum(u * cdf[-1] >= cdf[:-1]).astype(jnp.int32)


def standard_normal(u: Float[Array, " k"]) -> Float[Array, " k"]:
    """Draw standard normal numbers, one for each uniform in [0, 1)."""
    edge = np.nextafter(np.asarray(1, u.dtype), np.asarray(0, u.dtype))
    return np.sqrt(2).astype(u.dtype) * jax.lax.erf_inv(jnp.clip(2 * u - 1, -edge, edge))
