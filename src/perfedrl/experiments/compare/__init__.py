"""Personalization mechanisms held against each other at matched budgets."""

from perfedrl.experiments.compare.methods import METHODS, Method
from perfedrl.experiments.compare.plan import Plan, load_plans
from perfedrl.experiments.compare.study import Comparison, Entry, compare
from perfedrl.experiments.compare.tuning import Trial

__all__ = ["METHODS", "Comparison", "Entry", "Method", "Plan", "Trial", "compare", "load_plans"]
