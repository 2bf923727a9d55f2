"""The navigation families: goals where they should be, steps as derived by hand."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.envs import ENVS, navigation
from perfedrl.experiments.config import load_config
from perfedrl.policies import Policy
from perfedrl.rollout import episode, noise_size
from perfedrl.simulation.history import Deployment
from perfedrl.studies.navigation import NAVIGATION
from perfedrl.studies.navigation.maml_goals import ADVANTAGES_OF, maml_claims, maml_goals, scores_on_maml_goals
from perfedrl.studies.navigation.study import BUDGETS, POINTS, fleet_claims, point_config
from perfedrl.types import Trajectory

NO_NOISE = jnp.zeros(0)
CONFIGS = Path(__file__).parents[2] / "configs"


def with_goal(fleet, goal):
    """An agent of a fleet with another goal."""
    return dataclasses.replace(fleet.task(0), goal=np.asarray(goal))


def angle(goals):
    return np.arctan2(goals[:, 1], goals[:, 0])


def test_the_papers_arc__appendix_c():
    fleet = pf.arc()
    np.testing.assert_allclose(angle(fleet.train.goal), np.linspace(-0.5, 0.5, 6), atol=1e-12)
    np.testing.assert_allclose(angle(fleet.held_out.goal), [-0.4, 0.0, 0.4], atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(fleet.train.goal, axis=1), 0.8)
    assert (fleet.train.horizon, fleet.train.discount, fleet.train.actions) == (20, 0.9, 8)
    assert (fleet.train.radius, fleet.train.step_size, fleet.train.box) == (0.2, 0.15, 1.0)


def test_goals_of_other_arcs_and_of_the_circle():
    wide = pf.arc(goals=5, held_out=1, radius=0.5, span=1.0)
    np.testing.assert_allclose(angle(wide.train.goal), [-1, -0.5, 0, 0.5, 1], atol=1e-12)
    np.testing.assert_allclose(angle(wide.held_out.goal), [0.25], atol=1e-12)
    np.testing.assert_allclose(angle(pf.arc(goals=[0.3, -0.2], held_out=[1.0]).train.goal), [0.3, -0.2])
    assert pf.arc(goals=1, held_out=0).train.goal.tolist() == [[0.8, 0.0]]
    around = pf.circle(goals=4, held_out=4)
    np.testing.assert_allclose(np.mod(angle(around.train.goal), 2 * np.pi), np.arange(4) * np.pi / 2, atol=1e-12)
    uneven = pf.circle(goals=[0.0, np.pi / 2], held_out=2).held_out.goal
    np.testing.assert_allclose(np.mod(angle(uneven), 2 * np.pi), [np.pi / 4, 5 * np.pi / 4], atol=1e-12)
    held_out = np.sort(np.mod(angle(around.held_out.goal), 2 * np.pi))
    np.testing.assert_allclose(held_out, np.pi / 4 + np.arange(4) * np.pi / 2, atol=1e-12)


def test_a_step_of_navigation_by_hand():
    """The reward is that of the position before the move; the box stops what would leave it."""
    task = with_goal(pf.arc(), (0.5, 0.5))
    state, reward, done = task.step(jnp.asarray([0.5, 0.32]), jnp.asarray(2), NO_NOISE)
    np.testing.assert_allclose(state, [0.5, 0.47], atol=1e-6)
    assert reward == 1.0
    assert not done
    assert task.step(jnp.asarray([0.5, 0.25]), jnp.asarray(2), NO_NOISE)[1] == 0.0, "not yet there when it decides"
    assert task.step(jnp.asarray([0.5, 0.65]), jnp.asarray(2), NO_NOISE)[1] == 1.0, "still there when it decides"
    state, reward, _ = task.step(jnp.asarray([0.95, 0.95]), jnp.asarray(1), NO_NOISE)
    np.testing.assert_allclose(state, [1.0, 1.0])
    assert reward == 0.0
    np.testing.assert_allclose(task.reset(jnp.asarray([0.0, 0.75])), [-1.0, 0.5])


def test_a_step_of_point_navigation_by_hand():
    """Clipped per axis, rewarded after the move, over when within a hundredth of the goal on both axes."""
    task = with_goal(pf.point_navigation(), (0.3, -0.1))
    state, reward, done = task.step(jnp.asarray([0.0, 0.0]), jnp.asarray([0.5, -0.02]), NO_NOISE)
    np.testing.assert_allclose(state, [0.1, -0.02], atol=1e-7)
    assert reward == pytest.approx(-np.hypot(0.2, 0.08), abs=1e-6)
    assert not done
    state, reward, done = task.step(jnp.asarray([0.295, -0.1]), jnp.asarray([0.0, 0.005]), NO_NOISE)
    assert done
    assert reward == pytest.approx(-np.hypot(0.005, 0.005), abs=1e-6)
    assert (task.horizon, task.box, task.max_speed) == (100, 0.5, 0.1)
    goals = np.concatenate([pf.point_navigation().train.goal, pf.point_navigation().held_out.goal])
    assert goals.shape == (25, 2)
    assert np.abs(goals).max() <= 0.5


class Beeline(Policy):
    """A policy that always steps by one vector; its parameters are that vector."""

    noise = 0

    def init(self, key):
        return jnp.zeros(2)

    def sample(self, params, obs, u):
        return params

    def log_prob(self, params, obs, action):
        return jnp.zeros(())


def test_an_episode_that_ends_early_is_masked_from_there():
    task = with_goal(pf.point_navigation(horizon=9), (0.3, 0.0))
    played = episode(Beeline(), jnp.asarray([0.1, 0.0]), task, jnp.zeros(noise_size(Beeline(), task)))
    assert played.mask.tolist() == [1, 1, 1] + [0] * 7
    np.testing.assert_allclose(played.reward, [-0.2, -0.1, 0] + [0] * 7, atol=1e-6)
    out = task.outcomes(played)
    assert out["success"] == 1
    assert out["distance"] == pytest.approx(0, abs=1e-6)
    assert out["score"] == pytest.approx(-0.3, abs=1e-6), "undiscounted"
    after_the_end = played.reward - (1 - played.mask)
    assert task.outcomes(played._replace(reward=after_the_end))["score"] == pytest.approx(-0.3, abs=1e-6)
    away = episode(Beeline(), jnp.asarray([0.0, 0.05]), task, jnp.zeros(noise_size(Beeline(), task)))
    assert task.outcomes(away)["success"] == 0
    assert task.outcomes(away)["distance"] == pytest.approx(np.hypot(0.3, 0.5), abs=1e-6)


def test_success_is_entering_the_goal_region_and_distance_is_that_of_the_last_position():
    task = with_goal(pf.arc(), (0.0, 0.0))
    through = jnp.asarray([[0.3, 0.0], [0.15, 0.0], [-0.3, 0.0]])
    past = through + jnp.asarray([0.0, 0.25])
    for path, success, distance in ((through, 1, 0.3), (past, 0, np.hypot(0.3, 0.25))):
        out = task.outcomes(Trajectory(path, jnp.zeros(3, int), jnp.zeros(3), jnp.ones(3)))
        assert out["success"] == success
        assert out["distance"] == pytest.approx(distance, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: navigation([(1.2, 0.0)]), r"goal \[1.2, 0.0\] lies outside the box \[-1, 1\]"),
        (lambda: pf.arc(radius=1.5), "outside the box"),
        (lambda: pf.arc(goals=0), "at least one goal"),
        (lambda: pf.arc(goals=3, held_out=3), "from 0 to 2, the number of midpoints"),
        (lambda: pf.circle(goals=3, held_out=-1), "from 0 to 3"),
        (lambda: pf.arc(horizon=-1), "horizon"),
        (lambda: pf.arc(discount=1.0), "discount"),
        (lambda: navigation([(0.0, 0.0)], radius=0.0), "radius must be a finite number > 0"),
        (lambda: navigation([(0.0, 0.0)], actions=1), "two directions"),
        (lambda: pf.point_navigation(agents=0), "agents >= 1"),
        (lambda: with_goal(pf.arc(), (2.0, 0.0)), "outside the box"),
        (lambda: with_goal(pf.point_navigation(), (2.0, 0.0)), "outside the box"),
        (lambda: with_goal(pf.arc(), (float("nan"), 0.0)), "outside the box"),
    ],
)
def test_invalid_navigation_settings_are_rejected(make, words):
    with pytest.raises(pf.UserError, match=words):
        make()


@pytest.mark.parametrize("name", ["arc", "circle", "point-navigation"])
def test_a_number_in_a_config_may_be_a_list_of_angles(name):
    params = {"goals": [0.1, 0.2], "held_out": 0} if name != "point-navigation" else {"agents": 2}
    assert ENVS[name](**ENVS.resolve(name, params)).agents == 2


def test_agents_differ_in_their_goal_only():
    tasks = [pf.arc().task(i) for i in range(6)]
    assert len({jax.tree.structure(task) for task in tasks}) == 1
    assert len({tuple(task.goal) for task in tasks}) == 6


def test_the_target_is_required_from_twenty_trajectories_on(untyped):
    after = [-15.0, -12.0, -11.7, -11.0, -12.0, -11.0]
    scores = np.asarray([[-39.0, *after], [-41.0, *after]])[..., None]
    deployed = Deployment(np.asarray(BUDGETS), {"score": scores}, np.zeros((1, 7, 1, 0)))
    claims = fleet_claims({POINTS: SimpleNamespace(deployed=deployed)})
    assert [c.measured for c in claims] == pytest.approx([-40, *after])
    assert [c.met for c in claims] == [True, True, False, True, True, False, True]
    assert not any(np.isfinite(c.paper) for c in claims), "MAML's numbers are of other goals"


def test_mamls_numbers_are_compared_from_forty_trajectories_on_its_own_goals():
    by_goal = {0: (-40.0, -42.0), 10: (0.0, 0.0), 20: (-11.0, -13.0), 40: (-1.0, -22.0), 100: (0.0, 0.0)}
    score = np.asarray(2 * [list(by_goal.values())])
    claims = maml_claims({name: {"score": score} for name in ADVANTAGES_OF})
    one = [(-11.71, -11.5, True), (-29.68, -22.0, True), (None, -12.0, False), (None, -13.0, True)]
    found = [(c.paper if np.isfinite(c.paper) else None, c.measured, c.met) for c in claims]
    assert found == [(-40.41, -41.0, True), *one, *one]


def test_the_goals_of_mamls_test_are_drawn_by_its_code():
    np.random.seed(1)
    np.testing.assert_array_equal(maml_goals(), np.random.uniform(-0.5, 0.5, (40, 2)))


def test_scores_on_mamls_goals_before_the_step_do_not_depend_on_the_advantages(untyped):
    config = point_config(1, quick=True)
    message = jax.tree.map(lambda x: np.asarray(x)[None], config.experiment.initial_states(0)[0].message)
    run = SimpleNamespace(config=config, message=message)
    trained, generalized = (scores_on_maml_goals(run, (0, 2), table) for table in ADVANTAGES_OF.values())
    assert trained.score.shape == generalized.score.shape == (1, 2, 40)
    np.testing.assert_array_equal(trained.score[:, 0], generalized.score[:, 0])
    assert (trained.score[:, 1] != generalized.score[:, 1]).all()
    # The policy at the start stands still but for its noise, so a hundred decisions lose the distance a hundred times.
    np.testing.assert_allclose(trained.score[0, 0], -100 * np.linalg.norm(maml_goals(), axis=-1), atol=4)


def test_the_config_of_point_navigation_is_the_one_behind_its_claims():
    assert load_config(CONFIGS / "point_navigation.toml") == point_config(NAVIGATION.seeds)
    fleet = point_config(1).experiment.fleet
    assert fleet.train.horizon + 1 == 100, "decisions, as in MAML"
