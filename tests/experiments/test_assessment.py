"""The evaluation protocol: unseen agents are measured after each step, on episodes that no step used."""

import jax
import numpy as np
import pytest

from perfedrl.errors import UserError
from perfedrl.estimators import Sampled, adapt
from perfedrl.experiments.assessment import Assessment, assess, worst_agent
from perfedrl.experiments.config import make_config
from perfedrl.experiments.stats import bootstrap_interval
from perfedrl.experiments.training import train
from perfedrl.simulation.evaluation import MonteCarlo
from perfedrl.simulation.measurements import step_by_step

CONFIG = {
    "name": "unseen",
    "seeds": 3,
    "rounds": 2,
    "evaluate_every": 2,
    "fleet": {"env": "arc", "goals": 2, "held_out": 1},
    "policy": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "fedavg-pg", "alpha": 0.3, "beta": 0.3, "local_steps": 1, "m": 4},
    "evaluation": {"name": "monte-carlo", "trajectories": 4, "episodes": 8},
}


@pytest.fixture(scope="module")
def unseen(tmp_path_factory):
    return train(make_config(CONFIG), tmp_path_factory.mktemp("runs"))


def test_each_step_is_a_policy_gradient_step_and_is_measured_over_fresh_episodes(unseen):
    parts, key = unseen.config.experiment, jax.random.key(5)
    evaluation = MonteCarlo(parts.agent, episodes=8)
    task, theta = parts.fleet.task(0, held_out=True), jax.tree.map(lambda x: x[0], unseen.params)
    got = jax.jit(lambda key: step_by_step(2, 4, None, evaluation, parts.algorithm, theta, (), task, key))(key)

    @jax.jit
    def by_hand(key):
        adaptation, episodes = jax.random.split(key)
        first, second = jax.random.split(adaptation, 2)
        one = adapt(Sampled(parts.policy)(task), theta, 0.3, first, 4)
        two = adapt(Sampled(parts.policy)(task), one, 0.3, second, 4)
        return [evaluation.outcomes(task, x, episodes)["return"] for x in (theta, one, two)]

    np.testing.assert_allclose(got["return"], by_hand(key), rtol=1e-6)


def test_an_assessment_has_outcomes_by_step_and_costs(unseen):
    found = assess(unseen, steps=2, trajectories=4)
    assert found.part == "held-out"
    assert set(found.outcomes) == {"return", "success", "distance"}
    assert all(x.shape == (3, 3, 1) for x in found.outcomes.values())
    assert [(row.steps, row.trajectories) for row in found.rows] == [(0, 0), (1, 4), (2, 8)]
    assert (found.trained, found.exchanged) == (unseen.history.trajectories[-1], unseen.history.bytes[-1])
    assert found.received * 2 * 2 == found.exchanged  # received and sent, in each of two rounds
    again = assess(unseen, steps=2, trajectories=4)
    assert all(np.array_equal(x, again.outcomes[name]) for name, x in found.outcomes.items())


def test_the_training_agents_can_be_assessed_too(unseen):
    found = assess(unseen, steps=1, trajectories=4, held_out=False)
    assert found.part == "training"
    assert found.outcomes["return"].shape == (3, 2, 2), "seeds, steps, agents"


@pytest.mark.slow
def test_an_assessment_from_scratch_uses_fresh_parameters_and_has_no_cost(unseen):
    settings = {"steps": 1, "trajectories": 4, "episodes": 64}
    fresh = assess(unseen, alpha=0.5, scratch=True, **settings)
    assert (fresh.trained, fresh.exchanged, fresh.received) == (0, 0, 0)
    assert not np.array_equal(fresh.outcomes["distance"], assess(unseen, **settings).outcomes["distance"])


def test_the_worst_agent_is_determined_for_each_seed():
    returns = np.asarray([[[1.0, 5.0]], [[7.0, 3.0]]])
    found = Assessment("held-out", "x", 1, {"return": returns, "distance": returns}, 0, 0, 0)
    assert found.rows[0].mean["return"].mean == 4.0
    assert found.rows[0].worst["return"].mean == 2.0
    np.testing.assert_array_equal(worst_agent("distance", returns[:, 0]), [5.0, 7.0])


def test_of_costs_the_worst_agent_has_the_largest():
    values = np.asarray([[0.01, 0.14, 0.03]])
    for name in ("below_70", "peak_import", "distance"):
        np.testing.assert_array_equal(worst_agent(name, values), [0.14])
    np.testing.assert_array_equal(worst_agent("in_range", values), [0.01])


def test_a_bootstrap_interval_is_deterministic_and_unbounded_for_a_single_seed():
    values = np.arange(10.0)
    assert bootstrap_interval(values) == bootstrap_interval(values)
    mean, low, high = bootstrap_interval(values)
    half = 1.96 * values.std() / np.sqrt(10)
    assert mean == 4.5
    assert low == pytest.approx(4.5 - half, abs=0.15)
    assert high == pytest.approx(4.5 + half, abs=0.15)
    assert bootstrap_interval(values[:1])[1:] == (-np.inf, np.inf)


BAD = {
    "steps": ({"steps": 0}, "steps must be at least 1"),
    "many steps": ({"steps": 20_000}, "at most 10000"),
    "trajectories": ({"trajectories": 0}, "trajectories must be at least 1"),
    "episodes": ({"episodes": 0}, "episodes must be at least 1"),
    "alpha": ({"alpha": -1.0}, "alpha must be a finite number >= 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_assessments_are_rejected(unseen, case):
    settings, sentence = BAD[case]
    with pytest.raises(UserError, match=sentence):
        assess(unseen, **settings)


@pytest.mark.parametrize(("option", "value"), [("--scratch", "0.1"), ("--trajectories", "5")])
def test_the_command_line_rejects_options_that_need_steps_without_them(unseen, run, option, value):
    code, _, err = run("evaluate", unseen.folder, option, value)
    assert (code, f"{option} goes with --steps" in err) == (2, True)
