"""Frames, the messages between processes: a kind, text fields and tensors, encoded as safetensors bytes.

Decoding trusts nothing: every size, name and offset is checked. Imports nothing that takes long to load, since a bridge
between processes needs only this file.
"""

import hashlib
import json
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors.numpy import save

from perfedrl.errors import UserError

LIMIT = 256 * 2**20
"""The largest frame in bytes."""
LONGEST_HEADER, MOST_TENSORS, MOST_FIELDS, LONGEST_NAME, MOST_AXES = 2**20, 4096, 64, 256, 16
FAILED_EPISODES = "failed_episodes"
"""The field of an upload with the number of episodes that failed and were drawn again."""
COUNTED, NEVER = "counted", -1
"""The field of a question with the last round whose upload the server counted, of each agent; `NEVER` for none."""
PIECE = 2**18
"""Bytes that are read at a time: memory is taken only for bytes that have arrived."""

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype(bool),
}
"""The supported number types, by their names in safetensors."""


class BadFrame(UserError):  # noqa: N818
    """Invalid bytes, or a frame that cannot be encoded."""


class TornFrame(BadFrame):
    """The stream ended in the middle of a frame."""


@dataclass(frozen=True)
class Frame:
    """One message between two processes."""

    kind: str
    fields: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)


def encode(frame: Frame) -> bytes:
    """Encode a frame as safetensors bytes, with its kind and fields as metadata."""
    if "kind" in frame.fields:
        raise BadFrame("'kind' cannot be the name of a field")
    about = _checked_fields({"kind": frame.kind, **frame.fields})
    arrays = {name: np.asarray(x, order="C") for name, x in frame.tensors.items()}
    if len(arrays) > MOST_TENSORS:
        raise BadFrame(f"expected at most {MOST_TENSORS} tensors in a frame, got {len(arrays)}")
    for name, x in arrays.items():
        _check_name(name)
        if x.dtype.newbyteorder("<") not in DTYPES.values() or x.ndim > MOST_AXES:
            raise BadFrame(f"tensor {name!r} cannot be sent: it has {x.ndim} axes of {x.dtype}")
    return save(arrays, metadata=about)


