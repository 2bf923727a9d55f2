"""Files of policies: they act as the policy that was saved, without JAX, and damaged files are rejected."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import perfedrl as pf
from perfedrl.compilation import jit
from perfedrl.envs import ENVS
from perfedrl.experiments.files import named_leaves
from perfedrl.policies import (
    POLICIES,
    ActorCritic,
    Contextual,
    GaussianMLP,
    LinearGaussian,
    MLPSoftmax,
    Normalized,
    SightedPolicy,
    TableSoftmax,
)
from perfedrl.policies.mlp import MLPFactored
from perfedrl.saved_policies.file import SavedPolicy, encode

FLEETS = {
    "table": {"env": "gridworld", "width": 2},
    "log-linear": {"env": "gridworld", "width": 2},
    "mlp": {"env": "arc"},
    "gaussian-mlp": {"env": "pendulum"},
    "linear-gaussian": {"env": "lqr"},
    "actor-critic": {"env": "pendulum"},
    "context-mlp": {"env": "pendulum"},
}
"""A fleet that each registered policy fits."""


def registered(name):
    fleet = dict(FLEETS[name])
    return POLICIES[name](fleet=ENVS[fleet.pop("env")](**fleet))


CASES = dict.fromkeys(POLICIES, registered) | {
    "several components": lambda _: MLPFactored((3, 5, 7), (2, 4, 1)),
    "actor-critic of a softmax": lambda _: ActorCritic(MLPSoftmax((3, 5, 4)), (4, 3, 1)),
    "context of a softmax": lambda _: Contextual(MLPSoftmax((5, 4)), 3, 2),
    "normalized context": lambda _: Normalized(Contextual(GaussianMLP((5, 2)), 3, 2), size=3),
    "normalized": lambda _: Normalized(GaussianMLP((3, 5, 2)), size=3),
    "normalized actor-critic": lambda _: Normalized(ActorCritic(MLPSoftmax((3, 4)), (4, 1)), size=3, rewards=True),
    "normalized rewards of a table": lambda _: Normalized(TableSoftmax(3, 2), rewards=True),
    "sighted": lambda _: SightedPolicy(MLPSoftmax((5, 4)), np.asarray([0.5, -1.5])),
    "sighted normalized": lambda _: SightedPolicy(Normalized(GaussianMLP((5, 2)), size=3), np.asarray([0.5, -1.5])),
    "sighted context": lambda _: SightedPolicy(Contextual(GaussianMLP((6, 2)), 4, 2), np.asarray([0.5])),
    "learned deviation": lambda _: LinearGaussian(np.ones((2, 3)), std=0.3, learn_std=True),
    "no exploration": lambda _: LinearGaussian(np.ones((2, 3)), std=0.0),
}


def parameters(policy):
    """Parameters away from the start, so that no output is zero."""
    rng, start = np.random.default_rng(0), policy.init(jax.random.key(0))
    return jax.tree.map(lambda x: np.asarray(x + rng.uniform(0.1, 0.9, x.shape), np.float32), start)


def observations(description, count=20):
    rng = np.random.default_rng(1)
    if description.states is not None:
        return rng.integers(description.states, size=count)
    return rng.normal(0, 2, (count, description.observation_size)).astype(np.float32)


def test_every_registered_policy_has_a_case():
    assert set(FLEETS) == set(POLICIES)


def test_what_a_file_says_about_its_policy_is_read_as_it_was_written(tmp_path):
    """Digests are texts, also those that look like numbers."""
    policy, path = pf.TableSoftmax(states=2, actions=2), tmp_path / "policy.safetensors"
    about = {"digest": "12e4567890", "run": "run-1234567890", "agent": "true", "alpha": 0.1, "choice": {"agent": 4}}
    path.write_bytes(encode(policy.description, named_leaves(parameters(policy)), None, about))
    assert pf.load_policy(path).about == about


@pytest.mark.parametrize("name", CASES)
def test_a_saved_policy_acts_as_the_policy_in_jax(name, tmp_path):
    policy = CASES[name](name)
    params = parameters(policy)
    path = tmp_path / "policy.safetensors"
    path.write_bytes(encode(policy.description, named_leaves(params), None, {"agent": "agent 3"}))
    saved, obs = pf.load_policy(path), observations(policy.description)
    assert saved.description == policy.description
    assert saved.about == {"agent": "agent 3"}

    rng = np.random.default_rng(5)
    drawn = [saved.act(x, rng=rng) for x in obs]
    u = np.concatenate([x.random((1, policy.noise), np.float32) for x in [np.random.default_rng(5)] for _ in obs])
    expected = jit(jax.vmap(lambda x, u: policy.sample(params, x, u)))(obs, u)
    np.testing.assert_allclose(drawn, expected, rtol=1e-4, atol=1e-5)

    chosen = [saved.act(x, deterministic=True) for x in obs]
    if isinstance(policy.actions, int):
        table = jit(jax.vmap(lambda x: jax.vmap(lambda a: policy.log_prob(params, x, a))(np.arange(policy.actions))))
        assert chosen == np.argmax(table(obs), axis=1).tolist()
    elif policy.actions is None:
        middle = np.full((len(obs), policy.noise), 0.5, np.float32)
        mean = jit(jax.vmap(lambda x, u: policy.sample(params, x, u)))(obs, middle)
        np.testing.assert_allclose(chosen, mean, rtol=1e-4, atol=1e-5)


def test_draws_follow_the_seed_of_the_policy(tmp_path):
    policy = registered("mlp")
    path = tmp_path / "policy.safetensors"
    path.write_bytes(encode(policy.description, named_leaves(parameters(policy)), None, {}))
    one, same, other = (pf.load_policy(path, seed=seed) for seed in (1, 1, 2))
    acts = [[saved.act([0.1, 0.2]) for _ in range(30)] for saved in (one, same, other)]
    assert acts[0] == acts[1] != acts[2]
    assert all(isinstance(a, int) for a in acts[0])


SCRIPT = """
import sys
import numpy as np
import perfedrl as pf

