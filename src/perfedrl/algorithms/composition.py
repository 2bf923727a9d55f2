"""Composition of wrappers around an algorithm: their order, and the combinations that are rejected."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from perfedrl.algorithms.aggregation import Robust
from perfedrl.algorithms.attacks import Attacked
from perfedrl.algorithms.base import Algorithm
from perfedrl.algorithms.control_variate import ControlVariate
from perfedrl.algorithms.fedopt import FedOpt
from perfedrl.algorithms.personal import Personal
from perfedrl.algorithms.private import Private
from perfedrl.algorithms.wrapper import Wrapper
from perfedrl.errors import UserError

ORDER: Mapping[type[Wrapper], str] = {
    Personal: "keeps parameters with the agents, which must not be clipped, noised or compared with other uploads",
    Private: "clips and noises what an agent sends, before the server sees it",
    Robust: "combines the protected uploads into one",
    FedOpt: "steps along the displacement of the combined upload",
    ControlVariate: "corrects what agents send and what the server steps along, so it goes around both",
    Attacked: "replaces uploads on their way from the agents to the server, so it goes around all of them",
}
"""The wrappers from inside to outside, each with the reason for its place."""


class Layer(NamedTuple):
    """A wrapper to put around an algorithm: its class, and its arguments after the inner algorithm."""

    kind: type[Wrapper]
    settings: Mapping[str, Any]


class Composition(NamedTuple):
    """An algorithm, the wrappers to put around it, and whether the server averages normalization moments with it."""

    algorithm: Algorithm
    kinds: tuple[type[Wrapper], ...]
    averages_moments: bool = False


class Conflict(NamedTuple):
    """A combination that is rejected: a condition, the wrappers that it excludes, and the reason."""

    condition: Callable[[Composition], bool]
    excludes: tuple[type[Wrapper], ...]
    reason: str


def has_empty_uploads(composition: Composition) -> bool:
    """Whether agents send nothing in some rounds."""
    return composition.algorithm.uploads_may_be_empty


def has_control_variate(composition: Composition) -> bool:
    """Whether displacements are remembered from round to round."""
    return ControlVariate in composition.kinds


def has_partial_uploads(composition: Composition) -> bool:
    """Whether the algorithm's own uploads are something else than whole messages."""
    return not composition.algorithm.uploads_whole_messages


def averages_moments(composition: Composition) -> bool:
    """Whether messages hold normalization moments that the server averages."""
    return composition.averages_moments


def has_auxiliaries(composition: Composition) -> bool:
    """Whether uploads hold numbers beside what is learned."""
    return composition.algorithm.uploads_auxiliaries


def averages_by_choice(composition: Composition) -> bool:
    """Whether every upload belongs to one of several shared parameters."""
    return composition.algorithm.averages_by_choice


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        has_auxiliaries,
        (Private, ControlVariate),
        "agents of {name} send the moments of their optimizer or the number of the round, which [privacy] would noise "
        'and [control_variate] would correct: set optimizer_state = "personal" or "reset", and leave out anneal',
    ),
    Conflict(
        has_empty_uploads,
        (Private, Attacked, Robust),
        "agents of {name} send nothing in some rounds, which [privacy], [attack] and every [aggregation] but the mean "
        "would take for an upload: leave these out, or take fedavg-pg",
    ),
    Conflict(
        has_control_variate,
        (Private, Attacked, Robust),
        "a [control_variate] remembers displacements as they are: leave it out, or [privacy], [attack] and every "
        "[aggregation] but the mean",
    ),
    Conflict(
        has_partial_uploads,
        (Personal,),
        '[normalization] with "local" moments keeps a part of a message with the agents, and {name} has uploads of its '
        'own: make them "federated", or take fedavg-pg',
    ),
    Conflict(
        averages_by_choice,
        (Private, Robust, FedOpt, ControlVariate),
        "agents of {name} choose one of several initializations and say which, and [privacy], [server], "
        "[control_variate] and every [aggregation] but the mean would mix these: leave them out, or take fedavg-pg",
    ),
    Conflict(
        averages_moments,
        (ControlVariate, FedOpt),
        '[normalization] with "federated" moments averages them round by round, which [control_variate] and [server] '
        'would change: make them "local", or leave these out',
    ),
)
"""Combinations that would not do what their tables say."""


def compose(
    algorithm: Algorithm, layers: Sequence[Layer], *, name: str | None = None, averages_moments: bool = False
) -> Algorithm:
    """Put wrappers around an algorithm, the first layer innermost.

    Raise `UserError` if the layers are not in `ORDER`, if one occurs twice, or if some exclude each other. `name` is
    the algorithm's name in error messages; `averages_moments` says whether messages hold normalization moments that the
    server averages.
    """
    composition = Composition(algorithm, tuple(layer.kind for layer in layers), averages_moments)
    check_order(composition.kinds)
    check_conflicts(composition, name or type(algorithm).__name__)
    for kind, settings in layers:
        algorithm = kind(algorithm, **settings)
    return algorithm


def check_order(kinds: Sequence[type[Wrapper]]) -> None:
    """Check that wrappers stand in `ORDER`, each at most once."""
    places = list(ORDER)
    for kind in kinds:
        if kind not in places:
            known = ", ".join(x.__name__ for x in places)
            raise UserError(f"{kind.__name__} has no place in the order of wrappers; known are {known}")
    for inner, outer in itertools.pairwise(kinds):
        if inner is outer:
            raise UserError(f"an algorithm has at most one {inner.__name__}; there are two")
        if places.index(inner) > places.index(outer):
            raise UserError(f"{outer.__name__} goes inside {inner.__name__}: it {ORDER[outer]}")


def excludes(kind: type[Wrapper], composition: Composition) -> bool:
    """Whether a wrapper cannot be put around the algorithm."""
    return any(kind in conflict.excludes and conflict.condition(composition) for conflict in CONFLICTS)


def check_conflicts(composition: Composition, name: str) -> None:
    """Check that no wrapper is excluded by the algorithm or by another wrapper."""
    for conflict in CONFLICTS:
        if set(composition.kinds) & set(conflict.excludes) and conflict.condition(composition):
            raise UserError(conflict.reason.format(name=name))