def decode(data: bytes, limit: int = LIMIT) -> Frame:
    """Decode a frame; its arrays are read-only views of the bytes. Claimed sizes are checked before memory is taken."""
    if len(data) > limit:
        raise BadFrame(f"expected a frame of at most {limit} bytes, got {len(data)}")
    header, start = _header(data)
    about = _checked_fields(header.pop("__metadata__", {}))
    if "kind" not in about:
        raise BadFrame("the frame has no kind")
    if len(header) > MOST_TENSORS:
        raise BadFrame(f"expected at most {MOST_TENSORS} tensors in a frame, got {len(header)}")
    body = memoryview(data).toreadonly()[start:]
    ranges = {name: _byte_range(name, entry, len(body)) for name, entry in header.items()}
    end = 0
    for _, _, begin, stop in sorted(ranges.values(), key=lambda place: place[2:]):
        if begin != end:
            raise BadFrame("the frame's tensors overlap or leave gaps")
        end = stop
    if end != len(body):
        raise BadFrame(f"the frame's tensors end at byte {end} of {len(body)}; expected no trailing bytes")
    tensors = {name: _array(name, body, *place) for name, place in ranges.items()}
    return Frame(about.pop("kind"), about, tensors)


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """Parse the header; return it and the offset of the tensors."""
    if len(data) < 8:
        raise BadFrame(f"expected a frame of at least 8 bytes, got {len(data)}")
    length = int.from_bytes(data[:8], "little")
    if length > min(LONGEST_HEADER, len(data) - 8):
        raise BadFrame(f"the frame's header of {length} bytes is too long")
    try:
        header = json.loads(
            bytes(data[8 : 8 + length]).decode(), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except BadFrame:
        raise
    except (ValueError, RecursionError) as error:
        raise BadFrame("the frame's header cannot be read") from error
    if not isinstance(header, dict):
        raise BadFrame("the frame's header is not a JSON object")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; reject duplicate keys."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise BadFrame("the frame's header has a duplicate key")
    return table


def _no_constant(text: str) -> None:
    """Reject NaN and Infinity, which are not JSON."""
    raise BadFrame(f"the frame's header contains {text}")


def _checked_fields(fields: Any) -> dict[str, str]:
    """Check the number, names and values of fields."""
    if not isinstance(fields, dict) or len(fields) > MOST_FIELDS:
        raise BadFrame(f"the frame's fields must be an object with at most {MOST_FIELDS} entries")
    for name, value in fields.items():
        _check_name(name)
        if not isinstance(value, str) or not _encodable(value) or len(value) > LONGEST_HEADER:
            raise BadFrame(f"the frame's field {name!r} is not valid text")
    return dict(fields)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise BadFrame(f"names in a frame must have 1 to {LONGEST_NAME} printable characters")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell
        return False
    return True


def _byte_range(name: str, entry: Any, size: int) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """The type, shape, first byte and end of a tensor, checked against the size of the data."""
    _check_name(name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadFrame(f"tensor {name!r} must be described by dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise BadFrame(f"tensor {name!r} has an unsupported type; supported: {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _counts(shape, MOST_AXES) or not _counts(offsets, 2) or len(offsets) != 2:
        raise BadFrame(f"tensor {name!r} has an invalid shape or byte range")
    begin, end = offsets
    if not begin <= end <= size or math.prod(shape) * dtype.itemsize != end - begin:
        raise BadFrame(f"the byte range of tensor {name!r} does not match its shape, or lies outside the frame")
    return dtype, tuple(shape), begin, end


def _counts(values: Any, most: int) -> bool:
    """Whether `values` is a list of at most `most` sizes: whole numbers from 0 to 2**48 - 1."""
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**48 for x in values)
    )


def _array(name: str, body: memoryview, dtype: np.dtype, shape: tuple[int, ...], begin: int, end: int) -> np.ndarray:
    flat = np.frombuffer(body[begin:end], np.uint8)
    if dtype.kind == "b" and flat.size and flat.max() > 1:
        raise BadFrame(f"tensor {name!r} has values other than true and false")
    try:
        array = flat.view(dtype).reshape(shape)
    except ValueError as error:  # no elements, but axes too long for an array
        raise BadFrame(f"tensor {name!r} has an invalid shape") from error
    if not array.flags.aligned:
        array = array.copy()
        array.flags.writeable = False
    return array


def digest(tensors: Mapping[str, np.ndarray], *texts: str) -> str:
    """A digest of tensors by their names, types, shapes and bits, together with some texts."""
    sha = hashlib.sha256(repr(texts).encode())
    for name in sorted(tensors):
        x = np.asarray(tensors[name], order="C")
        sha.update(repr((name, x.dtype.str, x.shape)).encode())
        sha.update(x.tobytes())
    return sha.hexdigest()


def send(sock: socket.socket, frame: Frame) -> None:
    """Write a frame to a stream: its length as 8 big-endian bytes, then its bytes."""
    send_raw(sock, encode(frame))


def send_raw(sock: socket.socket, data: bytes) -> None:
    """Write an encoded frame to a stream."""
    sock.sendall(len(data).to_bytes(8, "big"))
    sock.sendall(data)


def receive(sock: socket.socket, limit: int = LIMIT, deadline: float | None = None) -> Frame:
    """Read a frame from a stream; raises the errors of `receive_raw` and `decode`."""
    return decode(receive_raw(sock, limit, deadline), limit)


def receive_raw(sock: socket.socket, limit: int = LIMIT, deadline: float | None = None) -> bytes:
    """Read the bytes of the next frame from a stream.

    Raises ConnectionError if the stream ends between frames, TornFrame if it ends within one, and TimeoutError at the
    socket's timeout or at `deadline`, a moment of `time.monotonic`.
    """
    head = _read(sock, 8, deadline)
    if not head:
        raise ConnectionError("the other side closed the connection")
    if len(head) < 8:
        raise TornFrame("the stream ended in the length of a frame")
    length = int.from_bytes(head, "big")
    if length > limit:
        raise BadFrame(f"expected a frame of at most {limit} bytes, but {length} were announced")
    data = _read(sock, length, deadline)
    if len(data) < length:
        raise TornFrame(f"the stream ended after {len(data)} of a frame's {length} bytes")
    return data


def _read(sock: socket.socket, count: int, deadline: float | None) -> bytes:
    """Read `count` bytes, or fewer if the stream ends before."""
    data = bytearray()
    while len(data) < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left)
        piece = sock.recv(min(count - len(data), PIECE))
        if not piece:
            break
        data += piece
    return bytes(data)
