"""Parametrize a test so that `make test` runs a part of its cases and `make test-all` runs all of them."""

import pytest


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
