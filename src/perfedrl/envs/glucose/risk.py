"""How dangerous a blood glucose is: the risk of Magni et al. (2007), and the clinical bands."""

import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.types import Array

LEAST, MOST = 10.0, 1000.0
"""Glucose (mg/dL) is limited to this range before its risk is computed."""

STRENGTH, POWER, CENTRE = 3.5506, 0.8353, 3.7932
"""Constants of Magni's function."""


def risk(glucose: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return Magni's risk: 0 at 138 mg/dL, 25 at 70 and at 285, steeper below."""
    return 10 * (STRENGTH * (jnp.log(jnp.clip(glucose, LEAST, MOST)) ** POWER - CENTRE)) ** 2


def glucose_of(risk: Float[Array, "*n"], near: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Invert the risk: of the two values of glucose that have it, return the one that is nearer to `near`, in logs."""
    away = jnp.sqrt(jnp.maximum(risk, 0.0) / 10) / STRENGTH
    low = jnp.exp(jnp.maximum(CENTRE - away, 0.0) ** (1 / POWER))
    high = jnp.exp((CENTRE + away) ** (1 / POWER))
    return jnp.where(jnp.abs(jnp.log(near / low)) < jnp.abs(jnp.log(near / high)), low, high)


def shares(glucose: Float[Array, " T"]) -> dict[str, Float[Array, ""]]:
    """Return the shares of time in the clinical bands."""
    inside = {
        "in_range": (glucose >= 70) & (glucose <= 180),
        "below_70": glucose < 70,
        "below_54": glucose < 54,
        "above_180": glucose > 180,
        "above_250": glucose > 250,
    }
    return {name: jnp.mean(x.astype(glucose.dtype)) for name, x in inside.items()}
