"""Comparison of personalization mechanisms at equal budgets."""

from perfedrl.studies.compare.comparison import Comparison, Entry, compare
from perfedrl.studies.compare.methods import METHODS, Method
from perfedrl.studies.compare.plan import ComparisonPlan, load_plans
from perfedrl.studies.compare.tuning import Trial

__all__ = ["METHODS", "Comparison", "ComparisonPlan", "Entry", "Method", "Trial", "compare", "load_plans"]
