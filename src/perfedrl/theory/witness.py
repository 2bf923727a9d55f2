"""The witness of Prop. 2: two bandits with a nonzero meta-gradient at their first-order fixed point."""

from typing import Any, NamedTuple

import numpy as np

from perfedrl.envs import Fleet
from perfedrl.envs.bandits import WITNESS_FEATURES, WITNESS_REWARDS, bandits
from perfedrl.errors import UserError
from perfedrl.policies import LogLinearSoftmax
from perfedrl.theory.first_order_fixed_points import FixedPoint, fixed_points

ALPHA = 0.5
ALPHAS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.01, 1e-3, 1e-4)
"""Step sizes for which the paper states that D has a zero."""

DIGITS = 7
"""Decimal places printed in the paper."""


class Agreement(NamedTuple):
    """A number printed in the paper and our value of it."""

    what: str
    paper: float
    ours: float

    @property
    def agrees(self) -> bool:
        """Whether our value, rounded to the digits of the paper, equals the printed one."""
        return round(self.ours, DIGITS) == self.paper


def paper_witness() -> tuple[Fleet, LogLinearSoftmax]:
    """Build the paper's two bandits and their scalar policy, whose fixed point repels small first-order steps."""
    return bandits(), LogLinearSoftmax(np.asarray([WITNESS_FEATURES]))


def attracting_witness() -> tuple[Fleet, LogLinearSoftmax]:
    """Build the witness with every reward r replaced by 1 - r, which makes the fixed point attracting.

    Gradients and Hessians change sign, so the limit of |grad F| / alpha, their product, is that of the paper.
    """
    rewards = tuple(tuple(1 - x for x in r) for r in WITNESS_REWARDS)
    return bandits(rewards), LogLinearSoftmax(np.asarray([WITNESS_FEATURES]))


def continued(fleet: Fleet, policy: LogLinearSoftmax, alpha: float) -> FixedPoint:
    """Find the fixed point that tends to a stationary point of f as alpha -> 0; raises `UserError` if none does."""
    points = [p for p in fixed_points(fleet, policy, alpha) if p.limit is not None]
    if not points:
        raise UserError(
            f"no fixed point at alpha = {alpha:g} continues a stationary point of f: choose a smaller alpha"
        )
    return points[0]


def agreements() -> list[Agreement]:
    """Compare every number printed in the proof of Prop. 2 with our value."""
    point = continued(*paper_witness(), ALPHA)
    limit: Any = point.limit
    H, there = point.curvature[:, 0, 0], limit.curvature[:, 0, 0]
    return [
        Agreement("theta* at alpha = 1/2", -0.5555031, float(point.theta[0])),
        Agreement("v_1 = -v_2", -0.3195682, float(point.v[0, 0])),
        Agreement("H_1", -0.2568571, float(H[0])),
        Agreement("H_2", 0.4999539, float(H[1])),
        Agreement("grad F(theta*)", 0.0604632, float(point.meta_gradient[0])),
        Agreement("theta_0, the limit of theta*", -0.2310491, float(limit.theta[0])),
        Agreement("v_1 there", -0.4359767, float(limit.gradients[0, 0])),
        Agreement("H_1 - H_2 there", -0.7210902, float(there[0] - there[1])),
        Agreement("limit of |grad F| / alpha", 0.1571893, limit.slope),
    ]
