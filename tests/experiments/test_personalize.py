"""Personalization: one agent's policy from a saved run, with its outcomes and its cost."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from fixtures import write
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import perfedrl as pf
from perfedrl.estimators import Sampled, adapt
from perfedrl.experiments.config import make_config
from perfedrl.experiments.files import named_leaves
from perfedrl.experiments.personalize import personal_key
from perfedrl.experiments.training import train
from perfedrl.saved_policies.file import encode

ACTING = Path(__file__).parents[2] / "docs" / "tutorials" / "acting.md"

TABLE = {
    "name": "tiny-arc",
    "seeds": [4, 7],
    "rounds": 2,
    "evaluate_every": 2,
    "fleet": {"env": "arc", "goals": 3, "held_out": 2, "horizon": 6},
    "policy": {"name": "mlp", "hidden": [5]},
    "algorithm": {"name": "per-fedavg-pg", "variant": "first-order", "alpha": 0.8, "beta": 0.2, "m_in": 3, "m_out": 3},
    "evaluation": {"name": "monte-carlo", "trajectories": 4, "episodes": 8, "few_shot": [0, 4], "rollouts": 2},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(make_config(TABLE), tmp_path_factory.mktemp("runs"))


def test_a_neural_run_is_read_back_as_it_was_saved(finished):
    again = pf.load_run(finished.folder)
    jax.tree.map(np.testing.assert_array_equal, again.params, finished.params)
    for one, two in ((again.history, finished.history), (again.deployment, finished.deployment)):
        for name, x in one.arrays().items():
            np.testing.assert_array_equal(x, two.arrays()[name], err_msg=name)
    assert sorted(load_file(finished.folder / "params.safetensors")) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert finished.deployment.outcomes["success"].shape == (2, 2, 2)


@pytest.mark.slow
def test_one_step_is_the_papers_adaptation_on_that_agent_alone__algorithm_1_line_12(finished):
    own = pf.personalize(finished, goal=(0.5, 0.5), trajectories=90, seed=7, episodes=16)
    task = dataclasses.replace(finished.config.experiment.fleet.task(0), goal=np.asarray((0.5, 0.5)))
    theta = jax.tree.map(lambda x: x[1], finished.params)
    (step,) = jax.random.split(jax.random.split(personal_key(7, "goal 0.5,0.5", 0))[0], 1)
    expected = adapt(Sampled(finished.config.experiment.policy)(task), theta, 0.8, step, 90)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), own.params, expected)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), own.params, theta)
    assert max(jax.tree.leaves(moved)) > 0.01, "the parameters moved"
    assert own.cost == 90
    assert own.rollouts_before.shape == own.rollouts_after.shape == (12, 7, 2)
    assert set(own.before) == {"return", "success", "distance"}
    assert 0 <= own.after["success"].low <= own.after["success"].mean <= own.after["success"].high <= 1


def test_an_agent_of_a_clustered_run_chooses_its_initialization(tmp_path):
    """Agents in opposite corners get the algorithm's own personalization, from different clusters, at its cost."""
    table = {
        **{"name": "corners", "seeds": [1], "rounds": 8, "evaluate_every": 8, "policy": {"name": "table"}},
        "fleet": {"env": "gridworld", "width": 3, "horizon": 5, "goals": [[0, 0], [2, 2]]},
        "algorithm": {"name": "clustered", "alpha": 0.5, "beta": 3.0, "local_steps": 2, "m": 8, "m_choose": 4},
    }
    run = train(make_config(table), tmp_path)
    algorithm, (_, state) = run.config.experiment.algorithm, run.config.experiment.initial_states(0)
    message, starts = jax.tree.map(lambda x: x[0], run.message), []
    for i in range(2):
        own = pf.personalize(run, agent=i, trajectories=40, episodes=4)
        agent = Sampled(run.config.experiment.policy)(run.config.experiment.fleet.task(i))
        (step,) = jax.random.split(jax.random.split(personal_key(1, own.agent, 0))[0], 1)
        expected = algorithm.personalize(message, state, agent, step, 40)
        np.testing.assert_allclose(own.params, expected, atol=1e-6)
        assert own.cost == 40
        starts.append(np.argmin([np.linalg.norm(own.params - theta) for theta in message.theta]))
    assert sorted(starts) == [0, 1]
    with pytest.raises(pf.UserError, match="choose one of several initializations before their step"):
        pf.evaluate(run, alpha=1.0)


