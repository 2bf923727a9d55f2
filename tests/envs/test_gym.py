"""Gymnasium environments as agents: their physics, their spaces, their episodes, and what happens when they fail."""

import gymnasium
import jax
import numpy as np
import pytest
import rooms
from rooms import Room

from perfedrl.envs import gymnasium_fleet
from perfedrl.envs.gym import fleet as adapter
from perfedrl.envs.gym.space_tables import action_table
from perfedrl.errors import DivergenceError, EnvironmentFailureError, UserError
from perfedrl.estimators import Sampled
from perfedrl.estimators.objective import _gradient
from perfedrl.experiments.config import parse_config
from perfedrl.gym_environment.recipe import Recipe
from perfedrl.policies import MLPSoftmax, Policy, gaussian_mlp, mlp

KEY = jax.random.key(3)


def sampler(fleet, agent=0):
    make = gaussian_mlp if fleet.train.actions is None else mlp
    policy = make(fleet, (4,))
    return fleet.task(agent).sampler(policy), policy, policy.init(jax.random.key(0))


def room(**settings):
    return gymnasium_fleet(["rooms:drawn"], options=settings, horizon=9, parallel=2)


def test_attributes_that_a_constructor_derives_follow_from_the_agents_values():
    env = Recipe("CartPole-v1", {"length": 0.3, "masspole": 0.2})().unwrapped
    assert (env.length, env.masspole) == (0.3, 0.2)
    assert env.polemass_length == pytest.approx(0.06, abs=1e-15)
    assert env.total_mass == pytest.approx(1.2, abs=1e-15)
    assert type(env).__name__ == "CartPoleEnv"
    env.length = 0.7  # what is set later is left alone
    assert env.length == 0.7


@pytest.mark.parametrize(
    ("source", "values"),
    [("Pendulum-v1", {"g": 4.0, "m": 2.0}), ("Acrobot-v1", {"LINK_LENGTH_1": 0.4}), ("rooms:Room", {"scale": 5.0})],
)
def test_arguments_attributes_and_constants_of_a_class_may_vary(source, values):
    env = Recipe(source, values)().unwrapped
    assert {key: getattr(env, key) for key in values} == values
    other = Recipe(source)().unwrapped
    assert all(getattr(other, key) != value for key, value in values.items())


def test_a_parameter_that_the_registration_sets_may_vary():
    sizes = {"map_name": {"train": ["8x8", "8x8"]}, "is_slippery": {"train": [True, False]}}
    fleet = gymnasium_fleet("FrozenLake-v1", sizes, agents=2)
    assert fleet.task(1).settings["is_slippery"] is False


def test_an_episode_is_determined_by_its_seed_and_its_uniforms():
    fleet = gymnasium_fleet("CartPole-v1", {"length": (0.1, 0.9)}, 2, horizon=59, parallel=3)
    play, policy, params = sampler(fleet, agent=1)
    batch = play.sample(params, KEY, 5)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(KEY)))
    seeds, u = rng.integers(2**31, size=5), rng.random((5, 60, 1), np.float32)
    decide = jax.jit(policy.sample)
    for i in range(5):
        env = gymnasium.make("CartPole-v1").unwrapped
        env.length = fleet.task(1).recipe.values["length"]
        env.polemass_length = env.masspole * env.length
        obs, _ = env.reset(seed=int(seeds[i]))
        for t in range(60):
            assert batch.mask[i, t] == 1
            np.testing.assert_array_equal(batch.obs[i, t], obs)
            action = int(decide(params, obs, u[i, t]))
            assert batch.action[i, t] == action
            obs, reward, terminated, _, _ = env.step(action)
            assert batch.reward[i, t] == reward
            if terminated:
                break
        assert not batch.mask[i, t + 1 :].any()
        assert not batch.reward[i, t + 1 :].any()


def test_episodes_do_not_depend_on_parallel_or_processes():
    make = lambda **how: gymnasium_fleet("CartPole-v1", agents=1, horizon=30, **how)  # noqa: E731
    batches = []
    for how in ({"parallel": 1}, {"parallel": 7}, {"parallel": 2, "processes": True}):
        fleet = make(**how)
        play, _, params = sampler(fleet)
        batches += [play.sample(params, KEY, 4), play.sample(params, KEY, 4)]
        fleet.close()
    for batch in batches[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(batches[0], batch, strict=True))


