"""A hostile agent: stands between the bridge and a real daemon, and changes its uploads, in another way each round.

Run as `python lying_agent.py REAL_SOCKET OWN_SOCKET`; MANIPULATIONS lists what it does, round by round.
"""

import socket
import sys

import numpy as np

from perfedrl.federation.agent.daemon_client import call_raw
from perfedrl.federation.frames import Frame, decode, encode, receive_raw, send_raw

GIGABYTE = 2**30
LAST: dict[str, bytes] = {}


def spoiled(change):
    """Change the tensors of an upload."""

    def spoil(reply, data):
        return encode(Frame(reply.kind, reply.fields, {name: change(x) for name, x in reply.tensors.items()}))

    return spoil


def replayed(reply, data):
    """Repeat the upload of the last round."""
    return LAST["honest"]


MANIPULATIONS = {
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
REASONS = {
    "NaN": "not finite",
    "shape": "expected float32",
    "dtype": "expected float32",
    "random bytes": "cannot be read",
    "replay": "replayed",
    "scaled": "times the median",
    "extra": "unknown",
    "nothing": "cannot be read",
}
"""Part of the reason in the server's log, for each manipulation."""


def answer(real, data):
    """The real daemon's answer, manipulated if it is an upload."""
    reply_bytes = call_raw(real, data)
    reply = decode(reply_bytes)
    if reply.kind != "upload":
        return reply_bytes
    way = list(MANIPULATIONS)[int(reply.fields["round"]) % len(MANIPULATIONS)]
    said = MANIPULATIONS[way](reply, reply_bytes)
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
