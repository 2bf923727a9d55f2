"""Privacy loss of clipped and noised uploads, computed by the accountant of dp-accounting.

An upload is a local Gaussian mechanism: it protects an agent from everybody who sees the upload, the server included.
The unit of privacy is an agent's whole experience: two agents that differ in every trajectory must be hard to tell
apart. A clipped displacement has a length of at most `clip`, so replacing all experience moves it by at most 2 `clip`.
Noise with standard deviation `noise` times `clip` is therefore noise / 2 times the sensitivity, which is the multiplier
that is accounted. Each round is a release of its own, which may depend on the earlier ones.
"""

import math

from perfedrl.errors import UserError

SENSITIVITY = 2.0
"""Largest change of a clipped displacement when all experience is replaced, in units of `clip`."""


def loss(noise: float, releases: int, delta: float) -> float:
    """Return the epsilon for which `releases` noised uploads of one agent are (epsilon, delta)-differentially private.

    It is exact for Gaussian noise: K releases reveal as much as one whose standard deviation is divided by sqrt(K),
    also where later ones depend on earlier ones. It is infinite without noise.
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
