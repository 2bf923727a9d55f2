"""`check_env` names each fault in one sentence; the faults that break training are found before it starts."""

import json
import logging

import faulty_envs
import gymnasium
import numpy as np
import pytest
from faulty_envs import Sound

import perfedrl as pf
from perfedrl.envs import gymnasium_fleet
from perfedrl.envs.gym.check import Finding
from perfedrl.errors import UserError
from perfedrl.experiments.config import make_config
from perfedrl.experiments.training import train

ERRORS = {
    "FourValues": "step must return the five values (observation, reward, terminated, truncated, info), got a tuple of",
    "NoInfo": "reset must return (observation, info), got a value of type ndarray, an observation alone, as in old",
    "NoSeed": "reset must take the arguments seed and options",
    "ArrayReward": "the reward must be one number, got an array of shape (1,)",
    "TextReward": "the reward must be one number, got a value of type str",
    "WrongShape": "the observation must be an array of the declared shape (2,), got shape (3,)",
    "WrongType": "the observation must have the declared type uint8, got float32",
    "NoArray": "the observation must be an array of the declared shape (2,), got a value of type list",
    "WrongKeys": "the observation must be a dict with the keys ['x'], got the keys ['y']",
    "NoFlag": "step must return terminated as True or False, got None",
}
"""Faults that the check before training finds too."""

LATER = {
    "NanReward": "a reward is nan (step 0 of the episode with seed 0)",
    "InfiniteObservation": "an observation is not finite (step 0 of the episode with seed 0)",
    "Raises": "all of 5 episodes failed: the environment raised OSError: no answer (step 0 of the episode with seed 0)",
    "Exits": "all of 5 episodes failed: the environment raised SystemExit: 3 (step 0 of the episode with seed 0)",
    "SeveralLines": "the environment raised OSError: no answer (step 0 of the episode with seed 0)",
    "NoEnvironment": "must make a gymnasium.Env; it made a NoEnvironment",
    "WithoutActions": "an environment must set action_space and observation_space",
    "Nothing": "the module 'faulty_envs' has no environment 'Nothing'; known: ArrayReward",
}
WARNINGS = {
    "RaisesSometimes": "of 5 episodes failed: the environment raised OSError: no answer",
    "OutOfBounds": "an observation lies outside of the declared bounds (step 0 of the episode with seed 0)",
    "Unbounded": "2 of 2 components of the action box have no bounds and are not scaled",
    "Endless": "no episode ended within 1000 steps, and the environment sets no limit",
    "LargeObservation": "observations reach 5e+04",
    "Unseeded": "with seed 0 and the same actions an episode went otherwise the second time",
    "Remembers": "went otherwise the second time, so that no run can be repeated",
}


def findings(name, level, **more):
    found = pf.check_env(f"faulty_envs:{name}", **more)
    assert all("\n" not in text for _, text in found.findings)
    assert found.ok == (level != "error")
    return [text for kind, text in found.findings if kind == level]


@pytest.mark.parametrize("name", [*ERRORS, *LATER])
def test_what_must_be_mended_is_an_error_of_one_sentence(name):
    (text,) = findings(name, "error")
    assert {**ERRORS, **LATER}[name] in text


@pytest.mark.parametrize("name", WARNINGS)
def test_what_makes_learning_hard_is_a_warning(name):
    (text,) = findings(name, "warning")
    assert WARNINGS[name] in text


def test_nothing_is_wrong_with_sound_environments():
    assert pf.check_env(Sound).findings == ()
    assert pf.check_env("faulty_envs:DoubleInDict").findings == ()
    found = pf.check_env("CartPole-v1", {"length": 0.3}, episodes=2)
    assert found.findings == ()
    assert found.summary.startswith("observations of length 4 and 2 actions; 2 random episodes of ")


@pytest.mark.parametrize(("size", "said"), [(0.0, "are 0"), (1e4, "rewards reach"), (1e-6, "no reward is larger than")])
def test_rewards_of_extreme_size_are_a_warning(size, said):
    (text,) = findings("Sound", "warning", values={"size": size})
    assert said in text


def test_a_horizon_ends_episodes():
    assert findings("Endless", "warning", horizon=9) == []


def test_a_wide_box_is_noted_where_it_is_scaled_and_a_warning_where_it_is_not():
    (note,) = findings("Wide", "note")
    assert note == "actions in [0, 45] are scaled: the policy acts in [-1, 1] (scale_actions = true)"
    (warning,) = findings("Wide", "warning", scale_actions=False)
    assert "actions reach over [0, 45], and a policy explores by about 1 at first" in warning


