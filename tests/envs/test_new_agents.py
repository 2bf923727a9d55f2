"""New agents of every registered family: their settings make the fleet's own agents, and others."""

import dataclasses

import jax
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.envs import ENVS, TabularMDP
from perfedrl.envs.base import check_task
from perfedrl.envs.new_agents import NewAgents, far_from
from perfedrl.policies import POLICIES
from perfedrl.simulation.evaluation import check_fit

ARRAYS = {"P": np.full((3, 2, 2, 2), 0.5).tolist(), "r": np.arange(12.0).reshape(3, 2, 2).tolist()}
FEW = {"agents": 2, "held_out": 1, "horizon": 5, "parallel": 1}
PARAMETERS = {
    "arrays": {**ARRAYS, "mu": [[1.0, 0.0]] * 3, "horizon": 2, "discount": 0.5, "held_out": 1},
    "navigation": {"goals": [(0.5, 0.5), (-0.5, 0.0)]},
    "gymnasium": {**FEW, "id": "CartPole-v1", "vary": {"length": [0.1, 0.9]}},
    "gymnax": {"id": "jax_environments:Walk", "vary": {"push": [0.05, 0.3]}, "agents": 2, "held_out": 1},
    "brax": {"id": "jax_environments:Cart", "vary": {"drag": [0.0, 0.5]}, "agents": 2, "held_out": 1, "horizon": 5},
    "half-cheetah-dir": {**FEW, "held_out": 0},
}
DRAWN = ("classification", "random-mdps")
"""Families whose agents are drawn; a number draws another one."""


def fleet_of(name):
    few = FEW if "parallel" in ENVS.parameters(name) else {}
    return ENVS[name](**PARAMETERS.get(name, few))


def leaves(task):
    """What two equal agents agree in."""
    return task.settings if isinstance(task, pf.envs.PlayedTask) else dict(enumerate(jax.tree.leaves(task)))


@pytest.mark.parametrize("name", [name for name in ENVS if name not in ("arrays", *DRAWN)])
def test_the_settings_of_every_agent_make_that_agent_again(name):
    fleet = fleet_of(name)
    family = fleet.new_agents
    assert len(family.agents) == fleet.agents + fleet.held_out_agents
    for i in (0, len(family.agents) - 1):
        again, own = family.task(fleet, family.agents[i], None), fleet.agent(i)
        check_task(again, "the agent")
        assert type(again) is type(own)
        if isinstance(own, TabularMDP):  # without the fleet's padding of successors
            np.testing.assert_array_equal(again.P, own.P)
            own, again = ((x.r, x.mu) for x in (own, again))
            jax.tree.map(np.testing.assert_array_equal, own, again)
        else:
            jax.tree.map(np.testing.assert_array_equal, leaves(own), leaves(again))
        assert family.warnings(family.agents[0], fleet.agents) == []


@pytest.mark.parametrize("name", ENVS)
def test_settings_of_every_family_are_described_with_their_range(name):
    family = fleet_of(name).new_agents
    for setting in family.varying:
        assert f"{setting}" in family.describe()
        assert " to " in family.about(setting)
    assert "\n" not in family.describe()
    assert len(family.describe()) < 1000


@pytest.mark.parametrize("name", DRAWN)
def test_a_number_draws_another_agent(name):
    fleet = fleet_of(name)
    one, same, other = (fleet.new_agents.task(fleet, {"agent_seed": seed}, None) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, one, same)
    with pytest.raises(AssertionError):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    check_fit(one, POLICIES["table" if name == "random-mdps" else "mlp"](fleet))
    with pytest.raises(pf.UserError, match="agent_seed must be a whole number"):
        fleet.new_agents.task(fleet, {"agent_seed": -1}, None)
    with pytest.raises(pf.UserError, match="heterogeneity must lie in"):
        fleet.new_agents.task(fleet, {"heterogeneity": 2.0}, None)


def test_a_new_agent_of_arrays_comes_from_a_file(tmp_path):
    fleet, path = fleet_of("arrays"), tmp_path / "agent.npz"
    mdp = fleet.task(1)
    np.savez(path, P=mdp.P, r=mdp.r, mu=mdp.mu)
    again = fleet.new_agents.task(fleet, {"file": str(path)}, None)
    jax.tree.map(np.testing.assert_array_equal, again, mdp)
    np.savez(path, P=np.ones((1, 1, 1)), r=np.ones((1, 1)), mu=np.ones(1))
    for settings, words in (({"file": str(path)}, "expected"), ({}, "needs file"), ({"file": "none.npz"}, "no file")):
        with pytest.raises(pf.UserError, match=words):
            fleet.new_agents.task(fleet, settings, None)


