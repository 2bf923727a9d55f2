"""Sight: which numbers of their own tasks agents may see, and how they are standardized."""

import numpy as np
import pytest

from perfedrl.envs import ENVS, gymnasium_fleet
from perfedrl.envs.sight import sight_of
from perfedrl.errors import UserError
from perfedrl.policies import sighted

POLES = {"agents": 3, "held_out": 1, "vary": {"length": {"train": [0.2, 0.4, 0.9], "held_out": [0.5]}}}


def test_numbers_are_standardized_by_constants_of_the_training_agents():
    sight = sight_of(ENVS["cart-pole"](**POLES), ["length"])
    lengths = np.asarray([0.2, 0.4, 0.9])
    assert sight.names == ("length",)
    assert sight.mean == pytest.approx((0.5,))
    assert sight.scale == pytest.approx((lengths.std(),))
    assert sight.numbers({"length": 0.5, "masscart": 1.0}) == pytest.approx([0.0], abs=1e-6)
    assert sight.numbers({"length": 0.2}) == pytest.approx([-0.3 / lengths.std()])


def test_a_component_in_which_training_agents_agree_is_shifted_only():
    sight = sight_of(ENVS["navigation"](goals=[(0.5, 0.2), (0.5, -0.2)], held_out=[(0.75, 0.0)]), ["goal"])
    assert sight.mean == pytest.approx((0.5, 0.0))
    assert sight.scale == pytest.approx((1.0, 0.2))
    assert sight.numbers({"goal": (0.75, 0.0)}) == pytest.approx([0.25, 0.0])


def test_parameters_are_seen_in_the_order_in_which_they_are_named():
    vary = {"length": [0.1, 0.9], "masscart": [0.5, 1.5]}
    made = ENVS["cart-pole"](agents=4, vary=vary)
    one, two = sighted(made, ["length", "masscart"]), sighted(made, ["masscart", "length"])
    np.testing.assert_array_equal(one.train.seen, two.train.seen[:, ::-1])


@pytest.mark.parametrize(
    ("fleet", "names", "words"),
    [
        (ENVS["cart-pole"](**POLES), ["lenght"], "no parameter 'lenght'; did you mean 'length'"),
        (
            ENVS["cart-pole"](**POLES),
            ["masscart"],
            "the same masscart, which tells them nothing; they differ in length",
        ),
        (
            ENVS["arc"](goals=1, held_out=0),
            ["goal"],
            "the same goal, which tells them nothing; they differ in no number",
        ),
        (ENVS["gridworld"](width=2), ["r"], "sees needs observations that are vectors.*numbers of states"),
        (ENVS["classification"](), ["examples.inputs"], "sees needs observations that are vectors.*labelled examples"),
        (gymnasium_fleet("CartPole-v1", agents=2), ["id"], "id must be numbers.*'CartPole-v1'"),
        (gymnasium_fleet("CartPole-v1", {"length": [0.1, 0.9]}, agents=2), ["gravity"], "no parameter 'gravity'"),
    ],
)
def test_what_cannot_be_seen_is_rejected_in_one_sentence(fleet, names, words):
    with pytest.raises(UserError, match=words) as error:
        sighted(fleet, names)
    assert "\n" not in str(error.value)


def test_an_agent_must_have_the_numbers_that_are_seen():
    sight = sight_of(ENVS["arc"](), ["goal"])
    with pytest.raises(UserError, match="the agent's policy sees goal, which must be finite numbers, got none"):
        sight.numbers({"target": (0.1, 0.2)})
    with pytest.raises(UserError, match="the agent has 3 numbers of goal, expected 2"):
        sight.numbers({"goal": (0.1, 0.2, 0.3)})
    with pytest.raises(UserError, match="finite numbers"):
        sight.numbers({"goal": (0.1, float("nan"))})
