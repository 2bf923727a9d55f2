"""Errors that users can cause: one sentence each, raised before anything compiles or samples where possible."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Invalid input: what was expected, what came, and what to do. The command line prints it and exits with code 2."""


class EnvironmentFailureError(UserError):
    """An agent's environment failed while it was played; the fleet can continue without the agent for a round."""


class DivergenceError(UserError):
    """Parameters became infinite or nan in training."""


FAILURES = (Exception, SystemExit)
"""What code of the user's may raise; drivers of robots end with sys.exit."""


def in_one_line(error: BaseException) -> str:
    """Return the kind of an exception and the first line of its message."""
    first = str(error).strip().partition("\n")[0].strip()
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the known names closest to a word, or else a list of all known names."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(name) for name in close) + "?"
    return "; known: " + ", ".join(known) if known else ""
