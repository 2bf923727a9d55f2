"""Privacy loss of clipped and noised uploads, computed by the accountant of dp-accounting.

An upload is a local Gaussian mechanism: it protects an agent from everybody who sees the upload, the server included.
The unit of privacy is an agent's whole experience: two agents that differ in every trajectory must be hard to tell
apart. A clipped displacement has a length of at most `clip`, so replacing all experience moves it by at most 2 `clip`.
Noise with standard deviation `noise` times `clip` is therefore noise / 2 times the sensitivity, which is the multiplier
that is accounted. Each round is a release of its own, which may depend on the earlier ones.

`loss` is the epsilon of equal Gaussian releases, exactly. `concentrated_cost` and `loss_of_cost` account for releases
of different noises, and hold for discrete Gaussian noise too, which agents in a network add.
"""

import math
from typing import Any

from perfedrl.errors import UserError

SENSITIVITY = 2.0
"""Largest change of a clipped displacement when all experience is replaced, in units of `clip`."""
ORDERS = tuple(1 + 0.0101 * 10 ** (k / 40) for k in range(361))
"""Orders of the Renyi divergences from which epsilon is computed; each gives a valid bound, and the best one counts."""


def loss(noise: float, releases: int, delta: float) -> float:
    """Return the epsilon for which `releases` noised uploads of one agent are (epsilon, delta)-differentially private.

    It is exact for Gaussian noise: K releases reveal as much as one whose standard deviation is divided by sqrt(K),
    also where later ones depend on earlier ones. It is infinite without noise.
    """
    if not (math.isfinite(noise) and noise >= 0):
        raise UserError(f"noise must be a finite number >= 0; it is {noise}")
    if releases < 0:
        raise UserError(f"the number of releases must be at least 0; it is {releases}")
    check_delta(delta)
    if releases == 0:
        return 0.0
    if noise == 0:
        return math.inf
    return float(accounting().get_epsilon_gaussian(noise / SENSITIVITY / math.sqrt(releases), delta))


def concentrated_cost(noise: float) -> float:
    """Return the rho for which one noised upload is rho-zero-concentrated differentially private.

    With sensitivity s and standard deviation sigma it is s^2 / (2 sigma^2), infinite without noise. Costs of several
    releases add, whatever their noises, also where a release and its noise depend on earlier releases and a fixed limit
    on the sum decides when to stop (Feldman and Zrnic, "Individual privacy accounting via a Renyi filter", 2021).
    """
    multiplier = noise / SENSITIVITY
    return math.inf if multiplier**2 == 0 else 0.5 / multiplier**2


def loss_of_cost(cost: float, delta: float) -> float:
    """Return an epsilon for which releases with this total `concentrated_cost` are (epsilon, delta)-private.

    It is an upper bound, by the conversion from Renyi divergences of dp-accounting (Proposition 12 of Canonne, Kamath
    and Steinke, "The Discrete Gaussian for Differential Privacy", 2020). For equal Gaussian releases it is somewhat
    larger than `loss`.
    """
    check_delta(delta)
    if math.isnan(cost) or cost < 0:
        raise UserError(f"the cost of releases must be a number >= 0; it is {cost}")
    if cost in (0, math.inf):
        return cost
    library = accounting()
    accountant = library.rdp.RdpAccountant(ORDERS)
    accountant.compose(library.ZCDpEvent(cost))
    return float(accountant.get_epsilon(delta))


def check_delta(delta: float) -> None:
    """Check that 0 < delta < 1."""
    if not 0 < delta < 1:
        raise UserError(f"delta must lie between 0 and 1; it is {delta}")


def accounting() -> Any:
    """Import the library that does the accounting."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise UserError('accounting for privacy needs a library: pip install "perfedrl[federation]"') from error
    return dp_accounting
