"""The setting `sees` of a policy, from a config to runs, evaluations, personalization and files of policies."""

import dataclasses

import jax
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.envs import Navigation
from perfedrl.experiments.config import make_config, parse_config
from perfedrl.experiments.training import train
from perfedrl.federation.agent.config import make_agent_config, read_plan
from perfedrl.federation.server.network_config import networked
from perfedrl.saved_policies.file import SavedPolicy
from tests.support.tiny_arc import TINY_ARC

ARC = TINY_ARC | {"evaluation": TINY_ARC["evaluation"] | {"few_shot": [0, 2], "rollouts": 2}}
FEW = {"trajectories": 2, "episodes": 2}
BEFORE = "ff8883765c"
"""The digest of ARC before there was the setting."""


def with_sees(sees, **changes):
    return {**ARC, "policy": {**ARC["policy"], "sees": sees}, **changes}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return train(make_config(with_sees(["goal"])), tmp_path_factory.mktemp("runs"))


def test_configs_without_sees_keep_their_digests():
    assert parse_config(ARC).digest == parse_config(with_sees([])).digest == BEFORE
    assert (
        parse_config(with_sees("goal")).digest == parse_config(with_sees(["goal"])).digest != parse_config(ARC).digest
    )
    config = parse_config(with_sees(["goal"]))
    assert 'sees = [\n    "goal",\n]' in config.to_toml()
    assert config.trains_with != parse_config(ARC).trains_with


def test_a_run_is_trained_saved_read_back_and_evaluated_with_agents_that_see(seeing):
    assert seeing.config.experiment.policy.widths == (4, 4, 8)
    again = pf.load_run(seeing.folder)
    assert again.config.experiment.fleet.sight == seeing.config.experiment.fleet.sight
    assert len(pf.evaluate(again)) == 3
    assert seeing.deployment.rollouts.shape == (1, 2, 1, 2, 4, 2), "the environment's part of observations is saved"


def test_inspection_shows_what_agents_see():
    found = pf.inspect(make_config(with_sees(["goal"])))
    assert [set(own) for own in found.own] == [{"goal", "seen"}] * 3
    assert found.new_agent.startswith("goal: ")
    assert found.parameters == 4 * 4 + 4 + 4 * 8 + 8


@pytest.mark.parametrize("choice", [{"goal": (0.6, 0.3)}, {"settings": {"goal": (0.6, 0.3)}}, {"agent": 2}])
def test_a_personalized_agent_acts_on_the_numbers_of_its_own_task(seeing, choice, tmp_path):
    own, sight = pf.personalize(seeing, **choice, **FEW), seeing.config.experiment.fleet.sight
    goal = own.task.goal if "agent" in choice else (0.6, 0.3)
    numbers = sight.numbers({"goal": goal})
    np.testing.assert_allclose(own.task.seen, numbers, rtol=1e-6)
    assert own.rollouts_after.shape == (2, 4, 2)
    saved = pf.load_policy(own.save(tmp_path / "own.safetensors"))
    assert saved.description.observation_size == 2
    position, policy = np.asarray([0.25, -0.5], np.float32), seeing.config.experiment.policy
    whole = np.append(position, numbers).astype(np.float32)
    log_probs = [policy.log_prob(own.params, whole, np.asarray(a)) for a in range(8)]
    assert saved.act(position, deterministic=True) == int(np.argmax(log_probs))
    with pytest.raises(pf.UserError, match="expected 2 finite numbers"):
        saved.act(whole)


def test_a_task_of_ones_own_is_seen_too(seeing):
    own = pf.personalize(seeing, task=Navigation(np.asarray([0.1, 0.2]), horizon=3), **FEW)
    np.testing.assert_allclose(own.task.seen, seeing.config.experiment.fleet.sight.numbers({"goal": (0.1, 0.2)}))
    with pytest.raises(pf.UserError, match="policy sees goal, which must be finite numbers, got none"):
        pf.personalize(seeing, task=pf.cart_pole(agents=2).task(0), **FEW)


