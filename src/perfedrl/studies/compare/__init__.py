"""Comparison of personalization mechanisms at equal budgets."""

from perfedrl.studies.compare.comparison import Comparison, Entry, NoResultsError, compare
from perfedrl.studies.compare.methods import METHODS, Method
from perfedrl.studies.compare.own_methods import find_method
from perfedrl.studies.compare.plan import ComparisonPlan, load_plans
from perfedrl.studies.compare.tuning import Trial

__all__ = [
    "METHODS",
    "Comparison",
    "ComparisonPlan",
    "Entry",
    "Method",
    "NoResultsError",
    "Trial",
    "compare",
    "find_method",
    "load_plans",
]