@pytest.mark.slow
def test_several_steps_cost_several_batches_and_give_other_parameters(finished):
    one, three = (pf.personalize(finished, agent=1, trajectories=50, steps=n, episodes=4) for n in (1, 3))
    assert three.cost == 150

    def length(own):
        return sum(np.abs(a).sum() for a in jax.tree.leaves(own.params))

    assert length(one) != length(three)


def test_agents_are_numbered_training_first_then_held_out(finished):
    fleet = finished.config.experiment.fleet
    for agent, task in ((2, fleet.task(2)), (4, fleet.task(1, held_out=True))):
        own = pf.personalize(finished, agent=agent, trajectories=2, episodes=2)
        np.testing.assert_array_equal(own.task.goal, task.goal)
        assert ("held out" in own.agent) == (agent > 2)
    assert pf.personalize(finished, task=fleet.task(0), trajectories=2, episodes=2).agent == "own task"


def test_personalization_is_bitwise_repeatable(finished):
    twice = [pf.personalize(finished.folder, agent=3, trajectories=20, episodes=8) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, twice[0].params, twice[1].params)
    assert twice[0].after == twice[1].after
    other = pf.personalize(finished.folder, agent=3, trajectories=20, episodes=8, draw=1)
    assert other.rollouts_before[0, 0].tolist() != twice[0].rollouts_before[0, 0].tolist(), "another draw"
    neighbour = pf.personalize(finished.folder, agent=4, trajectories=20, episodes=8)
    assert neighbour.rollouts_before[0, 0].tolist() != twice[0].rollouts_before[0, 0].tolist(), (
        "every agent has its own key"
    )


@pytest.mark.slow
def test_a_tabular_run_can_be_personalized_too(tmp_path):
    table = {**TABLE, "fleet": {"env": "gridworld", "width": 2}, "policy": {"name": "table"}}
    run = train(make_config({k: v for k, v in table.items() if k != "evaluation"}), tmp_path)
    own = pf.personalize(run, agent=0, trajectories=20, episodes=50)
    assert set(own.after) == {"return"}
    by_goal, by_setting = (
        pf.personalize(run, **how, episodes=4) for how in ({"goal": (1, 0)}, {"settings": {"goal": (1, 0)}})
    )
    assert by_goal.agent == by_setting.agent == "goal 1,0"
    np.testing.assert_array_equal(by_goal.params, by_setting.params)
    assert by_goal.policy.act(2, deterministic=True) in range(4)


@pytest.mark.parametrize("own", ["--goal=0.5,0.5", "--agent=4"])
def test_the_command_prints_before_after_and_cost_and_writes_both_files(run, tmp_path, finished, own):
    code, out, _ = run("personalize", finished.folder, own, "--trajectories", "5", "--out", "mine.safetensors")
    assert code == 0
    assert "before" in out
    assert "success rate" in out
    assert "cost: 5 trajectories" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.png", "mine.safetensors"]
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")
    loaded = load_file(tmp_path / "mine.safetensors")
    assert {name: x.shape[1:] for name, x in named_leaves(finished.params).items()} == {
        name: x.shape for name, x in loaded.items()
    }


def test_without_out_the_files_are_named_after_run_and_agent(run, tmp_path, finished):
    code, _, _ = run("personalize", finished.folder, "--goal", "0.5,-0.5", "--trajectories", "2")
    assert code == 0
    names = sorted(path.name for path in (tmp_path / "personalized").iterdir())
    stem = f"{finished.folder.name}-goal_0.5_-0.5-seed4-draw0-1x2"
    assert names == [f"{stem}.{kind}" for kind in ("png", "safetensors")]


def test_the_file_is_a_policy_that_acts_and_says_where_it_came_from(run, tmp_path, finished):
    code, _, _ = run("personalize", finished.folder, "--agent", 4, "--trajectories", 5, "--out", "mine.safetensors")
    assert code == 0
    saved = pf.load_policy(tmp_path / "mine.safetensors")
    assert saved.description == finished.config.experiment.policy.description
    assert saved.act([0.1, 0.2]) in range(8)
    about = saved.about
    assert (about["run"], about["digest"]) == (finished.folder.name, finished.config.digest)
    assert about["fleet"]["env"] == "arc"
    assert about["choice"] == {"agent": 4}
    adapted = {"run": finished.folder.name, "agent": "agent 4 (held out)", "trajectories_per_step": 5}
    assert about["adaptations"] == [adapted | {"alpha": 0.8, "steps": 1, "draw": 0}]
    own = pf.personalize(finished, agent=4, trajectories=5)
    for name, x in named_leaves(own.params).items():
        np.testing.assert_array_equal(x, saved.params[name])
        np.testing.assert_array_equal(x, own.policy.params[name])


