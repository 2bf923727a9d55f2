"""The constants of Assumption 2 for a softmax over a tanh network, on a ball of parameters.

The first three derivatives are bounded layer by layer: each line is the product rule or the chain rule with norms in
place of tensors. Second and third derivatives are measured in the Frobenius norm, as in the assumption, first
derivatives in both the Frobenius and the spectral norm.
"""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

TANH_2, TANH_3 = 4 / (3 * sqrt(3)), 2.0
"""The largest |tanh''| and |tanh'''|; |tanh'| <= 1."""

SCORE, COVARIANCE, THIRD = sqrt(2), 0.5, sqrt(2)
"""Bounds for log softmax in its logits: |e_a - pi|, |diag(pi) - pi pi^T| and the third cumulant of a one-hot draw.

The second is at most sqrt(s - s^2) with s = |pi|^2; the third at most E|x - pi|^3 <= sqrt(2) E|x - pi|^2 <= sqrt(2).
"""


class Jet(NamedTuple):
    """Bounds on a vector-valued function of the parameters and on its derivatives."""

    value: float
    spectral: float
    first: float
    second: float
    third: float


def softmax_of_network(widths: Sequence[int], radius: float, observation: float) -> tuple[float, float, float]:
    """Return (G, M, Lambda) on |theta| <= radius, for observations of norm at most `observation`."""
    x = Jet(observation, 0.0, 0.0, 0.0, 0.0)
    for i, outputs in enumerate(widths[1:]):
        x = affine(tanh(x, widths[i]) if i else x, outputs, radius)
    G = SCORE * x.spectral
    M = COVARIANCE * x.spectral**2 + SCORE * x.second
    Lambda = THIRD * x.spectral**3 + 3 * COVARIANCE * x.spectral * x.second + SCORE * x.third
    return G, M, Lambda


def affine(x: Jet, outputs: int, radius: float) -> Jet:
    """Bound x W + b: W and b are parameters, orthogonal to those that x depends on."""
    own = x.value**2 + 1
    return Jet(
        value=radius * sqrt(own),
        spectral=sqrt(own + (radius * x.spectral) ** 2),
        first=sqrt(outputs * own + (radius * x.first) ** 2),
        second=sqrt(2 * outputs * x.first**2 + (radius * x.second) ** 2),
        third=sqrt(3 * outputs * x.second**2 + (radius * x.third) ** 2),
    )


def tanh(x: Jet, width: int) -> Jet:
    """Bound the tanh of every component."""
    return Jet(
        value=min(x.value, sqrt(width)),
        spectral=x.spectral,
        first=x.first,
        second=TANH_2 * x.spectral * x.first + x.second,
        third=TANH_3 * x.spectral**2 * x.first + 3 * TANH_2 * x.spectral * x.second + x.third,
    )
