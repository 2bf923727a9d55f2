"""Rounds that wait for no agent: the uploads that arrive in a round, and the rounds whose messages they are from.

Such a round closes with its first upload. An agent that is still at work answers a later one, with its upload of the
round that it was asked in. Which upload arrived when is part of a run's state and of its provenance (`ARRIVALS`);
`replay` trains with the same order again.
"""

from collections.abc import Mapping
from typing import NamedTuple

from perfedrl.federation.frames import NEVER, BadFrame, decode
from perfedrl.federation.server.answers import LONGEST_COUNT

ARRIVALS = "arrivals"


class UploadArrival(NamedTuple):
    """An upload that entered the server's state in a round: the agent's number, and the round of its message."""

    round: int
    agent: int
    since: int


def uploads_by_round(
    uploads: Mapping[str, bytes], received: Mapping[str, int], now: int
) -> dict[int, dict[str, bytes]]:
    """The uploads that arrived by the round of `now`, by the rounds that they name.

    Copies of uploads that were `received` before are left out. An upload that names no round until now is among those
    of the current one, where it will be rejected.
    """
    found: dict[int, dict[str, bytes]] = {}
    for name, data in uploads.items():
        since = round_in(data)
        if since is None or since > now:
            since = now
        elif since <= received.get(name, NEVER):
            continue
        found.setdefault(since, {})[name] = data
    return dict(sorted(found.items()))


def round_in(data: bytes) -> int | None:
    """The round that an answer names; None if it names none."""
    try:
        said = decode(data).fields.get("round", "")
    except BadFrame:
        return None
    return int(said) if said.isascii() and said.isdigit() and len(said) <= LONGEST_COUNT else None
