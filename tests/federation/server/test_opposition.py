"""Agents that point against all others: hand-made directions, flipped uploads, and fleets that merely differ."""

import numpy as np
import pytest
from honest_rounds import honest_rounds
from tiny_config import FEDAVG

from perfedrl.experiments.config import make_config
from perfedrl.federation.server.opposition import ROUNDS_IN_A_ROW, alignments, counted, opposing


def verdicts(*vectors, leaves=1):
    stacked = np.asarray(vectors, np.float32)
    return opposing(alignments(np.split(stacked, leaves, axis=1)))


def test_cosines_are_those_of_whole_displacements():
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(alignments([x[:, :2].reshape(4, 1, 2), x[:, 2:]]), unit @ unit.T, atol=1e-6)
    np.testing.assert_allclose(alignments([np.asarray([[2], [-3]], np.int32)]), [[1, -1], [-1, 1]])


@pytest.mark.parametrize("length", [1e-3, 1.0, 100.0])
def test_one_flipped_upload_among_similar_ones_opposes_them_whatever_its_length(length):
    similar = [[1, 0.2, 0, 0], [1, -0.2, 0, 0.5], [1, 0, 0.4, 0]]
    assert verdicts(*similar, [-length, 0, 0, 0], leaves=2) == [False, False, False, True]


def test_several_colluding_agents_oppose_the_majority():
    honest = [[1, 0.3], [1, -0.3], [1, 0.1], [1, 0], [1, 0.2]]
    assert verdicts(*honest, [-1, 0.1], [-1, -0.1]) == [False] * 5 + [True] * 2


def test_agents_that_merely_differ_do_not_oppose_each_other():
    sides = [[1, 0], [-1, 0], [0, 1], [0, -1]]
    assert verdicts(*sides) == [False] * 4
    assert verdicts([1, 0, 0], [0, 1, 0], [0, 0, 1]) == [False] * 3
    assert verdicts([1, 0], [1, 0], [-1, 0], [-1, 0]) == [False] * 4, "two equal groups"
    assert verdicts([1, 0.1], [1, -0.1], [-0.2, 1]) == [False] * 3, "another direction, hardly against the others"


def test_agents_that_did_not_move_have_no_verdict():
    assert verdicts([1, 0], [1, 0.1], [0, 0], [-1, 0]) == [False, False, None, True]
    assert verdicts([1, 0], [0, 0], [-1, 0]) == [None] * 3, "fewer than two others"
    assert verdicts([1, 0], [-1, 0]) == [None] * 2


def test_rounds_in_a_row_are_counted_and_rounds_without_a_verdict_do_not_count():
    found = {}
    for verdict in (True, None, True, None, True):
        found = counted(found, ["a", "b"], [verdict, False])
    assert found == {"a": 3, "b": 0}
    assert counted(found, ["b"], [True]) == {"a": 3, "b": 1}
    assert counted(found, ["a"], [False]) == {"a": 0, "b": 0}


def test_honest_agents_with_goals_on_all_sides_are_not_named():
    """Their uploads point against each other: a plain rule, a negative mean cosine, would name most of them."""
    names, counts, plain, most = [*"abcdefgh"], {}, np.zeros(8, int), 0
    for message, uploads in honest_rounds(make_config(FEDAVG), 60):
        cosines = alignments([np.stack([x[leaf] for x in uploads]) - y for leaf, y in message.items()])
        counts = counted(counts, names, opposing(cosines))
        plain = np.where(np.nansum(cosines, axis=1) < 1, plain + 1, 0)
        most = max(most, *counts.values())
    assert most < ROUNDS_IN_A_ROW / 2
    assert (plain >= ROUNDS_IN_A_ROW).sum() >= 4
