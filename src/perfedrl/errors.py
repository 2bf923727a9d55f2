"""The one error that a user can cause: a clear sentence, raised before anything compiles or samples."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """What was expected, what came, and what to do about it. The command line prints it and exits with code 2."""


class EnvironmentFailureError(UserError):
    """An agent's own environment failed in the middle of its work: the fleet can go on without it for a round."""


class DivergenceError(UserError):
    """Training left what numbers can hold."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the known names closest to a word, or the list of all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(name) for name in close) + "?"
    return "; known: " + ", ".join(known) if known else ""
