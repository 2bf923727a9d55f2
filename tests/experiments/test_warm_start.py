"""Personalization from a saved policy: it fits the agent, and every attempt has trajectories of its own."""

import jax
import numpy as np
import pytest

import perfedrl as pf
from perfedrl.experiments.config import make_config
from perfedrl.experiments.training import train
from perfedrl.saved_policies.file import SavedPolicy
from perfedrl.saved_policies.spaces import Array, Spaces
from tests.support.tiny_arc import TINY_ARC

FEW = {"trajectories": 2, "episodes": 2}


@pytest.fixture(scope="module")
def arc(tmp_path_factory):
    return train(make_config(TINY_ARC), tmp_path_factory.mktemp("runs"))


@pytest.fixture
def keys(monkeypatch):
    """The keys of adaptations, each of which is measured to be worse than its start."""
    found, plays = [], []

    def record(algorithm, agent, task, theta, alpha, key, trajectories, steps):
        found.append(tuple(jax.random.key_data(key).tolist()))
        return theta

    def play(policy, task, params, key, episodes):
        """Each measurement is lower than the one before, and the start is measured first."""
        plays.append(params)
        return {"return": np.full(episodes, -float(len(plays)))}, np.zeros((episodes, 4, 2))

    monkeypatch.setattr("perfedrl.experiments.personalize._adapt_compiled", record)
    monkeypatch.setattr("perfedrl.experiments.personalize._play_compiled", play)
    return found


def test_attempts_after_which_the_start_was_kept_have_trajectories_of_their_own(arc, keys):
    policy, counts = None, []
    for _ in range(3):
        own = pf.personalize(arc, agent=0, start=policy, keep="better", **FEW)
        policy = own.policy
        counts.append((own.kept, len(own.about["adaptations"]), own.about["attempts"]))
    assert counts == [("start", 0, 1), ("start", 0, 2), ("start", 0, 3)]
    assert len(set(keys)) == 3


def test_files_without_a_count_of_attempts_go_on_as_before(arc, keys):
    one = pf.personalize(arc, agent=0, **FEW).policy
    pf.personalize(arc, start=one, **FEW)
    old = {key: value for key, value in one.about.items() if key != "attempts"}
    pf.personalize(arc, start=SavedPolicy(one.description, one.params, one.spaces, old), **FEW)
    assert keys[2] == keys[1] != keys[0], "where every step was kept, both counts agree"
    for wrong in (0, -1, "2", True, 2**32):
        damaged = SavedPolicy(one.description, one.params, one.spaces, {**old, "attempts": wrong})
        with pytest.raises(pf.UserError, match="the policy is damaged: attempts must be at least 1, got"):
            pf.personalize(arc, start=damaged, **FEW)


def test_a_policy_in_other_units_is_rejected(tmp_path, untyped):
    fleet = {"env": "gymnasium", "id": "rooms:Room", "options": {"action": "box"}, "agents": 1, "horizon": 3}
    table = {**TINY_ARC, "policy": {"name": "gaussian-mlp", "hidden": []}}
    scaled, unscaled = (
        train(make_config({**table, "fleet": {**fleet, "scale_actions": scale}}), tmp_path) for scale in (True, False)
    )
    policy = pf.personalize(scaled, agent=0, **FEW).policy
    assert pf.personalize(scaled, start=policy, **FEW).about["attempts"] == 2
    with pytest.raises(pf.UserError, match=r"the policy does not fit the agent: its actions are Box\(.*, the agent's "):
        pf.personalize(unscaled, agent=0, start=policy, **FEW)
    spaces = Spaces(observations=Array(shape=(1, 2)), actions=policy.spaces.actions)
    other = SavedPolicy(policy.description, policy.params, spaces, policy.about)
    with pytest.raises(pf.UserError, match=r"does not fit the agent: its observations are Array\(.*shape=\(1, 2\)"):
        pf.personalize(scaled, start=other, **FEW)
    unknown = SavedPolicy(policy.description, policy.params, None, policy.about)
    assert pf.personalize(scaled, start=unknown, **FEW).attempts == 2