def test_a_policy_goes_on_with_the_numbers_of_the_agent_that_it_goes_on_with(seeing):
    first = pf.personalize(seeing, agent=0, **FEW).policy
    further = pf.personalize(seeing, agent=1, start=first, **FEW)
    assert further.policy.description.numbers == pytest.approx(tuple(seeing.config.experiment.fleet.task(1).seen))
    assert first.description.numbers != further.policy.description.numbers
    assert pf.personalize(seeing, start=first, **FEW).agent == "agent 0 (training)"
    blind = dataclasses.replace(seeing, config=make_config(ARC))
    with pytest.raises(pf.UserError, match="it sees numbers of its task, and the run's agents do not"):
        pf.personalize(blind, agent=0, start=first, **FEW)
    with pytest.raises(pf.UserError, match="it does not see numbers of its task, and the run's agents do"):
        pf.personalize(seeing, agent=0, start=SavedPolicy(first.description.policy, first.params), **FEW)


@pytest.mark.parametrize(
    ("sees", "changes", "words"),
    [
        (3, {}, "sees must be a list of names"),
        ([1], {}, "sees must be a list of names"),
        (["goal", "goal"], {}, "sees names a parameter twice"),
        (["gaol"], {}, "no parameter 'gaol'; did you mean 'goal'"),
        (["goal"], {"fleet": {"env": "gridworld", "width": 2}}, "numbers of states"),
        (["goal"], {"evaluation": {"name": "exact"}}, "exact evaluation does not know policies that see"),
    ],
)
def test_mistakes_are_one_sentence(sees, changes, words):
    with pytest.raises(pf.UserError, match=words) as error:
        make_config(with_sees(sees, **changes))
    assert "\n" not in str(error.value)


def test_a_table_policy_cannot_see_numbers():
    with pytest.raises(pf.UserError, match="sees needs observations that are vectors"):
        make_config(with_sees(["r"], fleet={"env": "gridworld", "width": 2}, policy={"name": "table", "sees": ["r"]}))


def test_a_network_rejects_sees_before_anything_starts():
    config = parse_config(with_sees(["goal"]))
    with pytest.raises(pf.UserError, match=r"\[policy\] sees is for simulations only so far"):
        networked(config)
    agent = make_agent_config({"fleet": {"env": "arc", "goals": 2, "held_out": 0}})
    with pytest.raises(pf.UserError, match=r"the plan: \[policy\] sees is for simulations only so far"):
        read_plan(config.to_toml(), agent)


def test_moments_of_normalized_observations_are_those_of_the_environment():
    config = make_config(with_sees(["goal"], normalization={"observations": "local"}))
    params = jax.eval_shape(config.experiment.policy.init, jax.random.key(0))
    assert params["normalizer"]["observations"]["mean"].shape == (2,)
    assert params["policy"][0]["weight"].shape == (4, 4)


def test_a_gymnasium_fleet_trains_and_personalizes_a_new_agent(tmp_path):
    pendulums = {"env": "gymnasium", "id": "Pendulum-v1", "agents": 2, "held_out": 1, "horizon": 3, "parallel": 2}
    policy = {"name": "gaussian-mlp", "hidden": [3], "sees": ["g"]}
    table = with_sees(["g"], fleet={**pendulums, "vary": {"g": {"list": [5.0, 15.0, 10.0]}}}) | {"policy": policy}
    run = train(make_config(table), tmp_path)
    own = pf.personalize(run, settings={"g": 8.0}, **FEW)
    assert own.rollouts_before.shape == (2, 4, 3)
    assert own.policy.description.numbers == pytest.approx(tuple(run.config.experiment.fleet.sight.numbers({"g": 8.0})))
    assert own.policy.spaces.observations.flat_size == own.policy.description.observation_size == 3
    assert own.policy.act(np.zeros(3)).shape == (1,)
