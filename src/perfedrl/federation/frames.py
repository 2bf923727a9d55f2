"""What crosses a wire: a kind, some fields of text and some tensors, as safetensors bytes; read with distrust.

A bridge between processes needs no more than this file, so it imports nothing that takes long to load.
"""

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
"""Bytes of the largest frame."""
LONGEST_HEADER, MOST_TENSORS, MOST_FIELDS, LONGEST_NAME, MOST_AXES = 2**20, 4096, 64, 256, 16
PIECE = 2**18
"""Bytes that are read at a time: what a frame claims to be costs nothing until it comes."""

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
"""The types of numbers that may cross, by their names in safetensors."""


class BadFrame(UserError):  # noqa: N818
    """Bytes that are no frame, or a frame that must not be sent."""


class TornFrame(BadFrame):
    """The stream ended within a frame."""


@dataclass(frozen=True)
class Frame:
    """One message between two processes."""

    kind: str
    fields: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)


def encode(frame: Frame) -> bytes:
    """A frame as safetensors bytes; its kind and fields are their metadata."""
    if "kind" in frame.fields:
        raise BadFrame("a frame's kind is no field of it")
    about = _checked_fields({"kind": frame.kind, **frame.fields})
    arrays = {name: np.asarray(x, order="C") for name, x in frame.tensors.items()}
    if len(arrays) > MOST_TENSORS:
        raise BadFrame(f"a frame holds at most {MOST_TENSORS} tensors; this one has {len(arrays)}")
    for name, x in arrays.items():
        _check_name(name)
        if x.dtype.newbyteorder("<") not in DTYPES.values() or x.ndim > MOST_AXES:
            raise BadFrame(f"the tensor {name!r} cannot be sent: {x.ndim} axes of {x.dtype}")
    return save(arrays, metadata=about)


def decode(data: bytes, limit: int = LIMIT) -> Frame:
    """The frame that bytes hold; its arrays are read-only views on them. Takes no memory for what is only claimed."""
    if len(data) > limit:
        raise BadFrame(f"a frame has at most {limit} bytes; this one has {len(data)}")
    header, start = _header(data)
    about = _checked_fields(header.pop("__metadata__", {}))
    if "kind" not in about:
        raise BadFrame("the frame does not say of what kind it is")
    if len(header) > MOST_TENSORS:
        raise BadFrame(f"a frame holds at most {MOST_TENSORS} tensors; this one has {len(header)}")
    body = memoryview(data).toreadonly()[start:]
    places = {name: _place(name, entry, len(body)) for name, entry in header.items()}
    end = 0
    for _, _, begin, stop in sorted(places.values(), key=lambda place: place[2:]):
        if begin != end:
            raise BadFrame("the frame's tensors overlap or leave gaps")
        end = stop
    if end != len(body):
        raise BadFrame(f"the frame's tensors end at byte {end} of {len(body)}")
    tensors = {name: _array(name, body, *place) for name, place in places.items()}
    return Frame(about.pop("kind"), about, tensors)


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """What the bytes say of themselves, and where the tensors start."""
    if len(data) < 8:
        raise BadFrame(f"{len(data)} bytes are no frame")
    length = int.from_bytes(data[:8], "little")
    if length > min(LONGEST_HEADER, len(data) - 8):
        raise BadFrame(f"the frame claims a header of {length} bytes, which is too long")
    try:
        header = json.loads(bytes(data[8 : 8 + length]).decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except BadFrame:
        raise
    except (ValueError, RecursionError) as error:
        raise BadFrame("the frame's header cannot be read") from error
    if not isinstance(header, dict):
        raise BadFrame("the frame's header is no table")
    return header, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise BadFrame("the frame's header names something twice")
    return table


def _no_number(text: str) -> None:
    raise BadFrame(f"the frame's header holds {text}")


def _checked_fields(fields: Any) -> dict[str, str]:
    if not isinstance(fields, dict) or len(fields) > MOST_FIELDS:
        raise BadFrame(f"a frame's fields are a table of at most {MOST_FIELDS}")
    for name, value in fields.items():
        _check_name(name)
        if not isinstance(value, str) or not _encodable(value) or len(value) > LONGEST_HEADER:
            raise BadFrame(f"the field {name!r} of the frame is no text")
    return dict(fields)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise BadFrame(f"a name in a frame has 1 to {LONGEST_NAME} printable characters")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can spell
        return False
    return True


def _place(name: str, entry: Any, size: int) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """The type, the shape, the first byte and the end of a tensor, where it lies within so many bytes."""
    _check_name(name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise BadFrame(f"the frame does not describe its tensor {name!r} by dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise BadFrame(f"the tensor {name!r} has a type that no frame holds; known: {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _counts(shape, MOST_AXES) or not _counts(offsets, 2) or len(offsets) != 2:
        raise BadFrame(f"the shape or the place of the tensor {name!r} is none")
    begin, end = offsets
    if not begin <= end <= size or math.prod(shape) * dtype.itemsize != end - begin:
        raise BadFrame(f"the tensor {name!r} does not fit its place in the frame")
    return dtype, tuple(shape), begin, end


def _counts(values: Any, most: int) -> bool:
    """Whether this is a short list of whole numbers that a size can be."""
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**48 for x in values)
    )


def _array(name: str, body: memoryview, dtype: np.dtype, shape: tuple[int, ...], begin: int, end: int) -> np.ndarray:
    flat = np.frombuffer(body[begin:end], np.uint8)
    if dtype.kind == "b" and flat.size and flat.max() > 1:
        raise BadFrame(f"the tensor {name!r} holds something else than true and false")
    try:
        array = flat.view(dtype).reshape(shape)
    except ValueError as error:  # no numbers at all, along axes too long for any array
        raise BadFrame(f"the shape of the tensor {name!r} is none") from error
    if not array.flags.aligned:
        array = array.copy()
        array.flags.writeable = False
    return array


def send(sock: socket.socket, frame: Frame) -> None:
    """Write a frame to a stream: its length as 8 bytes, the greatest first, then its bytes."""
    send_raw(sock, encode(frame))


def send_raw(sock: socket.socket, data: bytes) -> None:
    """Write a frame that is encoded already."""
    sock.sendall(len(data).to_bytes(8, "big"))
    sock.sendall(data)


def receive(sock: socket.socket, limit: int = LIMIT, deadline: float | None = None) -> Frame:
    """Read a frame from a stream; the errors are those of `receive_raw` and of `decode`."""
    return decode(receive_raw(sock, limit, deadline), limit)


def receive_raw(sock: socket.socket, limit: int = LIMIT, deadline: float | None = None) -> bytes:
    """The bytes of the next frame in a stream.

    A stream that ends between frames is a ConnectionError, one that ends within a frame a TornFrame; a timeout of the
    socket passes through, and so does that of `deadline`, a moment of `time.monotonic`.
    """
    head = _read(sock, 8, deadline)
    if not head:
        raise ConnectionError("the other side closed the connection")
    if len(head) < 8:
        raise TornFrame("the stream ended within the length of a frame")
    length = int.from_bytes(head, "big")
    if length > limit:
        raise BadFrame(f"a frame of {length} bytes was announced; at most {limit} are taken")
    data = _read(sock, length, deadline)
    if len(data) < length:
        raise TornFrame(f"the stream ended after {len(data)} of a frame's {length} bytes")
    return data


def _read(sock: socket.socket, count: int, deadline: float | None) -> bytes:
    """So many bytes, or fewer where the stream ends before."""
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
