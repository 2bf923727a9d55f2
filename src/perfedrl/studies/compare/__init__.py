"""Personalization mechanisms held against each other at matched budgets."""

from perfedrl.studies.compare.comparison import Comparison, Entry, compare
from perfedrl.studies.compare.methods import METHODS, Method
from perfedrl.studies.compare.plan import Plan, load_plans
from perfedrl.studies.compare.tuning import Trial

__all__ = ["METHODS", "Comparison", "Entry", "Method", "Plan", "Trial", "compare", "load_plans"]