def test_an_episode_ends_by_the_environment_or_by_the_horizon():
    fleet = gymnasium_fleet(["rooms:drawn", "rooms:drawn"], options={"length": 4}, horizon=9, parallel=3)
    play, _, params = sampler(fleet)
    batch = play.sample(params, KEY, 5)
    np.testing.assert_array_equal(batch.mask, [[1] * 4 + [0] * 6] * 5)
    np.testing.assert_array_equal(batch.reward, [[1, 2, 3, 4] + [0] * 6] * 5)
    np.testing.assert_array_equal(batch.obs[:, :4, 0], [[0, 1, 2, 3]] * 5)
    assert len(set(batch.obs[:, 0, 1].tolist())) == 5, "every episode has its own start"
    short = gymnasium_fleet(["rooms:drawn"], options={"length": 99}, horizon=2)
    assert short.task(0).outcomes(jax.tree.map(lambda x: x[0], sampler(short)[0].sample(params, KEY, 1)))["score"] == 6
    limited = gymnasium_fleet("Pendulum-v1", agents=1, horizon=500, options={"max_episode_steps": 7}, parallel=1)
    play, _, params = sampler(limited)
    assert play.sample(params, KEY, 1).mask.sum() == 7


@pytest.mark.parametrize("action", ["discrete", "multi-discrete", "multi-binary", "box"])
def test_actions_of_every_space_reach_the_environment_and_have_a_gradient(action):
    Room.made.clear()
    fleet = gymnasium_fleet("rooms:Room", agents=1, horizon=5, parallel=2, options={"action": action})
    _, policy, params = sampler(fleet)
    batch = fleet.task(0).sampler(policy).sample(params, KEY, 3)
    assert batch.action.shape[2:] == {"discrete": (), "box": (2,)}.get(action, (2,))
    played = [a for env in Room.made for a in env.actions]
    assert len(played) == 12
    assert all(rooms.ACTIONS[action].contains(a) for a in played)
    if action == "discrete":
        assert sorted(batch.action[:, :4].ravel() - 1) == sorted(played)
    gradient = Sampled(policy)(fleet.task(0)).gradient_of(params, batch)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


def converted(low, high, actions, scale=True):
    space = gymnasium.spaces.Box(np.asarray(low, np.float32), np.asarray(high, np.float32))
    return action_table(space, scale).to_environment()(np.asarray(actions, np.float32)).tolist()


def test_actions_from_minus_one_to_one_fill_the_box():
    rows = [[-1, -1], [0, 0], [1, 1], [7, -7], [0.5, 0.5]]
    expected = [[0, -2], [22.5, 0], [45, 2], [45, -2], [33.75, 1]]
    assert converted([0, -2], [45, 2], rows) == expected
    assert converted([0, -2], [45, 2], rows, scale=False) == [[0, -1], [0, 0], [1, 1], [7, -2], [0.5, 0.5]]


def test_components_without_bounds_are_not_scaled():
    most = float(np.finfo(np.float32).max)
    low, high = [-np.inf, 0, -most, 0], [np.inf, np.inf, most, 10]
    assert converted(low, high, [[3, -3, 3, 1]]) == [[3, 0, 3, 10]]


def test_a_box_from_minus_one_to_one_keeps_its_bits():
    actions = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    ones = np.ones(3)
    assert (
        converted(-ones, ones, actions)
        == converted(-ones, ones, actions, scale=False)
        == np.clip(actions, -1, 1).tolist()
    )


def test_the_digest_states_scaled_actions_only_where_they_matter():
    def digest(policy, **fleet):
        table = {"env": "gymnasium", "id": "Pendulum-v1", "agents": 2, **fleet}
        algorithm = {"name": "fedavg-pg", "alpha": 0.1, "beta": 0.1}
        parts = {"fleet": table, "policy": {"name": policy}, "algorithm": algorithm}
        return parse_config({"name": "x", "seeds": 1, "rounds": 1, **parts}).digest

    scaled, unscaled = (digest("gaussian-mlp", scale_actions=x) for x in (True, False))
    assert digest("gaussian-mlp") == scaled != unscaled == "a8e97b246c"
    assert digest("mlp") == digest("mlp", scale_actions=False) == "1e96ee6d8b", "as before there were scaled actions"


@pytest.mark.parametrize("seen", ["dict", "image"])
def test_observations_are_flattened_as_gymnasium_does(seen):
    fleet = gymnasium_fleet("rooms:Room", agents=1, horizon=5, options={"seen": seen})
    play, _, params = sampler(fleet)
    batch = play.sample(params, KEY, 1)
    space, env = rooms.SEEN[seen], Room(seen=seen)
    env.steps, env.start = 2, 0.25
    expected = gymnasium.spaces.flatten(space, env._see())
    got = np.array(batch.obs[0, 2])
    if seen == "dict":
        got[-1] = 0.25  # where the episode started
    np.testing.assert_array_equal(got, expected)
    assert batch.obs.dtype == np.float32


