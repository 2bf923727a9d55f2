"""An agent that lies: stands before a real daemon and spoils its uploads, each round in another way.

Run as `python lying_agent.py REAL_SOCKET OWN_SOCKET`; WAYS says what it does in which round.
"""

import socket
import sys

import numpy as np

from perfedrl.federation.agent.daemon_client import call_raw
from perfedrl.federation.frames import Frame, decode, encode, receive_raw, send_raw

GIGABYTE = 2**30
LAST: dict[str, bytes] = {}


def spoiled(change):
    """The upload with its tensors changed."""

    def spoil(reply, data):
        return encode(Frame(reply.kind, reply.fields, {name: change(x) for name, x in reply.tensors.items()}))

    return spoil


def replayed(reply, data):
    """The upload of the round before."""
    return LAST["honest"]


WAYS = {
    "NaN": spoiled(lambda x: np.full_like(x, np.nan)),
    "shape": spoiled(lambda x: x[:-1].copy()),
    "dtype": spoiled(lambda x: x.astype(np.float64)),
    "random bytes": lambda reply, data: np.random.default_rng(0).bytes(len(data)),
    "replay": replayed,
    "scaled": spoiled(lambda x: x * np.float32(1e6) + np.float32(1e3)),
    "extra": lambda reply, data: encode(Frame(reply.kind, reply.fields, {**reply.tensors, "more": np.zeros(3)})),
    "nothing": lambda reply, data: b"",
    "gigabyte": lambda reply, data: bytes(GIGABYTE),
}
SAID = {
    "NaN": "not finite",
    "shape": "must be",
    "dtype": "must be",
    "random bytes": "cannot be read",
    "replay": "replayed",
    "scaled": "times the median",
    "extra": "unknown",
    "nothing": "cannot be read",
}
"""What the server's log says of each."""


def answer(real, data):
    reply_bytes = call_raw(real, data)
    reply = decode(reply_bytes)
    if reply.kind != "upload":
        return reply_bytes
    way = list(WAYS)[int(reply.fields["round"]) % len(WAYS)]
    said = WAYS[way](reply, reply_bytes)
    LAST["honest"] = reply_bytes
    return said


def main(real, own):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(own)
        listening.listen()
        while True:
            connection, _ = listening.accept()
            with connection:
                try:
                    send_raw(connection, answer(real, receive_raw(connection)))
                except (OSError, ValueError) as error:
                    print(error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
