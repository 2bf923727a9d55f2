"""Which regime of Section 5 an adaptation step size is in, and where the regimes end."""

from dataclasses import dataclass
from math import sqrt

from perfedrl.theory.plan import accuracy
from perfedrl.theory.worst_case import Constants


@dataclass(frozen=True)
class Regime:
    """An adaptation step size among those at which something changes."""

    alpha: float
    name: str
    meaning: str
    moderate: float
    """1 / (2 L_J): up to here the adaptation's Jacobian is well conditioned; Remark 2's factor is at most 2 (R2)."""
    dagger: float
    """alpha-dagger = L_J / (rho_J G_J): above it the third-order term of L_F exceeds L_J."""
    vanishing: float
    """sqrt(epsilon) / (3 sqrt(2) L_J G_J): below it the first-order variant is admissible, and grad F is within
    sqrt(epsilon) / 2 of grad f (Corollary 2, R1); 0 when no accuracy is asked for."""


def regime(c: Constants, epsilon: float | None = None) -> Regime:
    """The regime of alpha: none, vanishing (R1), moderate (R2), or above."""
    moderate, dagger = 1 / (2 * c.L_J), c.L_J / (c.rho_J * c.G_J)
    vanishing = 0.0 if epsilon is None else sqrt(accuracy(epsilon) / 18) / (c.L_J * c.G_J)
    if c.alpha == 0:
        name, meaning = "none", "F is f: federated policy gradient without personalization"
    elif c.alpha <= vanishing:
        name, meaning = (
            "vanishing (R1)",
            "grad F is within sqrt(epsilon) / 2 of grad f, and first-order is admissible",
        )
    elif c.alpha <= moderate:
        name, meaning = (
            "moderate (R2)",
            "recommended: an agent whose own grad F_i is small is nearly stationary once adapted",
        )
    else:
        name, meaning = "above moderate", "all constants grow with alpha, and from 1 / L_J on Remark 2 is silent"
    return Regime(c.alpha, name, meaning, moderate, dagger, vanishing)