MISTAKES = [
    ("cart-pole", {"lenght": 0.3}, "no setting 'lenght'; did you mean 'length'"),
    ("cart-pole", {"length": -0.3}, "length must be a finite number > 0"),
    ("cart-pole", {"length": float("nan")}, "length must be finite"),
    ("cart-pole", {"length": (0.3, 0.4)}, "length must be a number"),
    ("cart-pole", {"length": "long"}, "length must be a number"),
    ("cart-pole", {"gravity": 5.0}, "say also length of the new agent (length: 0."),
    ("arc", {"goal": (0.5,)}, "goal must be 2 numbers"),
    ("arc", {"goal": (1.5, 0.0)}, "lies outside the box"),
    ("gridworld", {"goal": (5, 0)}, "outside the 5 x 5 grid"),
    ("gridworld", {"goal": (0.5, 0)}, "two whole numbers"),
    ("gridworld", {"goal": 3}, "goal must be 2 numbers, got 3"),
    ("windy-cliff", {"wind": 2.0}, "must lie in [0, 1]"),
    ("lqr", {"perturbation": "much"}, "must be a number"),
    ("gymnasium", {"lenght": 0.3, "length": 0.2}, "no parameter 'lenght'; did you mean 'length'"),
    ("gymnasium", {"lenght": 0.3}, "the fleet's agents have no setting 'lenght'; did you mean 'length'"),
]


@pytest.mark.parametrize("name", [name for name in ENVS if name != "arrays"])
def test_values_that_no_agent_could_have_are_rejected_in_every_family(name):
    fleet = fleet_of(name)
    family = fleet.new_agents
    for key in {**family.agents[0], **family.extra}:
        for value in ("word", ("a", "b"), (1.0, 2.0, 3.0, 4.0), None, float("inf"), {}):
            with pytest.raises(pf.UserError, match=f"{key} must be "):
                family.task(fleet, {key: value}, 0)


@pytest.mark.parametrize(("name", "settings", "words"), MISTAKES)
def test_mistakes_in_settings_are_one_sentence(name, settings, words):
    fleet = fleet_of(name)
    with pytest.raises(pf.UserError) as caught:
        fleet.new_agents.task(fleet, settings, None)
    assert words in str(caught.value)


def test_another_parameter_of_the_environment_is_not_called_a_mistake():
    fleet = pf.gymnasium_fleet("CartPole-v1", vary={"length": (0.1, 0.9)}, agents=2)
    with pytest.raises(pf.UserError) as caught:
        fleet.new_agents.task(fleet, {"gravity": 5.0}, None)
    assert str(caught.value).startswith("say also length of the new agent")
    assert "no setting" not in str(caught.value)


def test_settings_that_are_not_given_are_another_agents():
    fleet = pf.cart_pole(agents=3, held_out=1, vary=["length", "masscart"])
    heavy = fleet.new_agents.task(fleet, {"masscart": 2}, like=3)
    assert heavy == dataclasses.replace(fleet.task(0, held_out=True), masscart=np.asarray(2.0))


def test_in_a_fleet_of_several_kinds_a_new_agent_is_like_a_certain_one():
    fleet = pf.gymnasium_fleet(["rooms:Room", "rooms:drawn"], horizon=5)
    assert fleet.new_agents.describe() == "any other parameter of the environment"
    with pytest.raises(pf.UserError, match="of several kinds: say which agent the new one is like, by its number"):
        fleet.new_agents.task(fleet, {"weight": 2.0}, None)
    assert fleet.new_agents.task(fleet, {"weight": 2.0}, 0).recipe.name == "rooms:Room"


def test_a_setting_far_from_training_is_said_in_numbers():
    """On the arc of the paper: training goals are from (0.702, -0.384) to (0.8, 0.384)."""
    fleet = pf.arc()
    family = fleet.new_agents
    (far,) = family.warnings({"goal": (-0.8, 0.0)}, fleet.agents)
    assert "goal -0.8,0 is far outside what was trained on" in far
    assert "training agents have 0.7021,-0.3835 to 0.796,0.3835, the nearest is 1.55 away" in far
    for near in ((0.6, 0.5), (0.8, 0.0)):
        assert family.warnings({"goal": near}, fleet.agents) == []
    assert "all training agents have 9.8" in far_from("gravity", 5.0, [9.8, 9.8])
    assert "no training agent has ground ice" in far_from("ground", "ice", ["sand", "grass"])
    assert far_from("ground", "sand", ["sand", "grass"]) == far_from("length", 0.5, [0.1, 0.9]) == ""


def test_fleets_of_equal_tasks_have_equal_structures_whatever_makes_new_agents():
    assert NewAgents(len, []) == NewAgents(max, [{}])
    assert jax.tree.structure(pf.gridworld()) == jax.tree.structure(pf.gridworld())
