"""What uploads reveal, in numbers: differential privacy of clipped and noised uploads, by a maintained accountant.

An upload is a local Gaussian mechanism: it protects an agent from everybody who sees what it sends, the server
included. The unit is an agent's whole experience: two agents that differ in every trajectory must be hard to tell
apart. A clipped displacement has a length of at most `clip`, so replacing all experience moves it by at most 2 `clip`,
and noise with standard deviation `noise` times `clip` is half that multiple of the sensitivity: noise / 2 is what is
accounted. Each round is a release of its own, made knowing the earlier ones.
"""

import math

from perfedrl.errors import UserError

SENSITIVITY = 2.0
"""How far a replaced experience moves a clipped displacement at most, in units of `clip`."""


def loss(noise: float, releases: int, delta: float) -> float:
    """The epsilon for which `releases` noised uploads of one agent are (epsilon, delta)-differentially private.

    Exact for Gaussian noise: K releases tell as much as one with its standard deviation divided by sqrt(K), also where
    later ones depend on earlier ones. Infinite without noise.
    """
    if not (math.isfinite(noise) and noise >= 0):
        raise UserError(f"noise must be a finite number >= 0; it is {noise}")
    if releases < 0:
        raise UserError(f"the number of releases must be at least 0; it is {releases}")
    if not 0 < delta < 1:
        raise UserError(f"delta must lie between 0 and 1; it is {delta}")
    if releases == 0:
        return 0.0
    if noise == 0:
        return math.inf
    try:
        from dp_accounting import get_epsilon_gaussian
    except ImportError as error:
        raise UserError('accounting for privacy needs a library: pip install "perfedrl[federation]"') from error
    return float(get_epsilon_gaussian(noise / SENSITIVITY / math.sqrt(releases), delta))
