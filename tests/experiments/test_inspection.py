"""`perfedrl inspect`: the agents of a config and an episode, without training."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from perfedrl.experiments.config import load_config, make_config
from perfedrl.experiments.inspection import describe_agents, inspect

CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = {
    "name": "looked-at",
    "seeds": 1,
    "rounds": 1,
    "algorithm": {"name": "fedavg-pg", "alpha": 0.1, "beta": 0.1},
    "evaluation": {"name": "monte-carlo", "trajectories": 2, "episodes": 2},
}
POLES = {
    "env": "gymnasium",
    "id": "CartPole-v1",
    "agents": 2,
    "held_out": 1,
    "horizon": 9,
    "vary": {"length": [0.1, 0.9]},
}


def written(folder, **tables):
    path = folder / "config.toml"
    path.write_text(make_config({**SETTINGS, **tables}).to_toml())
    return path


def test_an_agents_own_settings_are_those_in_which_agents_differ():
    found = inspect(load_config(CONFIGS / "arc.toml"))
    assert (found.agents, len(found.own), found.parameters) == (6, 9, 360)
    assert all(list(facts) == ["goal"] for facts in found.own)
    assert found.bytes == 2 * 4 * 360
    assert found.shared["horizon"] == "20"
    parts = make_config({**SETTINGS, "fleet": POLES, "policy": {"name": "mlp"}}).experiment
    shared, own = describe_agents(parts.fleet)
    assert [list(facts) for facts in own] == [["length"]] * 3
    assert shared["id"] == "'CartPole-v1'"


@pytest.mark.parametrize("fleet", [POLES, {"env": "cart-pole", "agents": 2, "horizon": 9}, {"env": "arc"}])
def test_an_episode_is_drawn_where_agents_can_be_drawn(run, tmp_path, fleet):
    path = written(tmp_path, fleet=fleet, policy={"name": "mlp", "hidden": [4]})
    code, out, _ = run("inspect", path, "--agent", "1", "--picture", "shown.png")
    assert code == 0
    assert "a round costs each agent" in out
    picture = imread(tmp_path / "shown.png")
    assert np.ptp(picture[..., :3]) > 0.5, "the picture is not blank"


def test_agents_that_cannot_be_drawn_are_still_shown(run, tmp_path):
    code, out, _ = run("inspect", CONFIGS / "gridworld.toml")
    assert code == 0
    assert "cannot be drawn" in out
    room = {"env": "gymnasium", "id": "rooms:Room", "agents": 1, "horizon": 3}
    code, out, err = run("inspect", written(tmp_path, fleet=room, policy={"name": "mlp"}))
    assert code == 0
    assert "cannot be rendered" in err
    assert not list(tmp_path.glob("*.png"))


def test_a_missing_agent_and_a_wrong_picture_format_are_rejected(run, tmp_path):
    code, _, err = run("inspect", CONFIGS / "arc.toml", "--agent", "9")
    assert (code, "there is no agent 9: the fleet has 9" in err) == (2, True)
    code, _, err = run("inspect", CONFIGS / "arc.toml", "--picture", "x.jpg")
    assert (code, "a .png file" in err) == (2, True)
    assert not list(tmp_path.iterdir())
