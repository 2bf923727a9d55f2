"""Frames: decoding inverts encoding, and rejects everything else."""

import json
import socket
import threading
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from perfedrl.federation import frames
from perfedrl.federation.agent.daemon_client import AgentUnreachable, DaemonError, call, call_raw
from perfedrl.federation.frames import DTYPES, BadFrame, Frame, TornFrame, decode, encode, receive, send

SHAPES = [(), (0,), (3,), (2, 3), (0, 4), (1, 1, 2)]


def example() -> Frame:
    rng = np.random.default_rng(0)
    tensors = {
        "0.weight": rng.normal(size=(4, 3)).astype(np.float32),
        "theta": rng.normal(size=5),
        "on": np.ones(3, bool),
    }
    return Frame("update", {"run": "a-1", "plan": 'name = "x"\nß'}, tensors)


def raw(header, body=b"") -> bytes:
    """The bytes of a frame with an arbitrary header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


ABOUT = {"kind": "x"}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decoding_inverts_encoding(dtype, shape):
    x = np.random.default_rng(1).integers(0, 2, size=shape).astype(dtype)
    came = decode(encode(Frame("k", {"a": "b"}, {"x": x, "odd": np.zeros(3, np.uint8)})))
    assert (came.kind, came.fields) == ("k", {"a": "b"})
    assert came.tensors["x"].dtype == dtype
    assert came.tensors["x"].shape == shape
    assert came.tensors["x"].tobytes() == x.tobytes()
    assert came.tensors["x"].flags.aligned
    assert not came.tensors["x"].flags.writeable


def test_arrays_in_other_memory_layouts_keep_their_values():
    x = np.arange(6.0).reshape(2, 3)
    came = decode(encode(Frame("k", {}, {"t": x.T, "big": x.astype(">f4")}))).tensors
    np.testing.assert_array_equal(came["t"], x.T)
    np.testing.assert_array_equal(came["big"], x)


BAD = {
    "nothing": b"",
    "a long header": (2**63).to_bytes(8, "little") + b"{}",
    "no json": raw(b"{"),
    "no text": raw(b"\xff\xfe"),
    "a list": raw([]),
    "deep": raw(b"[" * 200_000),
    "no kind": raw({"__metadata__": {"a": "b"}}),
    "no metadata": raw({}),
    "a number as a field": raw({"__metadata__": {"kind": "x", "a": 1}}),
    "half a character": raw(b'{"__metadata__": {"kind": "x", "a": "\\ud800"}}'),
    "a name twice": raw(b'{"__metadata__": {"kind": "x", "kind": "y"}}'),
    "a tensor twice": raw(
        b'{"__metadata__": {"kind": "x"}, "a": %b, "a": %b}' % ((json.dumps(tensor()).encode(),) * 2), b"8" * 8
    ),
    "an unknown type": raw({"__metadata__": ABOUT, "a": tensor("C64", (1,))}, b"8" * 8),
    "a type that is none": raw({"__metadata__": ABOUT, "a": tensor(["F32"])}, b"8" * 8),
    "too long": raw({"__metadata__": ABOUT, "a": tensor("F32", (3,))}, b"8" * 8),
    "negative": raw({"__metadata__": ABOUT, "a": tensor("F32", (-2, -1))}, b"8" * 8),
    "a fraction": raw({"__metadata__": ABOUT, "a": tensor("F32", (2.0,))}, b"8" * 8),
    "true": raw({"__metadata__": ABOUT, "a": tensor("F64", (True,))}, b"8" * 8),
    "infinite": raw(
        b'{"__metadata__": {"kind": "x"}, "a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 8]}}'
    ),
    "a huge number": raw(b'{"__metadata__": {"kind": "x"}, "a": {"dtype": "F32", "shape": [' + b"9" * 9999 + b"]}}"),
    "huge and empty": raw({"__metadata__": ABOUT, "a": tensor("F32", (2**40, 2**40, 0), (0, 0))}),
    "beyond the end": raw({"__metadata__": ABOUT, "a": tensor("F32", (2**40,), (0, 2**42))}, b"8" * 8),
    "backwards": raw({"__metadata__": ABOUT, "a": tensor("F32", (0,), (8, 0))}, b"8" * 8),
    "overlapping": raw({"__metadata__": ABOUT, "a": tensor(), "b": tensor("F32", (1,), (4, 8))}, b"8" * 8),
    "a gap": raw({"__metadata__": ABOUT, "a": tensor(offsets=(4, 12))}, b"8" * 12),
    "trailing bytes": raw({"__metadata__": ABOUT, "a": tensor()}, b"8" * 9),
    "more than was asked": raw({"__metadata__": ABOUT, "a": {**tensor(), "b": 1}}, b"8" * 8),
    "neither true nor false": raw({"__metadata__": ABOUT, "a": tensor("BOOL", (8,))}, b"8" * 8),
    "a long name": raw({"__metadata__": ABOUT, "a" * 300: tensor()}, b"8" * 8),
    "a name that cannot be printed": raw({"__metadata__": ABOUT, "a\n": tensor()}, b"8" * 8),
    "too many tensors": raw({"__metadata__": ABOUT} | {str(i): tensor("U8", (0,), (0, 0)) for i in range(5000)}),
    "too many fields": raw({"__metadata__": ABOUT | {str(i): "" for i in range(70)}}),
    "many axes": raw({"__metadata__": ABOUT, "a": tensor("U8", (1,) * 40, (0, 1))}, b"8"),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_invalid_bytes_are_rejected_in_one_sentence_and_without_memory(data):
    tracemalloc.start()
    with pytest.raises(BadFrame) as error:
        decode(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert peak < 200_000 + 40 * len(data)


def test_a_frame_over_the_limit_is_rejected():
    data = encode(example())
    assert decode(data, len(data)).kind == "update"
    with pytest.raises(BadFrame, match="at most"):
        decode(data, len(data) - 1)


@pytest.mark.parametrize(
    "frame",
    [
        Frame("k", {"kind": "x"}),
        Frame("k", {"a": "\ud800"}),
        Frame("k", {}, {"x": np.zeros(2, complex)}),
        Frame("k", {}, {"": np.zeros(2)}),
        Frame("k", {}, {"x": np.asarray(["text"])}),
    ],
)
def test_a_frame_that_cannot_be_decoded_cannot_be_encoded(frame):
    with pytest.raises(BadFrame):
        encode(frame)


def survives(data: bytes) -> None:
    """Check that decoding gives a frame that can be encoded again, or BadFrame."""
    try:
        frame = decode(data)
    except BadFrame:
        return
    again = decode(encode(frame))
    assert {name: x.tobytes() for name, x in frame.tensors.items()} == {
        n: x.tobytes() for n, x in again.tensors.items()
    }


VALID = encode(example())
EDITS = st.tuples(
    st.sampled_from(["set", "set", "cut", "insert", "double"]), st.integers(0, len(VALID) - 1), st.integers(0, 255)
)


def changed(edits) -> bytes:
    data = bytearray(VALID)
    for edit, at, value in edits:
        at %= max(1, len(data))
        if edit == "set" and data:
            data[at] = value
        elif edit == "cut":
            del data[at : at + value % 8]
        elif edit == "insert":
            data.insert(at, value)
        else:
            data[at:at] = data[at : at + value]
    return bytes(data)


@examples(6000, fast=600)
@given(st.lists(EDITS, min_size=1, max_size=6))
def test_a_mutated_frame_is_rejected_or_valid(edits):
    survives(changed(edits))


@examples(3000, fast=300)
@given(st.just(b"") | st.integers(0, 199).map(lambda length: length.to_bytes(8, "little")), st.binary(max_size=300))
def test_random_bytes_are_rejected_or_valid(length, data):
    survives(length + data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "kind", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@examples(1000, fast=200)
@given(
    st.dictionaries(st.sampled_from(["__metadata__", "a", "b"]), JSON | st.just(ABOUT) | st.just(tensor())),
    st.binary(max_size=16),
)
def test_random_headers_are_rejected_or_valid(header, body):
    survives(raw(header, body))


@pytest.fixture
def pair():
    one, two = socket.socketpair()
    with one, two:
        one.settimeout(60)
        two.settimeout(60)
        yield one, two


def test_frames_follow_each_other_on_a_stream(pair):
    here, there = pair
    send(here, example())
    send(here, Frame("next"))
    here.close()
    assert receive(there).fields == example().fields
    assert receive(there) == Frame("next")
    with pytest.raises(ConnectionError, match="closed"):
        receive(there)


@pytest.mark.parametrize("keep", [1, 7, 8, 9, 100])
def test_a_stream_that_ends_within_a_frame_is_torn(pair, keep):
    here, there = pair
    here.sendall((len(VALID).to_bytes(8, "big") + VALID)[:keep])
    here.close()
    with pytest.raises(TornFrame):
        receive(there)


def test_memory_is_taken_only_for_bytes_that_arrived(pair):
    here, there = pair
    here.sendall((2**40).to_bytes(8, "big"))
    with pytest.raises(BadFrame, match="announced"):
        receive(there)
    here.sendall((frames.LIMIT - 1).to_bytes(8, "big") + b"little")
    here.close()
    tracemalloc.start()
    with pytest.raises(TornFrame):
        receive(there)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * frames.PIECE


def test_timeouts_are_raised(pair):
    here, there = pair
    there.settimeout(0.05)
    with pytest.raises(TimeoutError):
        receive(there)
    here.sendall(b"\0" * 4)
    with pytest.raises(TimeoutError):
        receive(there, deadline=time.monotonic() + 0.05)


@pytest.fixture
def answering(tmp_path, monkeypatch):
    """A socket on which a function of the connection answers one question."""
    monkeypatch.chdir(tmp_path)
    listener = socket.socket(socket.AF_UNIX)
    threads = []

    def listen(answer):
        listener.bind("s.sock")
        listener.listen()

        def serve():
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[0].start()
        return "s.sock"

    yield listen
    for thread in threads:
        thread.join(5)
    listener.close()


def test_a_question_is_answered(answering):
    path = answering(lambda c: send(c, Frame("yes", receive(c).fields)))
    assert call(path, Frame("really", {"a": "b"}), timeout=60) == Frame("yes", {"a": "b"})


def test_a_raw_answer_is_not_decoded(answering):
    reply = b"\1\2 whatever"
    path = answering(lambda c: (receive(c), frames.send_raw(c, reply)))
    assert call_raw(path, VALID, timeout=60) == reply


def test_an_error_in_the_answer_is_raised(answering):
    path = answering(lambda c: (receive(c), send(c, Frame("error", {"message": "too many."}))))
    with pytest.raises(DaemonError, match=r"^too many\.$"):
        call(path, Frame("q"), timeout=60)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda c: None, "ended before"),
        (lambda c: (receive(c), c.sendall(b"\0\0")), "ended before"),
        (lambda c: (receive(c), time.sleep(0.5)), "within 0.2 s"),
    ],
    ids=["dies", "dies over the answer", "silent"],
)
def test_a_daemon_that_does_not_answer_is_unreachable(answering, answer, why):
    path = answering(answer)
    with pytest.raises(AgentUnreachable, match=why):
        call(path, Frame("q"), timeout=0.2 if "0.2" in why else 60)


def test_a_missing_socket_is_unreachable(tmp_path):
    for path in (tmp_path / "none.sock", tmp_path / ("x" * 300)):
        with pytest.raises(AgentUnreachable, match="no agent listens"):
            call(path, Frame("q"))
