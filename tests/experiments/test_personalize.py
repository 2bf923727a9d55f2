"""Personalization: one agent's policy from a saved run, with its outcomes and its cost."""

import json
import shutil
import sys

import jax
import numpy as np
import pytest
from fixtures import write
from safetensors.numpy import load_file, save_file

import perfedrl as pf
from perfedrl.estimators import Sampled, adapt
from perfedrl.experiments.config import make_config
from perfedrl.experiments.files import named_leaves
from perfedrl.experiments.personalize import personal_key
from perfedrl.experiments.training import train

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
    task = finished.config.experiment.fleet.task(0).with_goal((0.5, 0.5))
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
    with pytest.raises(pf.UserError, match="no goal that can be set"):
        pf.personalize(run, goal=(0.0, 0.0))


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


MISTAKES = [
    (["--goal", "1.5,0"], "goal [1.5, 0.0] lies outside the box"),
    (["--goal", "nan,0"], "outside the box"),
    (["--goal", "1"], "two numbers"),
    (["--goal", "a,b"], "two numbers X,Y"),
    (["--agent", "5"], "there is no agent 5: training agents are 0 to 2, held-out ones go on to 4"),
    (["--agent", "-1"], "there is no agent -1"),
    ([], "say which agent"),
    (["--goal", "0,0", "--agent", "1"], "only one of them"),
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
    elif how == "no deployment":
        (folder / "deployment.npz").unlink()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "not a complete run: params.safetensors missing"),
        ("truncated", "not a readable safetensors file"),
        ("pickle", "not a readable safetensors file"),
        ("misfit", "do not fit the policy"),
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
