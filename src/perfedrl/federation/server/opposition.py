"""Agents whose uploads point against all others, round after round: what a sign flip looks like within all limits."""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

ROUNDS_IN_A_ROW = 20
"""The number of rounds in a row after which an agent that opposes the others is named."""
SHARE = 0.5
"""The share of the others' agreement with each other from which on an agent's disagreement with them is opposition."""


def alignments(displacements: Sequence[Float[np.ndarray, "n *rest"]]) -> Float[np.ndarray, "n n"]:
    """The cosines between the agents' displacements, given leaf by leaf and stacked; NaN for one that did not move."""
    flat = [(x if x.dtype.kind == "f" else x.astype(np.float64)).reshape(len(x), -1) for x in displacements]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        products = np.sum([x @ x.T for x in flat], axis=0, dtype=np.float64)
        lengths = np.sqrt(np.diag(products))
        return products / np.outer(lengths, lengths)


def opposing(cosines: Float[np.ndarray, "n n"]) -> list[bool | None]:
    """Whether each agent opposes the others: None for one that did not move, or has fewer than two others that did.

    The mean cosine of the agent with the others is then negative, and at least SHARE as large as the mean cosine of
    the others with each other. An agent that flips its sign has the same size; where agents merely differ, or where
    training has come to rest, others agree too little with each other for any agent to oppose them.
    """
    moved = np.isfinite(np.diag(cosines))
    return [_opposes(cosines, i, np.flatnonzero(moved & (np.arange(len(moved)) != i))) for i in range(len(moved))]


def _opposes(cosines: np.ndarray, agent: int, others: np.ndarray) -> bool | None:
    if len(others) < 2 or not np.isfinite(cosines[agent, agent]):
        return None
    among = cosines[np.ix_(others, others)]
    agreement = (among.sum() - np.trace(among)) / (len(others) * (len(others) - 1))
    return bool(agreement > 0 and cosines[agent, others].mean() < -SHARE * agreement)


def counted(counts: Mapping[str, int], names: Sequence[str], opposes: Sequence[bool | None]) -> dict[str, int]:
    """The number of rounds in a row in which each agent opposed the others; rounds without a verdict do not count."""
    found = dict(counts)
    for name, verdict in zip(names, opposes, strict=True):
        if verdict is not None:
            found[name] = found.get(name, 0) + 1 if verdict else 0
    return found
