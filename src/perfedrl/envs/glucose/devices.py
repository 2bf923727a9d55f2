"""The sensor that measures glucose below the skin, and the pump that infuses insulin."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float

from perfedrl.types import Array

Numbers = Float[Array, "*n"]
"""One number, or one for each of several moments."""


class Sensor(NamedTuple):
    """A continuous glucose monitor whose error is a transformed autoregression (Breton and Kovatchev, 2008).

    The delay of the sensor is that of glucose below the skin, a state of the model. Defaults are the Dexcom of
    simglucose's table, whose noise is given at every 15 minutes; at other intervals the autoregression has the same
    variance and the same correlation over 15 minutes.
    """

    correlation: float = 0.7
    gamma: float = -0.5444
    delta: float = 1.6898
    xi: float = -5.47
    scale: float = 15.9574
    lowest: float = 39.0
    highest: float = 600.0

    @property
    def variance(self) -> float:
        """The stationary variance of the autoregression e' = correlation * (e + n)."""
        return self.correlation**2 / (1 - self.correlation**2)

    def next_error(self, error: Numbers, normal: Numbers, minutes: float) -> Numbers:
        """Return the autoregression after some minutes."""
        keeps = self.correlation ** (minutes / 15)
        return keeps * error + (self.variance * (1 - keeps**2)) ** 0.5 * normal

    def read(self, glucose: Numbers, error: Numbers) -> Numbers:
        """Return the sensor's number (mg/dL) for glucose below the skin."""
        noise = self.xi + self.scale * jnp.sinh((error - self.gamma) / self.delta)
        return jnp.clip(glucose + noise, self.lowest, self.highest)


class Pump(NamedTuple):
    """An insulin pump, which infuses in steps and within limits; defaults are the Insulet of simglucose's table."""

    highest_basal: float = 30.0
    """U/h."""
    highest_bolus: float = 30.0
    """U."""
    increment: float = 0.05
    """U/h of the basal rate, and U of a bolus."""

    def infuse(self, basal: Numbers, bolus: Numbers) -> tuple[Numbers, Numbers]:
        """Return what the pump makes of a basal rate (U/h) and a bolus (U)."""
        return self.rounded(basal, self.highest_basal), self.rounded(bolus, self.highest_bolus)

    def rounded(self, dose: Numbers, highest: float) -> Numbers:
        """Return a dose within the limits, in whole increments."""
        return jnp.round(jnp.clip(dose, 0.0, highest) / self.increment) * self.increment

    def refuses(self, basal: Numbers, bolus: Numbers) -> Bool[Array, "*n"]:
        """Whether a dose is outside of the pump's limits, such as a negative one."""
        return (basal < 0) | (basal > self.highest_basal) | (bolus < 0) | (bolus > self.highest_bolus)