def test_the_page_names_all_keys_of_the_file(tmp_path, finished):
    pf.personalize(finished, agent=4, trajectories=2, episodes=2).save(tmp_path / "mine.safetensors")
    with safe_open(tmp_path / "mine.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    _, whole, about = ACTING.read_text().replace("| key of `about` |", "| metadata |").split("| metadata |")
    named = [
        {
            key
            for line in table.splitlines()
            if line.startswith("| `")
            for key in re.findall(r"`(\w+)`", line.split("|")[1])
        }
        for table in (whole, about)
    ]
    assert named == [{*metadata, "spaces"}, {*json.loads(metadata["about"])}]


def test_a_goal_is_a_setting_and_has_the_same_bits(finished):
    by_goal = pf.personalize(finished, goal=(0.5, 0.5), trajectories=5, episodes=4)
    by_setting = pf.personalize(finished, settings={"goal": (0.5, 0.5)}, trajectories=5, episodes=4)
    assert by_goal.agent == by_setting.agent == "goal 0.5,0.5"
    jax.tree.map(np.testing.assert_array_equal, by_goal.params, by_setting.params)


def test_the_json_has_the_agents_settings_and_what_is_unusual_about_it(run, tmp_path, finished):
    command = ["personalize", finished.folder, "--set", "goal=-0.8,0", "--trajectories", "2", "--json", "own.json"]
    assert run(*command)[0] == 0
    content = json.loads((tmp_path / "own.json").read_text())
    assert content["choice"] == {"settings": {"goal": [-0.8, 0]}}
    (warning,) = content["warnings"]
    assert warning.startswith("goal -0.8,0 is far outside what was trained on")


def test_the_repr_of_a_personalization_is_short(finished):
    own = pf.personalize(finished, agent=0, trajectories=2, episodes=4)
    assert len(repr(own)) < 800


@pytest.mark.parametrize("how", [("--goal", "-0.8,0"), ("--set", "goal=-0.8,0")])
def test_an_agent_far_from_training_is_told_in_numbers(run, finished, how):
    code, out, err = run("personalize", finished.folder, *how, "--trajectories", 2)
    assert code == 0
    assert "goal -0.8,0 is far outside what was trained on: training agents have 0.7021,-0.3835 to 0.8,0.3835" in err
    assert "the nearest is 1.55 away" in err
    assert "before" in out


def test_a_saved_policy_goes_on_where_it_stopped(run, tmp_path, finished):
    command = ("personalize", finished.folder, "--trajectories", 5)
    assert run(*command, "--goal", "0.5,0.5", "--out", "one.safetensors")[0] == 0
    code, out, _ = run(*command, "--from", "one.safetensors", "--out", "two.safetensors")
    assert code == 0
    assert "goal 0.5,0.5" in out
    assert "after 1 earlier adaptation" in out
    one, two = (pf.load_policy(tmp_path / f"{name}.safetensors") for name in ("one", "two"))
    assert two.about["return_before"] == one.about["return_after"], "measured over the same episodes"
    assert [x["agent"] for x in two.about["adaptations"]] == ["goal 0.5,0.5"] * 2
    again = pf.personalize(finished, start=one, trajectories=5)
    np.testing.assert_array_equal(again.params[0]["weight"], two.params["0.weight"])
    other = pf.personalize(finished, start=one, agent=1, trajectories=5, episodes=4)
    assert other.agent == "agent 1 (training)"


def test_a_further_step_has_trajectories_of_its_own(finished, monkeypatch):
    keys = []

    def record(algorithm, agent, task, theta, alpha, key, trajectories, steps):
        keys.append(jax.random.key_data(key).tolist())
        return theta

    monkeypatch.setattr("perfedrl.experiments.personalize._adapt_compiled", record)
    one = pf.personalize(finished, agent=0, trajectories=2, episodes=2)
    pf.personalize(finished, start=one.policy, trajectories=2, episodes=2)
    assert keys[0] != keys[1]


def test_a_saved_policy_of_another_policy_is_rejected(run, tmp_path, finished):
    policy = pf.TableSoftmax(3, 2)
    path = tmp_path / "table.safetensors"
    path.write_bytes(encode(policy.description, {"theta": np.zeros((3, 2), np.float32)}, None, {"adaptations": []}))
    with pytest.raises(pf.UserError, match="does not fit the run"):
        pf.personalize(finished, agent=0, start=path)
    assert_rejected(run, tmp_path, ["personalize", finished.folder, "--from", "none.safetensors"], "there is no file")


@pytest.fixture
def worse(finished, monkeypatch):
    """Adaptations that always move away from the agent's goal, and the shared parameters."""
    theta = jax.tree.map(lambda x: np.asarray(x[0]), finished.params)
    away = np.zeros(8, np.float32)
    away[4] = 50.0
    bad = (theta[0], {"weight": 0 * theta[1]["weight"], "bias": away})
    monkeypatch.setattr("perfedrl.experiments.personalize._adapt_compiled", lambda *_: bad)
    return theta, bad


@pytest.mark.parametrize("keep", ["adapted", "better"])
def test_an_agent_that_loses_by_its_step_is_told_and_may_keep_the_shared_policy(run, tmp_path, finished, worse, keep):
    theta, bad = worse
    code, _, err = run("personalize", finished.folder, "--agent", 1, "--keep", keep, "--out", "mine.safetensors")
    assert code == 0
    assert "the step made the agent worse: return " in err
    assert "over 512 episodes that the step did not use" in err
    assert ("the shared policy is kept" in err) == (keep == "better")
    saved = pf.load_policy(tmp_path / "mine.safetensors")
    assert len(saved.about["adaptations"]) == (keep == "adapted")
    for name, x in named_leaves(theta if keep == "better" else bad).items():
        np.testing.assert_array_equal(saved.params[name], x)


def test_an_agent_that_gains_is_told_nothing(run, finished, monkeypatch):
    code, _, err = run("personalize", finished.folder, "--agent", 1, "--trajectories", 200, "--keep", "better")
    assert (code, err) == (0, "")


MISTAKES = [
    (["--set", "goal"], "--set must be NAME=VALUE"),
    (["--set", "goal=0.5,0", "--set", "goal=0,0"], "given twice"),
    (["--set", "gaol=0.5,0"], "no setting 'gaol'; did you mean 'goal'"),
    (["--set", "goal=0.5"], "goal must be 2 numbers"),
    (["--set", "goal=0.5,0", "--goal", "0,0"], "by only one of these"),
    ([], "a new agent has the settings goal: 0.7021,-0.3835 to 0.8,0.3835"),
    (["--goal", "1.5,0"], "goal [1.5, 0.0] lies outside the box"),
    (["--goal", "nan,0"], "goal must be finite"),
    (["--goal", "1"], "goal must be 2 numbers"),
    (["--goal", "a,b"], "two numbers X,Y"),
    (["--agent", "5"], "there is no agent 5: training agents are 0 to 2, held-out ones go on to 4"),
    (["--agent", "-1"], "there is no agent -1"),
    ([], "say which agent"),
    (["--goal", "0,0", "--agent", "1"], "by only one of these"),
    (["--agent", "0", "--trajectories", "0"], "trajectories must be from 1"),
    (["--agent", "0", "--steps", "0"], "steps must be from 1"),
    (["--agent", "0", "--seed", "5"], "the run has no seed 5; it has 4, 7"),
    (["--agent", "0", "--alpha", "-1"], "alpha must be"),
    (["--agent", "0", "--draw", "-1"], "draw must be"),
    (["--agent", "0", "--out", "mine.png"], "a .safetensors file"),
    (["--agent", "0", "--out", "/dev/null/x.safetensors"], "/dev/null is a file"),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES)
def test_a_mistake_is_one_sentence_and_writes_nothing(run, tmp_path, monkeypatch, finished, options, words):
    monkeypatch.setattr("perfedrl.experiments.personalize._adapt_compiled", lambda *_: pytest.fail("sampled"))
    assert_rejected(run, tmp_path, ["personalize", finished.folder, *options], words)


def assert_rejected(run, tmp_path, command, words):
    before = sorted(tmp_path.iterdir())
    code, _, err = run(*command)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1, err
    assert sorted(tmp_path.iterdir()) == before, "nothing is written"


def test_infinite_parameters_are_an_error(finished, monkeypatch):
    broken = jax.tree.map(lambda x: np.full_like(x[0], np.inf), finished.params)
    monkeypatch.setattr("perfedrl.experiments.personalize._adapt_compiled", lambda *_: broken)
    with pytest.raises(pf.UserError, match=r"lower alpha, which is 0\.8"):
        pf.personalize(finished, agent=0)


@pytest.mark.parametrize("asked", [{"goal": "0.6,0.5"}, {"agent": 0, "trajectories": 2.5}, {"agent": 0, "draw": 0.5}])
def test_wrong_types_are_rejected_in_python(finished, asked, untyped):
    with pytest.raises(pf.UserError):
        pf.personalize(finished, **asked)


def test_a_task_that_does_not_fit_the_policy_is_rejected(finished):
    with pytest.raises(pf.UserError, match="does not fit"):
        pf.personalize(finished, task=pf.gridworld().task(0))


@pytest.mark.slow
def test_a_run_of_local_training_has_no_shared_initialization(run, tmp_path):
    alone = {**TABLE, "fleet": {"env": "arc", "goals": 2, "held_out": 0, "horizon": 6}}
    alone |= {"algorithm": {"name": "local-pg", "beta": 0.1, "m": 2}, "evaluation": {"name": "auto"}, "seeds": 1}
    trained = train(make_config(alone), tmp_path / "runs")
    for command in ("personalize", "evaluate"):
        options = ["--agent", "0"] if command == "personalize" else []
        assert_rejected(run, tmp_path, [command, trained.folder, *options, "--alpha", "1"], "trained every agent alone")
    with pytest.raises(pf.UserError, match="nothing for held-out agents"):
        make_config({**alone, "fleet": TABLE["fleet"]})


@pytest.mark.slow
def test_configs_that_train_together_keep_their_own_rollouts(finished, tmp_path):
    """A run's rollouts are those of its own first seed, as if it had trained alone."""
    other = make_config({**TABLE, "seeds": [9], "algorithm": {**TABLE["algorithm"], "alpha": 3.0}})
    together = train([make_config(TABLE), other], tmp_path / "together")
    alone = train(other, tmp_path / "alone")
    np.testing.assert_array_equal(together[0].deployment.rollouts, finished.deployment.rollouts)
    np.testing.assert_array_equal(together[1].deployment.rollouts, alone.deployment.rollouts)
    assert not np.array_equal(together[0].deployment.rollouts, together[1].deployment.rollouts)


def damage(folder, how):
    params = folder / "params.safetensors"
    if how == "missing":
        params.unlink()
    elif how == "truncated":
        params.write_bytes(params.read_bytes()[:100])
    elif how == "pickle":
        params.write_bytes(b"\x80\x04\x95\x00")
    elif how == "misfit":
        save_file({"0.weight": np.zeros((2, 3, 3), np.float32)}, params)
    elif how == "nan":
        save_file({name: np.full_like(x, np.nan) for name, x in load_file(params).items()}, params)
    elif how == "history of another run":
        history = dict(np.load(folder / "history.npz"))
        np.savez(folder / "history.npz", **{**history, "seeds": history["seeds"] + 1})
    elif how == "no deployment":
        (folder / "deployment.npz").unlink()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "not a complete run: params.safetensors missing"),
        ("truncated", "not a readable safetensors file"),
        ("pickle", "not a readable safetensors file"),
        ("misfit", "do not fit the policy"),
        ("nan", "the saved parameters are damaged: some are not finite"),
        ("history of another run", "history.npz is of another run than the config"),
        ("no deployment", "deployment.npz missing"),
    ],
)
def test_a_damaged_run_is_rejected(run, tmp_path, finished, how, words):
    folder = tmp_path / finished.folder.name
    shutil.copytree(finished.folder, folder)
    damage(folder, how)
    assert_rejected(run, tmp_path, ["personalize", folder, "--agent", "0"], words)


def test_a_run_that_has_not_finished_has_no_initialization_to_personalize(run, tmp_path):
    (tmp_path / "some-run.partial").mkdir()
    assert_rejected(run, tmp_path, ["personalize", "some-run.partial", "--agent", "0"], "no trained initialization yet")


def test_train_writes_a_report_page(run, tmp_path):
    config = write(tmp_path / "tiny.toml", TABLE)
    code, _, _ = run("train", config, "--report", "page.html")
    assert code == 0
    page = (tmp_path / "page.html").read_text()
    assert "perfedrl train" in page
    assert str(sys.executable) not in page
    about = json.loads(next((tmp_path / "runs").glob("*/provenance.json")).read_text())
    assert about["device"] in page
