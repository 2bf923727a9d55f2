"""Constants of a fleet, eq. (4) and Lemma 2, from a reward bound, discount, horizon and policy class."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from perfedrl.envs import Fleet
from perfedrl.errors import UserError


@dataclass(frozen=True)
class Constants:
    """Worst-case constants of a fleet at an adaptation step size alpha, under Assumptions 1 and 2.

    R_max bounds rewards; G, M and Lambda bound the score, its derivative and that derivative's Lipschitz constant.
    """

    R_max: float
    gamma: float
    H: int
    G: float
    M: float
    Lambda: float
    alpha: float = 0.0

    def __post_init__(self) -> None:
        if self.gamma == 1:
            raise UserError("the constants grow as (1 - discount)^-2: they are finite only for a discount below 1")
        if not 0 <= self.gamma < 1:
            raise UserError(f"discount must lie in [0, 1); it is {self.gamma}")
        for field in fields(self):
            value, positive = getattr(self, field.name), field.name in ("R_max", "G")
            if not 0 <= value < math.inf or (positive and value == 0):
                raise UserError(f"{field.name} must be a finite number {'>' if positive else '>='} 0; it is {value}")

    def at(self, alpha: float) -> "Constants":
        """Copy the constants with another adaptation step size."""
        return replace(self, alpha=alpha)

    @property
    def R_bar(self) -> float:  # noqa: N802
        """Bound on |J_i| and |F_i|, Lemmas 1(i) and 2(i)."""
        return self.R_max / (1 - self.gamma)

    @property
    def G_J(self) -> float:  # noqa: N802
        """Bound on the policy gradient of every trajectory, Lemma 1(ii)."""
        return self.G * self._scale

    @property
    def L_J(self) -> float:  # noqa: N802
        """Bound on the Hessian term of every trajectory, Lemma 1(iii)."""
        return ((self.H + 1) * self.G**2 + self.M) * self._scale

    @property
    def M_bar(self) -> float:  # noqa: N802
        """Bound on the part of a trajectory's Hessian term that is not of rank one, eq. (4)."""
        return self.M * self._scale

    @property
    def Lambda_bar(self) -> float:  # noqa: N802
        """Lipschitz constant of the part bounded by M_bar, eq. (4)."""
        return self.Lambda * self._scale

    @property
    def rho_J(self) -> float:  # noqa: N802
        """Lipschitz constant of grad^2 J_i, Lemma 1(iv)."""
        T = self.H + 1
        return T * self.G * (self.L_J + self.M_bar) + T * self.M * self.G_J + self.Lambda_bar

    @property
    def stretch(self) -> float:
        """1 + alpha L_J, a bound on the norm of the Jacobian I + alpha grad^2 J_i of the adaptation."""
        return 1 + self.alpha * self.L_J

    @property
    def G_F(self) -> float:  # noqa: N802
        """Bound on grad F_i, Lemma 2(ii), and on every realization of its estimate, Lemma 3(i)."""
        return self.stretch * self.G_J

    @property
    def L_F(self) -> float:  # noqa: N802
        """Lipschitz constant of grad F_i, Lemma 2(iii)."""
        return self.stretch**2 * self.L_J + self.alpha * self.rho_J * self.G_J

    @property
    def _scale(self) -> float:
        return self.R_max / (1 - self.gamma) ** 2


def constants(
    fleet: Any, policy: Any, alpha: float = 0.0, radius: float | None = None, reward_bound: float | None = None
) -> Constants:
    """Compute the constants of a fleet (or a single task) for a policy class.

    Network policies have finite constants on bounded sets only: `radius` bounds the distance of the parameters from 0.
    `reward_bound` gives R_max for tasks that do not state it.
    """
    task = fleet.train if isinstance(fleet, Fleet) else fleet
    G, M, Lambda = regularity(policy, task, radius)
    stated = task.reward_bound
    R_max = stated if reward_bound is None else reward_bound
    if R_max is None:
        raise UserError("the constants need a bound on rewards: these tasks state none (`reward_bound`), so give one")
    if stated is not None and R_max < stated:
        raise UserError(f"rewards reach {stated:g}: {R_max:g} is no bound on them")
    return Constants(float(R_max), task.discount, task.horizon, G, M, Lambda, float(alpha))


def regularity(policy: Any, task: Any, radius: float | None = None) -> tuple[float, float, float]:
    """Constants G, M and Lambda of Assumption 2; raises `UserError` if the policy class has none."""
    name = type(policy).__name__
    if policy.G is not None:
        if radius is not None:
            raise UserError(f"the constants of {name} hold everywhere: there is no radius to give")
        return policy.G, policy.M, policy.Lambda
    if policy.regularity_within is None:
        raise UserError(f"{name} has no finite constants: its actions, and with them its scores, are unbounded")
    if radius is None:
        raise UserError(f"the constants of {name} hold on bounded sets only: give a radius that bounds the parameters")
    if not 0 < radius < math.inf:
        raise UserError(f"the radius must be a finite number > 0; it is {radius}")
    largest = task.observation_bound
    if largest is None:
        raise UserError(f"the constants of {name} need bounded observations: these tasks state no `observation_bound`")
    return policy.regularity_within(radius, largest)