def test_environments_stay_open_between_batches_and_are_closed_in_the_end():
    fleet = gymnasium_fleet("rooms:Room", agents=1, horizon=5, parallel=3)
    Room.made.clear(), Room.closed.clear()
    play, _, params = sampler(fleet)
    for _ in range(3):
        play.sample(params, KEY, 4)
    assert (len(Room.made), len(Room.closed)) == (3, 0)
    fleet.close()
    assert len(Room.closed) == 3
    play.sample(params, KEY, 4)  # and open again when they are needed
    assert len(Room.made) == 6
    fleet.close()


class Compiled(Policy):
    """A policy of a user's own, that says nothing of NumPy."""

    inner: MLPSoftmax

    actions, noise = 2, 1

    def init(self, key):
        return self.inner.init(key)

    def sample(self, params, obs, u):
        return self.inner.sample(params, obs, u)

    def log_prob(self, params, obs, action):
        return self.inner.log_prob(params, obs, action)


def test_nothing_compiles_after_the_first_batch():
    fleet = gymnasium_fleet("CartPole-v1", {"length": (0.1, 0.9)}, 3, horizon=50, parallel=4)
    _, inner, params = sampler(fleet)
    policy = Compiled(inner)
    agents = [Sampled(policy)(fleet.task(i)) for i in range(3)]
    agents[0].gradient(params, KEY, 5)
    act = adapter.decisions(jax.tree.structure((policy, params)))
    before = act._cache_size(), _gradient.compilations()
    for i, agent in enumerate(agents * 2):
        agent.gradient(params, jax.random.key(i), 5)
    assert (act._cache_size(), _gradient.compilations()) == before
    assert before[0] == 1
    batches = [fleet.task(0).sampler(x).sample(params, KEY, 5) for x in (inner, policy)]
    assert all(np.array_equal(x, y) for x, y in zip(*batches, strict=True)), "in NumPy it decides alike"


@pytest.mark.parametrize("how", ["nan", "raise"])
@pytest.mark.parametrize("processes", [False, True])
def test_an_environment_that_fails_is_named_with_its_step_and_its_seed(how, processes):
    if processes and how == "nan":
        pytest.skip("what is not finite is found in this process either way")
    Room.made.clear(), Room.closed.clear()
    fleet = gymnasium_fleet(
        "rooms:Room",
        {"trouble": {"train": [None, 2]}},
        agents=2,
        horizon=5,
        parallel=2,
        processes=processes,
        options={"how": how},
        retries=0,
    )
    play, _, params = sampler(fleet, agent=1)
    seed = np.random.default_rng(np.asarray(jax.random.key_data(KEY))).integers(2**31, size=3)
    said = "returned a reward that is not finite" if how == "nan" else "raised ZeroDivisionError: the floor gave way"
    with pytest.raises(EnvironmentFailureError, match=said) as error:
        play.sample(params, KEY, 3)
    assert "agent 1 (rooms:Room: trouble 2): an episode failed: the environment" in str(error.value)
    assert "(step 1 of the episode with seed" in str(error.value)
    assert any(str(s) in str(error.value) for s in seed)
    if not processes:
        assert len(Room.closed) == len(Room.made), "nothing stays open"


