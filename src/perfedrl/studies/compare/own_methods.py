"""Methods of one's own in a comparison: a class `module:Name` by a convention, or a `Method` that says all itself."""

from collections.abc import Iterable
from functools import partial

from perfedrl.algorithms import ALGORITHMS, Algorithm
from perfedrl.errors import UserError, nearest
from perfedrl.own_modules import imported
from perfedrl.studies.compare.methods import METHODS, STEPS, Counts, Method

BATCHES = ("m", "m_in", "m_h", "m_out")
"""Names of settings that are numbers of trajectories."""

HELP = "docs/algorithms/own.md says how a method of your own is compared"


def find_method(name: str) -> Method:
    """The method of a name: one of the library's, or the user's own `module:Name`.

    A class that follows the algorithm contract is compared by a convention (`method_of_class`); an object `Method`
    says itself how it spends a round's trajectories and which settings are searched.
    """
    if name in METHODS:
        return METHODS[name]
    if ":" not in name:
        raise UserError(
            f'there is no method {name!r} (methods of your own are written "module:Name"){nearest(name, METHODS)}'
        )
    found = imported(name, "method")
    if isinstance(found, Method):
        return found
    if isinstance(found, type) and issubclass(found, Algorithm):
        return method_of_class(name, found)
    raise UserError(
        f"the method {name!r} must be a class that follows the algorithm contract, or a Method; it is a "
        f"{type(found).__name__}; {HELP}"
    )


def is_own(name: str) -> bool:
    """Whether a name is that of a user's own method."""
    return name not in METHODS


def in_order(names: Iterable[str]) -> list[str]:
    """Names without duplicates: the library's methods in their order, then the user's own."""
    given = dict.fromkeys(names)
    return [name for name in METHODS if name in given] + [name for name in given if is_own(name)]


def method_of_class(name: str, kind: type[Algorithm]) -> Method:
    """The method of a class: `alpha` and `beta` are searched, `local_steps` is the plan's, batches share the budget.

    All settings among `m`, `m_in`, `m_h` and `m_out` get one size, the largest whose `trajectories_per_round` is within
    the budget. Other settings keep their defaults.
    """
    taken = ALGORITHMS.parameters(name)
    steps = tuple(step for step in STEPS if step in taken)
    known = {*steps, *BATCHES, "local_steps"}
    unset = [key for key, setting in taken.items() if key not in known and setting.default is setting.empty]
    if unset:
        raise UserError(
            f"the method {name!r} needs a value of {unset[0]!r}: give it a default, or name a Method that sets or "
            f"searches it; {HELP}"
        )
    return Method(name, name, partial(shared_budget, kind, steps, tuple(taken)), steps=steps)


def shared_budget(
    kind: type[Algorithm], steps: tuple[str, ...], settings: tuple[str, ...], budget: int, local_steps: int
) -> Counts:
    """Counts of an algorithm: the plan's local steps, and equal batches as large as the budget allows."""
    counts = {"local_steps": local_steps} if "local_steps" in settings else {}
    batches = [name for name in BATCHES if name in settings]
    if not batches:
        return counts

    def affordable(m: int) -> bool:
        made = kind(**dict.fromkeys(steps, 0.1), **counts, **dict.fromkeys(batches, m))
        return made.trajectories_per_round <= budget

    # The largest affordable size lies in [low, high).
    low, high = 0, budget + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if affordable(middle) else (low, middle)
    return counts | dict.fromkeys(batches, low)
