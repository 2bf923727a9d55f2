"""How dangerous a blood glucose is: published functions of risk, and the clinical bands."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Float

from perfedrl.types import Array

LEAST, MOST = 10.0, 1000.0
"""Glucose (mg/dL) is limited to this range before its risk is computed."""


class Risk(NamedTuple):
    """The risk 10 * (strength * (log(glucose) ** power - centre)) ** 2 of a glucose in mg/dL."""

    strength: float
    power: float
    centre: float

    def of(self, glucose: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Return the risk of a blood glucose."""
        return 10 * (self.strength * (jnp.log(jnp.clip(glucose, LEAST, MOST)) ** self.power - self.centre)) ** 2

    def glucose(self, risk: Float[Array, "*n"], near: Float[Array, "*n"]) -> Float[Array, "*n"]:
        """Return the glucose of a risk: of the two that have it the one that is nearer to `near`, in logarithms."""
        away = jnp.sqrt(jnp.maximum(risk, 0.0) / 10) / self.strength
        low = jnp.exp(jnp.maximum(self.centre - away, 0.0) ** (1 / self.power))
        high = jnp.exp((self.centre + away) ** (1 / self.power))
        return jnp.where(jnp.abs(jnp.log(near / low)) < jnp.abs(jnp.log(near / high)), low, high)


RISKS = {"magni": Risk(3.5506, 0.8353, 3.7932), "kovatchev": Risk(1.509, 1.084, 5.381)}
"""Magni et al. (2007): 0 at 138 mg/dL, 25 at 70, 3.5 at 180. Kovatchev et al. (1997): 0 at 112, 7.7 at 70 and at 180;
its mean is the blood glucose risk index."""


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
