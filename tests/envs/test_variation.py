"""Variation of parameters between the agents of a fleet."""

import numpy as np
import pytest

from perfedrl.envs.variation import vary_agents
from perfedrl.errors import UserError


def test_every_agent_draws_its_own_value_within_the_range():
    train, held_out = vary_agents({"length": (0.1, 0.9)}, 50, 20, 0)
    drawn = [values["length"] for values in (*train, *held_out)]
    assert len(set(drawn)) == 70
    assert 0.1 < min(drawn) < 0.2 < 0.8 < max(drawn) < 0.9
    assert vary_agents({"length": {"uniform": [0.1, 0.9]}}, 50, 20, 0) == (train, held_out)
    assert vary_agents({"length": (0.1, 0.9)}, 50, 20, 1).train != train


def test_varying_another_parameter_does_not_change_the_others():
    alone = vary_agents({"a": (0, 1)}, 4, 2, 3)
    both = vary_agents({"b": (5, 6), "a": (0, 1)}, 4, 2, 3)
    assert [x["a"] for x in (*alone.train, *alone.held_out)] == [x["a"] for x in (*both.train, *both.held_out)]


def test_values_of_a_list_go_to_training_agents_first_without_repetition():
    train, held_out = vary_agents({"a": {"list": [1, 2, 3, 4, 5]}}, 3, 2, 0)
    assert sorted(x["a"] for x in (*train, *held_out)) == [1, 2, 3, 4, 5]
    assert vary_agents({"a": [1, 2, 3, 4, 5]}, 3, 2, 0) == (train, held_out)


def test_values_repeat_among_training_agents_where_there_are_fewer_values():
    train, _ = vary_agents({"direction": {"list": [1, -1]}}, 5, 0, 0)
    assert abs(sum(x["direction"] for x in train)) == 1


def test_sizes_of_both_signs_have_as_many_negative_agents_as_positive_ones():
    vary = {"gain": {"plus_minus": [0.5, 1.5]}}
    train, held_out = vary_agents(vary, 7, 4, 0)
    signs = [np.sign([x["gain"] for x in part]) for part in (train, held_out)]
    assert [abs(int(x.sum())) for x in signs] == [1, 0]
    sizes = np.abs([x["gain"] for x in (*train, *held_out)])
    assert (sizes >= 0.5).all()
    assert (sizes <= 1.5).all()
    assert np.ptp(sizes) > 0.5
    assert vary_agents(vary, 7, 4, 0) == (train, held_out)
    orders = {tuple(np.sign([x["gain"] for x in vary_agents(vary, 7, 4, seed).train])) for seed in range(9)}
    assert len(orders) > 3


def test_a_table_states_the_value_of_every_agent():
    split = vary_agents({"a": {"train": [1, 2], "held_out": [3]}, "b": {"train": [7, 7], "held_out": [7]}}, 2, 1, 0)
    assert split == ([{"a": 1, "b": 7}, {"a": 2, "b": 7}], [{"a": 3, "b": 7}])


def test_names_alone_vary_in_their_usual_ranges():
    usual = {"g": (5, 15), "m": (0.5, 1.5)}
    assert vary_agents("g", 3, 0, 0, ranges=usual) == vary_agents({"g": (5, 15)}, 3, 0, 0)
    assert vary_agents(["g", "m"], 3, 0, 0, ranges=usual) == vary_agents(usual, 3, 0, 0)
    assert np.ptp([x["m"] for x in vary_agents("m", 30, 0, 0, ranges=usual).train]) > 0.5


BAD = {
    "no agents": (({}, 0, 0, 0), "agents >= 1"),
    "identical": (({}, 2, 1, 0), "held_out asks for 1 agents unlike all others, and 0 distinct tasks are left"),
    "few values": (({"a": {"list": [1, 2, 3]}}, 2, 2, 0), "and 1 distinct tasks are left when 2 agents train"),
    "backwards": (({"a": (2, 1)}, 1, 0, 0), "low < high"),
    "not numbers": (({"a": {"uniform": ["x", 1]}}, 1, 0, 0), "needs a range"),
    "a number": (({"a": 3}, 1, 0, 0), "a = 3; it must be a range"),
    "a word": (({"a": "x"}, 1, 0, 0), "it must be a range"),
    "negative sizes": (({"a": {"plus_minus": [-1, 1]}}, 1, 0, 0), "a needs sizes >= 0, which take either sign"),
    "unknown form": (({"a": {"normal": [0, 1]}}, 1, 0, 0), "it must be a range"),
    "empty": (({"a": {"list": []}}, 1, 0, 0), "needs a list of values"),
    "length of a table": (({"a": {"train": [1]}}, 2, 0, 0), "has 1 values for train, and 2 such agents"),
    "unknown name": (("z", 1, 0, 0, None, {"g": (0, 1)}), "no usual range is known of 'z'; known: g"),
    "unknown parameter": (({"lenght": (0, 1)}, 1, 0, 0, ["length"]), "no parameter 'lenght'; did you mean 'length'"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_variations_are_rejected_in_one_sentence(case):
    arguments, sentence = BAD[case]
    with pytest.raises(UserError, match=sentence):
        vary_agents(*arguments)