def test_old_environments_within_gymnasiums_wrappers_are_recognized():
    gymnasium.register("OldGym-v0", "faulty_envs:FourValues", max_episode_steps=9)
    try:
        (found,) = pf.check_env("OldGym-v0").findings
    finally:
        del gymnasium.registry["OldGym-v0"]
    assert found == Finding("error", "step must return five values, got a tuple of 4, as in old versions of Gym")


def config(name):
    policy = {"name": "gaussian-mlp" if name == "Unbounded" else "mlp", "hidden": [2]}
    fleet = {"env": "gymnasium", "id": f"faulty_envs:{name}", "agents": 2, "horizon": 3, "parallel": 1}
    algorithm = {"name": "fedavg-pg", "alpha": 0.1, "beta": 0.1, "m": 2}
    evaluation = {"name": "monte-carlo", "trajectories": 2, "episodes": 2}
    parts = {"fleet": fleet, "policy": policy, "algorithm": algorithm, "evaluation": evaluation}
    return make_config({"name": "faulty", "seeds": 1, "rounds": 1, **parts})


def test_an_exception_of_the_environment_is_not_taken_for_a_broken_rule():
    """Unpacking fails in the environment as it does in Gymnasium's wrappers around an old environment."""
    for words in ("1", "1,2,3,4"):
        gymnasium.register("Sensor-v0", lambda words=words, **_: faulty_envs.Sensor(words))
        try:
            found = pf.check_env("Sensor-v0", episodes=2)
            fleet = gymnasium_fleet("Sensor-v0", agents=1, horizon=5)
            fleet.task(0).check()
        finally:
            del gymnasium.registry["Sensor-v0"]
        assert [x.level for x in found.findings] == ["error"]
        assert "all of 2 episodes failed: the environment raised ValueError:" in found.findings[0].text


def test_an_environment_of_which_only_one_can_be_open_is_checked_and_said_so():
    found = pf.check_env("faulty_envs:Single", episodes=2)
    assert [x.level for x in found.findings] == ["warning"]
    assert found.findings[0].text.startswith("only one can be open at a time: set parallel = 1 (")
    assert "the port is taken" in found.findings[0].text
    assert "2 random episodes" in found.summary


@pytest.mark.parametrize("name", ERRORS)
def test_broken_rules_are_a_sentence_before_training(name, tmp_path, monkeypatch):
    monkeypatch.setattr("perfedrl.simulation.python_loop.measure", lambda *_: pytest.fail("played"))
    with pytest.raises(UserError) as error:
        train(config(name), tmp_path)
    assert str(error.value).startswith(f"agent 0 (faulty_envs:{name}): {ERRORS[name]}")
    assert list(tmp_path.iterdir()) == []


def test_actions_without_bounds_are_warned_of_before_training(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "perfedrl"):
        train(config("Unbounded"), tmp_path)
    assert caplog.text.count("faulty_envs:Unbounded: 2 of 2 components of the action box have no bounds") == 1


def test_rules_that_are_broken_in_a_process_are_a_sentence_too():
    from perfedrl.gym_environment.open_environment import LocalEnvironment
    from perfedrl.gym_environment.recipe import Recipe

    env = LocalEnvironment(Recipe("faulty_envs:FourValues"))
    env.ask(None, seed=3)
    env.ask(np.int64(0))
    assert env.answer().failure.startswith("breaks Gymnasium's rules: step must return the five values")
    assert gymnasium_fleet("faulty_envs:FourValues", agents=1, horizon=3, processes=True).check() == []


def test_the_command_prints_the_findings_and_its_exit_code_says_whether_one_is_an_error(run, tmp_path):
    file = tmp_path / "found.json"
    code, out, _ = run("check", "faulty_envs:ArrayReward", "--json", str(file))
    assert code == 2
    assert "error: the reward must be one number, got an array of shape (1,)" in out
    content = json.loads(file.read_text())
    assert not content["ok"]
    assert content["findings"] == [{"level": "error", "text": ERRORS["ArrayReward"]}]
    code, out, _ = run("check", "faulty_envs:Sound", "--set", "size=1e4", "--episodes", "2")
    assert code == 0
    assert "warning: rewards reach" in out
    code, out, _ = run("check", "faulty_envs:Sound")
    assert (code, out.splitlines()[-1]) == (0, "nothing is wrong")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fleet.toml"], "expected an environment such as CartPole-v1 or my_env:MyEnv, got the config fleet.toml"),
        (["faulty_envs:Sound", "--set", "size"], "--set must be NAME=VALUE"),
        (["faulty_envs:Sound", "--set", "size=1", "--set", "size=2"], "--set size is given twice"),
        (["faulty_envs:Sound", "--episodes", "0"], "expected episodes >= 1"),
    ],
)
def test_bad_options_are_one_sentence(run, arguments, said):
    code, _, err = run("check", *arguments)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1
