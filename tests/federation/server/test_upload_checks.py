"""Checks of uploads: bad ones of every kind are rejected, long ones shortened, repeated bad ones lead to quarantine."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfedrl.errors import UserError
from perfedrl.federation.frames import Frame, encode
from perfedrl.federation.server import upload_checks
from perfedrl.federation.server.upload_checks import (
    QUARANTINED,
    Expected,
    Failed,
    Gate,
    Refused,
    displacement,
    read_upload,
)

MESSAGE = {"0.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "0.bias": np.ones(4, np.float32)}
FIELDS = {"run": "run-1", "generation": "2", "round": "7"}
EXPECTED = Expected("run-1", 2, 7, MESSAGE)


def sent(far=0.1, fields=FIELDS, kind="upload", **tensors) -> bytes:
    """An upload at some distance from the message; tensors replace its own, and None leaves one out."""
    step = np.float32(far / math.sqrt(sum(x.size for x in MESSAGE.values())))
    changed = {name: x + step for name, x in MESSAGE.items()} | {k.replace("_", "."): x for k, x in tensors.items()}
    return encode(Frame(kind, fields, {name: x for name, x in changed.items() if x is not None}))


def filled(value, dtype=np.float32):
    x = np.ones(4, dtype)
    x[2] = value
    return x


BAD = {
    "NaN": (sent(**{"0_bias": filled(np.nan)}), "not finite"),
    "inf": (sent(**{"0_bias": filled(np.inf)}), "not finite"),
    "shape": (sent(**{"0_bias": np.ones(5, np.float32)}), r"expected float32\[4\], got float32\[5\]"),
    "axes": (sent(**{"0_bias": np.ones((4, 1), np.float32)}), r"expected float32\[4\], got float32\[4, 1\]"),
    "dtype": (sent(**{"0_bias": np.ones(4)}), r"expected float32\[4\], got float64\[4\]"),
    "integers": (sent(**{"0_bias": np.ones(4, np.int32)}), r"expected float32\[4\], got int32\[4\]"),
    "missing": (sent(**{"0_bias": None}), "lacks the tensor '0.bias'"),
    "extra": (sent(more=np.ones(1, np.float32)), "unknown tensor 'more'"),
    "nothing": (b"", "cannot be read"),
    "kind": (sent(kind="hello"), "kind 'upload', got 'hello'"),
    "replayed": (sent(fields=FIELDS | {"round": "6"}), "replayed or of another round: expected '7', got '6'"),
    "spelled otherwise": (sent(fields=FIELDS | {"round": "07"}), "replayed or of another round"),
    "no round": (sent(fields={"run": "run-1", "generation": "2"}), "lacks the field 'round'"),
    "other run": (sent(fields=FIELDS | {"run": "run-2"}), "another run"),
    "stale generation": (sent(fields=FIELDS | {"generation": "1"}), "another generation"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_uploads_are_rejected(kind):
    data, why = BAD[kind]
    with pytest.raises(Refused, match=why) as caught:
        read_upload(data, EXPECTED)
    assert not isinstance(caught.value, Failed)
    assert len(str(caught.value)) < 300


def test_a_good_upload_is_read():
    upload = read_upload(sent(0.5), EXPECTED)
    assert list(upload) == list(MESSAGE)
    assert displacement(upload, MESSAGE) == pytest.approx(0.5, rel=1e-4)
    np.testing.assert_array_equal(read_upload(sent(0.0), EXPECTED)["0.weight"], MESSAGE["0.weight"])
    assert read_upload(sent(fields=FIELDS | {"trajectories": "30"}), EXPECTED).keys() == MESSAGE.keys()


def test_only_the_measured_tensors_count_in_the_distance():
    """Three agents that did not move, in one of two clusters, do not shorten the uploads of those that did."""
    message = {"theta": np.zeros(3, np.float32), "members": np.asarray([0.5, 0.5], np.float32)}

    def upload(far, cluster):
        members = np.eye(2, dtype=np.float32)[cluster]
        return encode(Frame("upload", FIELDS, {"theta": np.full(3, far, np.float32), "members": members}))

    uploads = {f"agent-{i}": upload(far, i % 2) for i, far in enumerate((0, 0, 0, 20, 20))}
    clipped = [Gate(None).judge(Expected("run-1", 2, 7, message, m), uploads).clipped for m in (None, ("theta",))]
    assert (sorted(clipped[0]), clipped[1]) == (["agent-3", "agent-4"], {})
    lies = {**uploads, "agent-4": upload(1e6, 0)}
    verdict = Gate(None).judge(Expected("run-1", 2, 7, message, ("theta",)), lies | {"agent-5": upload(20, 1)})
    assert sorted(verdict.refused) == ["agent-4"], "a far displacement is still refused"


def test_too_large_an_upload_is_not_decoded(monkeypatch):
    monkeypatch.setattr(upload_checks, "decode", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(Refused, match="at most"):
        read_upload(bytes(EXPECTED.limit + 1), EXPECTED)


def test_many_tensors_with_long_names_fit_the_limit():
    message = {f"{i:03d}" + "x" * 200: np.ones(1, np.float32) for i in range(600)}
    read_upload(encode(Frame("upload", FIELDS, message)), Expected("run-1", 2, 7, message))


def test_any_error_of_the_decoder_is_a_rejection(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(upload_checks, "decode", broken)
    with pytest.raises(Refused, match="cannot be read"):
        read_upload(sent(), EXPECTED)


def test_an_agents_own_error_becomes_one_printable_line():
    said = encode(Frame("error", {"message": "no motor\x1b[31m\n" + "x" * 10_000}))
    with pytest.raises(Failed, match="the agent failed: no motor") as caught:
        read_upload(said, EXPECTED)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 550
    with pytest.raises(Failed, match="no reason"):
        read_upload(encode(Frame("error")), EXPECTED)


@given(data=st.binary(max_size=300))
@settings(max_examples=200)
def test_random_bytes_are_rejected(data):
    with pytest.raises(Refused):
        read_upload(data, EXPECTED)


@given(
    edits=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.one_of(st.none(), st.integers(0, 2**16)),
)
@settings(max_examples=300)
def test_mutated_uploads_are_rejected_or_still_valid(edits, cut):
    data = bytearray(sent())
    for place, value in edits:
        data[place % len(data)] = value
    try:
        upload = read_upload(bytes(data[: None if cut is None else cut % len(data)]), EXPECTED)
    except Refused:
        return
    assert {k: (x.shape, x.dtype) for k, x in upload.items()} == {k: (x.shape, x.dtype) for k, x in MESSAGE.items()}
    assert all(np.isfinite(x).all() for x in upload.values())


@given(header=st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3)))
@settings(max_examples=100)
def test_invalid_headers_are_rejected(header):
    entry = {"dtype": "F32", "shape": header, "data_offsets": header}
    about = json.dumps({"__metadata__": FIELDS | {"kind": "upload"}, "0.bias": entry, "x": header}).encode()
    with pytest.raises(Refused):
        read_upload(len(about).to_bytes(8, "little") + about, EXPECTED)


def test_displacement_neither_overflows_nor_underflows():

    def of(x, y):
        return displacement({"a": np.asarray(x)}, {"a": np.asarray(y)})

    assert of([3.0, 0.0], [0.0, 4.0]) == 5
    assert of([3e200, 0.0], [0.0, 4e200]) == pytest.approx(5e200)
    assert of([3e-200, 0.0], [0.0, 4e-200]) == pytest.approx(5e-200)
    largest = np.finfo(np.float32).max
    assert of(np.full(9, largest), np.full(9, -largest)) == pytest.approx(6 * float(largest))
    assert of([1e308, 1.0], [-1e308, 0.0]) == math.inf
    assert of(np.asarray([], np.float32), np.asarray([], np.float32)) == 0
    assert of([2**40, 0], [0, 0]) == 2.0**40
    assert of([True, False], [False, False]) == 1
    both = {"a": np.asarray([3.0]), "b": np.asarray(4.0)}
    assert displacement(both, {"b": np.asarray(0.0), "a": np.asarray([0.0])}) == 5


# The gate


def judged(gate, **uploads):
    return gate.judge(EXPECTED, {name: sent(x) if isinstance(x, int | float) else x for name, x in uploads.items()})


def test_uploads_beyond_the_bound_are_rejected():
    verdict = judged(Gate(0.2), near=0.1, same=0.0, at=0.2, far=0.21, absurd=1e5)
    assert sorted(verdict.accepted) == ["at", "near", "same"]
    assert sorted(verdict.refused) == ["absurd", "far"]
    assert "0.21 from the message; the limit is 0.2, the proven bound" in verdict.refused["far"]


def test_a_bound_allows_for_the_rounding_of_large_parameters():
    message = {"a": np.full(100, 2.0**20, np.float32)}  # an ulp is 1/16
    steps = np.full(100, np.float32(2.0**20 + 0.0625))
    upload = encode(Frame("upload", FIELDS, {"a": steps}))
    assert Gate(0.5).judge(Expected("run-1", 2, 7, message), {"a": upload}).accepted


def test_strikes_in_a_row_lead_to_quarantine_which_is_reported_once():
    gate, bad = Gate(1.0, strikes=3), BAD["NaN"][0]
    for round_, upload in enumerate([bad, 100.0, 0.1, bad, b"?"]):  # an accepted one starts the count anew
        verdict = judged(gate, agent=upload, other=0.1)
        assert verdict.quarantined == ()
        assert ("agent" in verdict.accepted) == (round_ == 2)
    assert judged(gate, agent=bad).quarantined == ("agent",)
    for _ in range(2):
        verdict = judged(gate, agent=0.1, other=0.1)
        assert verdict.refused == {"agent": QUARANTINED}
        assert verdict.quarantined == ()
        assert list(verdict.accepted) == ["other"]
    gate.release("agent")
    assert "agent" in judged(gate, agent=0.1).accepted
    for _ in range(2):
        assert judged(gate, agent=bad).quarantined == ()
    assert judged(gate, agent=bad).quarantined == ("agent",)
    with pytest.raises(UserError, match="'other' is not in quarantine"):
        gate.release("other")


def test_uploads_in_quarantine_are_not_read(monkeypatch):
    gate = Gate(1.0, strikes=1)
    judged(gate, agent=b"?")
    monkeypatch.setattr(upload_checks, "read_upload", lambda *_: pytest.fail("it was read"))
    assert judged(gate, agent=0.1).refused == {"agent": QUARANTINED}


def test_a_reported_failure_neither_adds_nor_clears_strikes():
    gate, error = Gate(1.0, strikes=2), encode(Frame("error", {"message": "battery"}))
    for _ in range(5):
        verdict = judged(gate, agent=error)
        assert verdict.refused == {"agent": "the agent failed: battery"}
        assert verdict.quarantined == ()
    judged(gate, agent=b"?")
    judged(gate, agent=error)
    assert judged(gate, agent=b"?").quarantined == ("agent",)


def test_uploads_far_from_the_median_are_shortened_and_absurd_ones_rejected():
    gate = Gate(None)
    verdict = judged(gate, a=0.1, b=0.2, c=0.3, d=0.9, e=1e6)
    assert sorted(verdict.accepted) == ["a", "b", "c", "d"]
    assert "1000 times the median" in verdict.refused["e"]
    for _ in range(4):
        assert not judged(gate, a=0.1, b=0.2, c=0.3).refused
    assert not judged(gate, a=1.9).clipped
    assert judged(gate, a=2.1).clipped == {"a": pytest.approx(1.05, rel=1e-3)}
    assert judged(gate, a=190).clipped.keys() == {"a"}
    assert judged(gate, a=210).refused.keys() == {"a"}


def of(upload):
    """The displacement of an upload as one vector."""
    return np.concatenate([(upload[name].astype(np.float64) - x).ravel() for name, x in MESSAGE.items()])


@pytest.mark.parametrize("bound", [None, 1e3, 1e9])
def test_a_long_upload_is_shortened_along_its_direction_whatever_bound_is_proven(bound):
    gate, long = Gate(bound), sent(0.0, **{"0_bias": MESSAGE["0.bias"] + np.asarray([0, -30, 40, 0], np.float32)})
    for _ in range(4):
        judged(gate, a=0.1, b=0.1, c=0.1)
    verdict = judged(gate, a=0.1, liar=long)
    assert verdict.clipped == {"liar": pytest.approx(50.0, rel=1e-4)}
    assert (verdict.refused, verdict.quarantined) == ({}, ())
    step = of(verdict.accepted["liar"])
    assert np.linalg.norm(step) == pytest.approx(1.0, rel=1e-4), "10 times the median"
    np.testing.assert_allclose(step, of(read_upload(long, EXPECTED)) / 50, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(of(verdict.accepted["a"]), of(read_upload(sent(0.1), EXPECTED)), "taken as it is")


def test_uploads_within_the_usual_distance_but_beyond_the_bound_are_rejected():
    gate = Gate(0.5)
    for _ in range(4):
        judged(gate, a=0.1, b=0.1, c=0.1)
    verdict = judged(gate, a=0.45, b=0.6)
    assert (sorted(verdict.accepted), verdict.clipped) == (["a"], {})
    assert "the proven bound" in verdict.refused["b"]


def test_a_shortened_upload_neither_adds_nor_clears_strikes():
    gate = Gate(None, strikes=2)
    for _ in range(4):
        judged(gate, a=0.1, b=0.1, c=0.1)
    for _ in range(5):
        assert judged(gate, a=0.1, liar=50.0).clipped.keys() == {"liar"}
    assert judged(gate, liar=b"?").quarantined == ()
    judged(gate, liar=50.0)
    assert judged(gate, liar=b"?").quarantined == ("liar",)


def test_shortened_uploads_enter_the_median_as_long_as_they_are_taken():
    gate = Gate(None)
    for far in (0.1, 0.1, 0.1, 0.1, 50.0):
        judged(gate, a=far, b=0.1, c=0.1)
    np.testing.assert_allclose(sorted(gate.snapshot()["lengths"][0])[-2:], [0.1, 1.0], rtol=1e-3)


def test_what_is_not_measured_is_not_shortened_and_whole_numbers_stay_whole():
    message = {"theta": np.zeros(4, np.float32), "count": np.asarray(7, np.int32), "choice": np.zeros(2, np.float32)}

    def upload(far):
        theta, choice = np.full(4, far, np.float32), np.asarray([0, 1], np.float32)
        return encode(Frame("upload", FIELDS, {"theta": theta, "count": np.asarray(8, np.int32), "choice": choice}))

    expected = Expected("run-1", 2, 7, message, ("theta", "count"))
    uploads = {"a": upload(1.0), "b": upload(1.0), "c": upload(1.0), "d": upload(100.0)}
    taken = Gate(None).judge(expected, uploads).accepted["d"]
    assert np.linalg.norm(taken["theta"]) == pytest.approx(10 * math.sqrt(5), rel=1e-3)
    assert (taken["count"].dtype, int(taken["count"]), taken["choice"].tolist()) == (np.int32, 7, [0, 1])


def test_with_fewer_than_three_displacements_only_absurd_uploads_are_rejected():
    gate = Gate(None)
    assert not judged(gate, a=0.1, b=1e4).refused
    assert "relative to the message's own length" in judged(Gate(None), a=0.1, b=1e5).refused["b"]
    assert judged(gate, a=0.1, b=1e5, c=0.2, d=0.1).refused.keys() == {"b"}
    assert judged(Gate(None), a=0.1, b=0.1, c=1e5).refused.keys() == {"c"}


def test_agents_that_do_not_move_do_not_enter_the_median():
    gate = Gate(None)
    for _ in range(5):
        assert not judged(gate, a=0, b=0, c=0, d=0, e=0.3, f=0.2).refused
    assert judged(gate, a=0, b=0, c=0, d=0, e=0.3, f=1e3).refused.keys() == {"f"}
    assert judged(gate, **dict.fromkeys("abc", 0)).accepted.keys() == set("abc")


def test_colluding_agents_pass_at_the_start_only():
    late = Gate(None)
    for _ in range(5):
        judged(late, a=0.1, b=0.1, c=0.1)
    assert judged(late, a=0.1, b=1e4, c=1e4).refused.keys() == {"b", "c"}
    assert not judged(Gate(None), a=0.1, b=1e4, c=1e4).refused


def test_a_fleet_that_changes_as_a_whole_is_accepted():
    gate = Gate(None)
    for _ in range(10):
        judged(gate, a=1e-3, b=1e-3, c=2e-3, d=1e-3)
    assert judged(gate, a=0.1, b=0.2, c=1e-3, d=2e-3).clipped.keys() == {"a", "b"}
    assert judged(gate, a=0.1, b=0.2, c=0.1, d=1e4).refused.keys() == {"d"}
    assert judged(gate, a=0.1, b=0.2, c=0.1, d=1e4).refused.keys() == {"d"}


def test_only_the_last_displacements_count():
    gate = Gate(None, window=10)
    for far in (0.1, 0.5, 2.5):
        for _ in range(4):
            verdict = judged(gate, a=far, b=far, c=far)
            assert (verdict.refused, verdict.clipped) == ({}, {})
    assert [len(known) for known in gate.snapshot()["lengths"]] == [10]


def test_only_displacements_of_one_kind_are_compared():
    """As of gradients and of parameters, in turns: a hundred times longer uploads of the other kind are usual."""
    gate = Gate(None)
    for round_ in range(8):
        kind, far = round_ % 2, (0.1, 10.0)[round_ % 2]
        uploads = {name: sent(far) for name in "ab"}
        assert not gate.judge(Expected("run-1", 2, 7, MESSAGE, kind=kind), uploads).clipped
        gate = Gate.restore(json.loads(json.dumps(gate.snapshot())))
    verdict = gate.judge(Expected("run-1", 2, 7, MESSAGE, kind=0), {"a": sent(0.1), "b": sent(10.0)})
    assert verdict.clipped.keys() == {"b"}


def test_uploads_that_agents_remember_are_taken_whole_or_not_at_all():
    gate = Gate(None, strikes=1)
    expected = Expected("run-1", 2, 7, MESSAGE, whole=True)
    for _ in range(4):
        gate.judge(expected, {name: sent(0.1) for name in "abc"})
    verdict = gate.judge(expected, {"a": sent(0.1), "b": sent(5.0)})
    assert (verdict.accepted.keys(), verdict.refused.keys(), verdict.clipped) == ({"a"}, {"b"}, {})
    assert not gate.quarantined, "a long upload is no offence"


def test_infinite_displacements_are_rejected():
    message = {"a": np.full(3, -1e308)}
    upload = encode(Frame("upload", FIELDS, {"a": np.full(3, 1e308)}))
    for gate in (Gate(None), Gate(1e300)):
        verdict = gate.judge(Expected("run-1", 2, 7, message), {"a": upload})
        assert verdict.refused.keys() == {"a"}
        json.dumps(gate.snapshot(), allow_nan=False)


def verdicts(gate, rounds, rng):
    """Verdicts on random rounds, without the tensors."""
    found = []
    for _ in range(rounds):
        names = rng.permutation([*"abcdef"])
        far = {name: float(rng.choice([0.0, 0.1, 0.4, 3.0, 1e3])) for name in names[: rng.integers(1, 7)]}
        verdict = judged(gate, **{name: b"?" if rng.random() < 0.1 else x for name, x in far.items()})
        found.append((sorted(verdict.accepted), verdict.refused, verdict.quarantined, verdict.clipped))
    return found


@pytest.mark.parametrize("bound", [None, 2.0])
def test_a_restored_gate_continues_exactly(bound):
    seen = set()
    for seed in range(10):
        gate = Gate(bound, factor=3.0, strikes=3, window=20)
        verdicts(gate, 8, np.random.default_rng(seed))
        again = Gate.restore(json.loads(json.dumps(gate.snapshot(), allow_nan=False)))
        assert again.snapshot() == gate.snapshot()
        later = verdicts(gate, 8, np.random.default_rng(100 + seed))
        assert verdicts(again, 8, np.random.default_rng(100 + seed)) == later
        seen |= {bool(gate.quarantined), *(bool(refused) for _, refused, *_ in later)}
    assert seen == {True, False}


def test_the_order_of_uploads_does_not_matter():
    far = {"a": 0.1, "b": 0.3, "c": 50.0, "d": 0.2, "e": 2.0}
    one, two = Gate(None), Gate(None)
    assert judged(one, **far).clipped == judged(two, **dict(reversed(far.items()))).clipped != {}
    assert one.snapshot() == two.snapshot()


@pytest.mark.parametrize(
    "wrong", [{"factor": 0.5}, {"factor": math.nan}, {"strikes": 0}, {"window": 2}, {"bound": -1.0}]
)
def test_invalid_settings_are_rejected(wrong):
    with pytest.raises(UserError, match=f"the gate's {next(iter(wrong))} must be"):
        Gate(**{"bound": None} | wrong)


@pytest.mark.parametrize("snapshot", [{}, {"bound": None, "lengths": 3}, Gate(None).snapshot() | {"lengths": ["x"]}])
def test_an_invalid_snapshot_is_rejected(snapshot):
    with pytest.raises(UserError, match="invalid snapshot"):
        Gate.restore(snapshot)