policy = pf.load_policy(sys.argv[1])
action = policy.act(np.zeros(2), deterministic=True), policy.act(np.zeros(2))
assert "jax" not in sys.modules, "JAX was imported"
print(policy)
"""


def test_a_policy_is_loaded_and_acts_without_importing_jax(tmp_path):
    policy = Normalized(MLPSoftmax((2, 3)), size=2)
    path = tmp_path / "policy.safetensors"
    path.write_bytes(encode(policy.description, named_leaves(parameters(policy)), None, {"run": "arc-1", "agent": "x"}))
    done = subprocess.run([sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "MLPSoftmax(widths=(2, 3), activation='tanh')" in done.stdout
    assert "13 parameters; run arc-1, agent x" in done.stdout


@pytest.fixture
def file(tmp_path):
    """A file of a policy, and a function that writes it again with other arrays or other metadata."""
    policy = Normalized(GaussianMLP((3, 4, 2)), size=3)
    path = tmp_path / "policy.safetensors"
    path.write_bytes(encode(policy.description, named_leaves(parameters(policy)), None, {}))
    arrays = load_file(path)
    with safe_open(path, framework="numpy") as opened:
        about = opened.metadata()

    def rewrite(change_arrays=dict, **metadata):
        kept = {key: text for key, text in (about | metadata).items() if text is not None}
        save_file(dict(change_arrays(arrays)), path, metadata=kept)
        return path

    rewrite.path, rewrite.policy = path, json.loads(about["policy"])
    return rewrite


def weight(arrays, value):
    return arrays | {"policy.mean.0.weight": value}


def nested(policy, times):
    return '{"name": "ActorCritic", "actor": ' * times + json.dumps(policy) + "}" * times


BAD = {
    "an array is missing": (lambda f: f(lambda a: {k: x for k, x in a.items() if "log_std" not in k}), "log_std"),
    "a shape differs": (lambda f: f(lambda a: weight(a, np.zeros((3, 5), np.float32))), "of shape [3, 4]"),
    "not finite": (lambda f: f(lambda a: weight(a, np.full((3, 4), np.nan, np.float32))), "finite numbers"),
    "whole numbers": (lambda f: f(lambda a: weight(a, np.zeros((3, 4), np.int32))), "finite numbers"),
    "no description": (lambda f: f(policy=None), "does not describe its policy"),
    "another format": (lambda f: f(format="9"), "does not describe its policy"),
    "not JSON": (lambda f: f(policy="{"), "description of the policy is damaged"),
    "unknown class": (lambda f: f(policy='{"name": "os.system"}'), "description of the policy is damaged"),
    "unknown key": (lambda f: f(policy=json.dumps(f.policy | {"more": 1})), "description of the policy is damaged"),
    "another activation": (
        lambda f: f(policy=json.dumps(f.policy | {"policy": f.policy["policy"] | {"activation": "relu"}})),
        "description of the policy is damaged",
    ),
    "widths of other types": (
        lambda f: f(policy=json.dumps({"name": "MLPSoftmax", "widths": [3, -4, True]})),
        "description of the policy is damaged",
    ),
    "deeply nested": (lambda f: f(policy=nested(f.policy, 5000)), "damaged"),
    "another size normalized": (lambda f: f(policy=json.dumps(f.policy | {"observations": 4})), "damaged"),
    "damaged spaces": (lambda f: f(spaces='{"observations": 3}'), "description of the policy is damaged"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_damaged_file_is_rejected_in_one_sentence(how, file):
    damage, words = BAD[how]
    damage(file)
    with pytest.raises(pf.UserError) as caught:
        pf.load_policy(file.path)
    assert words in str(caught.value)
    assert str(file.path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95\x00", b"\xff" * 100, None])
def test_something_else_than_a_policy_is_rejected(content, tmp_path):
    path = tmp_path / "policy.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(pf.UserError, match=r"not a readable file of a policy|there is no file"):
        pf.load_policy(path)
    with pytest.raises(pf.UserError):
        pf.load_policy(tmp_path)


@pytest.mark.parametrize("obs", [[1.0, 2.0], [[1.0, 2.0, 3.0]], [1.0, np.nan, 2.0], "left", {"a": 1}, None])
def test_an_observation_that_does_not_fit_is_rejected(obs, file):
    with pytest.raises(pf.UserError, match="the observation does not fit the policy"):
        pf.load_policy(file()).act(obs)


@pytest.mark.parametrize("state", [4, -1, 1.0, [1], None])
def test_a_state_that_does_not_exist_is_rejected(state):
    policy = registered("table")
    saved = SavedPolicy(policy.description, named_leaves(parameters(policy)))
    assert saved.act(3) in range(4)
    with pytest.raises(pf.UserError, match="from 0 to 3"):
        saved.act(state)
