"""The paper's explicit constants and bounds, Sections 2 and 3."""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from perfedrl.envs import TabularMDP


@dataclass(frozen=True)
class Constants:
    """Worst-case constants of a fleet: eq. (4) and, for an adaptation step size alpha, Lemmas 2 and 3.

    They follow from a bound on rewards, the discount, the horizon and the policy class alone (Assumptions 1 and 2).
    """

    R_max: float
    gamma: float
    H: int
    G: float
    M: float
    Lambda: float

    @property
    def R_bar(self) -> float:  # noqa: N802
        """A bound on |J_i|, Lemma 1(i)."""
        return self.R_max / (1 - self.gamma)

    @property
    def G_J(self) -> float:  # noqa: N802
        """A bound on every trajectory's policy gradient, Lemma 1(ii)."""
        return self.G * self._scale

    @property
    def L_J(self) -> float:  # noqa: N802
        """A bound on every trajectory's Hessian term, Lemma 1(iii)."""
        return ((self.H + 1) * self.G**2 + self.M) * self._scale

    @property
    def M_bar(self) -> float:  # noqa: N802
        return self.M * self._scale

    @property
    def Lambda_bar(self) -> float:  # noqa: N802
        return self.Lambda * self._scale

    @property
    def rho_J(self) -> float:  # noqa: N802
        """A Lipschitz constant of grad^2 J_i, Lemma 1(iv)."""
        T = self.H + 1
        return T * self.G * (self.L_J + self.M_bar) + T * self.M * self.G_J + self.Lambda_bar

    def G_F(self, alpha: float) -> float:  # noqa: N802
        """A bound on grad F_i, Lemma 2(ii), and on every realization of its estimate, Lemma 3(i)."""
        return (1 + alpha * self.L_J) * self.G_J

    def L_F(self, alpha: float) -> float:  # noqa: N802
        """A Lipschitz constant of grad F_i, Lemma 2(iii)."""
        return (1 + alpha * self.L_J) ** 2 * self.L_J + alpha * self.rho_J * self.G_J

    def bias(self, alpha: float, m_in: int) -> float:
        """b-hat, a bound on the bias of the meta-gradient estimate, Lemma 3(ii)."""
        return (1 + alpha * self.L_J) * alpha * self.L_J * self.G_J / sqrt(m_in)

    def sharp_bias(self, alpha: float, m_in: int) -> float:
        """b-hat-star, the bound of Prop. 1: it falls as 1 / m_in where the one above falls as 1 / sqrt(m_in)."""
        return (1 + alpha * self.L_J) * alpha**2 * self.rho_J * self.G_J**2 / (2 * m_in)

    def second_moment(self, alpha: float, m_in: int, m_h: int, m_out: int) -> float:
        """sigma-hat^2, a bound on the mean squared error of the meta-gradient estimate, Lemma 3(iii)."""
        a = (alpha * self.L_J) ** 2
        b = (1 + alpha * self.L_J) ** 2
        return 3 * self.G_J**2 * (a / m_h + b / m_out + a * b / m_in)

    @property
    def _scale(self) -> float:
        return self.R_max / (1 - self.gamma) ** 2


def constants(mdps: TabularMDP, policy: Any) -> Constants:
    """The constants of a fleet of finite MDPs (or a single one) under a policy class that states G, M and Lambda."""
    R_max = float(np.abs(mdps.r).max())
    return Constants(R_max, mdps.discount, mdps.horizon, policy.G, policy.M, policy.Lambda)