BAD = {
    "unknown id": ({"id": "CartPole-v7x"}, "knows no environment 'CartPole-v7x'; did you mean"),
    "class forgotten": ({"id": "robots_of_mine"}, "'robots_of_mine'; one of your own is named by module:Class"),
    "unknown module": ({"id": "nowhere:Room"}, "cannot be imported"),
    "a file": ({"id": "/robots/boat.py:Boat"}, "names a file; expected module:name, such as boat:Boat"),
    "unknown parameter": (
        {"id": "CartPole-v1", "vary": {"lenght": (0, 1)}},
        "no parameter 'lenght'; did you mean 'length",
    ),
    "unknown parameter of a factory": ({"id": "rooms:drawn", "vary": {"depth": (0, 1)}, "horizon": 3}, "no parameter"),
    "no horizon": ({"id": "rooms:Room"}, "episodes of 'rooms:Room' have no registered length"),
    "no environment": ({"id": "rooms:blueprint", "horizon": 3}, "must make a gymnasium.Env; it made a dict"),
    "actions": ({"id": "rooms:Room", "horizon": 3, "options": {"action": "text"}}, "are not supported"),
    "observations": ({"id": "rooms:Room", "horizon": 3, "options": {"seen": "sequence"}}, "have no fixed length"),
    "options": ({"id": "CartPole-v1", "options": {"wings": 2}}, "cannot be made"),
    "other spaces": (
        {"id": "rooms:Room", "horizon": 3, "agents": 2, "vary": {"action": {"train": ["discrete", "box"]}}},
        "agent 0 .*has observations of length 2 and 3 actions, agent 1 .*actions of length 2",
    ),
    "held out": (
        {"id": "CartPole-v1", "agents": 2, "held_out": 2, "vary": {"length": {"list": [0.1, 0.2, 0.3]}}},
        "held_out asks for 2 agents unlike all others, and 1 distinct",
    ),
    "factories": ({"id": [], "horizon": 3}, "needs a list of functions"),
    "factories held out": ({"id": ["rooms:drawn"], "horizon": 3, "held_out": 1}, "one less than the factories"),
    "factories that vary": ({"id": ["rooms:drawn"], "vary": {"length": (1, 2)}}, "factories make each agent as it is"),
    "count of factories": ({"id": ["rooms:drawn"], "agents": 2}, "1 factories for 2 training agents"),
    "retries": ({"id": "CartPole-v1", "retries": -1}, "retries must be from 0"),
    "timeout": ({"id": "CartPole-v1", "processes": True, "timeout": 0}, "number of seconds > 0"),
    "workers": ({"id": "CartPole-v1", "workers": 0}, 'workers must be "auto" or from 1 to 1024; it is 0'),
    "workers and processes": ({"id": "CartPole-v1", "workers": 2, "processes": True}, "exclude each other"),
    "timeout of this process": ({"id": "CartPole-v1", "timeout": 5}, "timeout needs processes = true"),
    "constructor": ({"id": "rooms:Room", "horizon": 3, "options": {"seen": "far"}}, "cannot be made: KeyError: 'far'"),
    "registered constructor": (
        {"id": "FrozenLake-v1", "options": {"map_name": "9x9"}},
        "the environment 'FrozenLake-v1' cannot be made: KeyError",
    ),
    "broken module": ({"id": "unfinished_for_test:Room"}, "'unfinished_for_test:Room' cannot be imported: SyntaxError"),
    "module that exits": ({"id": "exiting_for_test:Room"}, "'exiting_for_test:Room' cannot be imported: SystemExit"),
    "parallel": ({"id": "CartPole-v1", "parallel": 0}, "parallel must be from 1"),
    "outcomes": ({"id": "CartPole-v1", "outcomes": "rooms:SEEN"}, "expected a function of an episode"),
    "outcomes that are nowhere": (
        {"id": "CartPole-v1", "outcomes": "nowhere:f"},
        "the function for outcomes 'nowhere:f'",
    ),
    "outcomes that fail": (
        {"id": "CartPole-v1", "outcomes": lambda episode: {"late": 1.0 if episode.reward[-1] > 0 else 0.0}},
        "fails: TracerBoolConversionError: .* jax.numpy.where instead of if",
    ),
    "outcomes without names": ({"id": "CartPole-v1", "outcomes": lambda episode: 3.0}, "a dict of names and numbers"),
    "outcomes of texts": ({"id": "CartPole-v1", "outcomes": lambda episode: {"a": "b"}}, "fails: TypeError"),
    "outcomes of arrays": ({"id": "CartPole-v1", "outcomes": lambda episode: {"r": episode.reward}}, "one number"),
    "agents": ({"id": "nowhere:Room", "agents": 10**8}, "at most 10000 agents; this has 100000000"),
    "exit": ({"id": "rooms:leaving", "horizon": 3}, "cannot be made: SystemExit: 3"),
    "discount": ({"id": "CartPole-v1", "discount": 1.0}, "discount must lie in"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_rejected_in_one_sentence(case, tmp_path, monkeypatch):
    (tmp_path / "unfinished_for_test.py").write_text("class Room(:\n")
    (tmp_path / "exiting_for_test.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    settings, sentence = BAD[case]
    with pytest.raises(UserError, match=sentence) as error:
        gymnasium_fleet(**settings)
    assert "\n" not in str(error.value)


def test_a_policy_that_diverged_is_not_blamed_on_the_environment():
    fleet = gymnasium_fleet("Pendulum-v1", agents=1, horizon=3, parallel=1)
    policy = gaussian_mlp(fleet)
    params = jax.tree.map(lambda x: x * np.nan, policy.init(jax.random.key(0)))
    with pytest.raises(DivergenceError, match=r"agent 0 .*: the policy's actions are not finite; lower alpha or beta"):
        fleet.task(0).sampler(policy).sample(params, KEY, 1)
    assert fleet.task(0).failures.episodes == 0


def test_without_gymnasium_the_error_names_the_extra_to_install(monkeypatch):
    import importlib

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"perfedrl\[gym\]"):
        gymnasium_fleet("CartPole-v1")


def test_a_users_outcomes_are_added_to_the_score():
    fleet = gymnasium_fleet("rooms:Room", agents=1, horizon=5, outcomes="rooms:far")
    play, _, params = sampler(fleet)
    one = jax.tree.map(lambda x: x[0], play.sample(params, KEY, 1))
    assert fleet.task(0).outcomes(one) == {"score": 10.0, "far": one.obs[0, 1]}
