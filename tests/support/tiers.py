"""What `make test` and `make test-all` try: some or all cases of a test, few or many examples of a property."""

import os

import pytest
from hypothesis import settings

FEW = 2
"""Examples of a property in `make test`, where each of them may compile."""


def runs_slow_tests() -> bool:
    """Whether this session runs the slow tests too; conftest.py says so before test files are imported."""
    return os.environ.get("PERFEDRL_TEST_TIER") == "all"


def examples(many, fast=FEW):
    """Try a property on so many examples, in `make test` on fewer."""
    return settings(max_examples=many if runs_slow_tests() else min(many, fast))


def some_slow(cases, fast):
    """All cases as parameters; those that are not among the fast ones get the marker `slow`.

    A case is a single value, or a tuple of values for several parameters.
    """
    unknown = [case for case in fast if case not in list(cases)]
    assert not unknown, f"no such cases: {unknown}"
    return [parameters(case) if case in fast else parameters(case, pytest.mark.slow) for case in cases]


def parameters(case, *marks):
    """One case as pytest takes it."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
