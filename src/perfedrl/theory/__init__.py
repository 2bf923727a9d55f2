"""The paper's theory as a tool: constants, bounds, a planner, and the same quantities measured on a fleet."""

from perfedrl.theory.bounds import (
    Bound,
    bias,
    ceiling,
    certificate,
    convergence,
    dissimilarity,
    drift,
    one_step_progress,
    residual,
    second_moment,
    sharp_bias,
    small_adaptation,
)
from perfedrl.theory.estimate import Batches, Moments, moments
from perfedrl.theory.first_order_fixed_points import FixedPoint, fixed_points
from perfedrl.theory.local_step_trace import trace
from perfedrl.theory.measure import realized
from perfedrl.theory.plan import Condition, Plan, Problem, corollary_1
from perfedrl.theory.problem import guarantee, problem
from perfedrl.theory.regimes import Regime, regime
from perfedrl.theory.search import Given, cheapest
from perfedrl.theory.worst_case import Constants, constants

__all__ = [
    "Batches",
    "Bound",
    "Condition",
    "Constants",
    "FixedPoint",
    "Given",
    "Moments",
    "Plan",
    "Problem",
    "Regime",
    "bias",
    "ceiling",
    "certificate",
    "cheapest",
    "constants",
    "convergence",
    "corollary_1",
    "dissimilarity",
    "drift",
    "fixed_points",
    "guarantee",
    "moments",
    "one_step_progress",
    "problem",
    "realized",
    "regime",
    "residual",
    "second_moment",
    "sharp_bias",
    "small_adaptation",
    "trace",
]
