"""The paper's theory as a tool: constants, bounds, a planner, and the same quantities measured on a fleet."""

from perfedrl.theory.bounds import (
    Bound,
    Regime,
    bias,
    ceiling,
    certificate,
    convergence,
    dissimilarity,
    drift,
    one_step_progress,
    regime,
    residual,
    second_moment,
    sharp_bias,
    small_adaptation,
)
from perfedrl.theory.estimate import Batches, EstimateMoments, moments
from perfedrl.theory.first_order_fixed_points import FixedPoint, fixed_points
from perfedrl.theory.fleet_problem import guarantee, problem
from perfedrl.theory.local_step_trace import trace
from perfedrl.theory.plan import Condition, Plan, Problem, corollary_1
from perfedrl.theory.realized_bounds import realized
from perfedrl.theory.search import Given, cheapest
from perfedrl.theory.worst_case import Constants, constants

__all__ = [
    "Batches",
    "Bound",
    "Condition",
    "Constants",
    "EstimateMoments",
    "FixedPoint",
    "Given",
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
