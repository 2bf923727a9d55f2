"""Personal parameters: worked with, kept, and never sent, whatever is around the algorithm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratic import Quadratic
from tiers import some_slow

import perfedrl as pf
from perfedrl.algorithms import SGMRL, Attacked, Personal, Private, Robust, StormPG, average, privatize
from perfedrl.algorithms.aggregation import Krum, Median
from perfedrl.algorithms.attacks import Random, SignFlip
from perfedrl.errors import UserError
from perfedrl.estimators import Sampled
from perfedrl.experiments.files import named_leaves
from perfedrl.key_domains import UPLOAD_NOISE
from perfedrl.policies import MLPSoftmax, Normalized

KEY = jax.random.key(3)


def tree(seed):
    rng = np.random.default_rng(seed)
    return {"policy": jnp.asarray(rng.normal(size=3)), "normalizer": {"a": jnp.asarray(rng.normal(size=2))}}


START = tree(0)
ALGORITHMS = {
    "fedavg": pf.FedAvgPG(0.1, 0.3, local_steps=2, m=2),
    "exact": pf.PerFedAvgPG(0.1, 0.3, local_steps=2),
    "shrink": pf.PerFedAvgPG(0.1, 0.3, local_steps=2, control="shrink"),
    "scalar": pf.PerFedAvgPG(0.1, 0.3, local_steps=2, variant="first-order", learn_alpha="scalar"),
    "per-parameter": pf.PerFedAvgPG(0.1, 0.3, local_steps=2, variant="first-order", learn_alpha="per-parameter"),
}


@pytest.fixture(params=some_slow(ALGORITHMS, ["exact", "shrink", "scalar"]))
def inner(request):
    return ALGORITHMS[request.param]


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_an_agent_uses_its_personal_parameters_and_does_not_send_them(inner):
    personal = Personal(inner, ("normalizer",))
    server, state = personal.init(START)
    for key in jax.random.split(KEY, 2):
        seen = personal.with_personal_part(server.message, state)
        full, inside = inner.client(seen, state.inner, Quadratic(tree(1)), key)
        upload, state = personal.client(server.message, state, Quadratic(tree(1)), key)
        sent, learned = named_leaves(upload), named_leaves(full)
        assert {name for name, x in sent.items() if x.shape == (0,)} == {n for n in sent if "normalizer" in n} != set()
        same({n: x for n, x in sent.items() if x.size}, {n: learned[n] for n in sent if "normalizer" not in n})
        same(state.kept, {n: learned[n] for n in sent if "normalizer" in n})
        same(state.inner, inside)
        adapted = personal.personalize(server.message, state, Quadratic(tree(1)), key, 4)
        same(
            adapted,
            inner.personalize(personal.with_personal_part(server.message, state), inside, Quadratic(tree(1)), key, 4),
        )


def test_the_server_averages_shared_parameters_and_keeps_the_start_of_personal_ones(inner):
    personal = Personal(inner, ("normalizer",))
    server, state = personal.init(START)
    uploads, agents = [], range(1, 4)
    for agent in agents:
        uploads.append(personal.client(server.message, state, Quadratic(tree(agent)), KEY)[0])
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *uploads)
    after = named_leaves(personal.server(server, stacked, jnp.ones(3)).message)
    mean = named_leaves(average(stacked, jnp.ones(3)))
    first = named_leaves(server.message)
    same(after, {name: first[name] if "normalizer" in name else mean[name] for name in first})


def test_personal_parameters_do_not_show_in_an_upload():
    personal = Personal(ALGORITHMS["fedavg"], ("normalizer",))
    server, state = personal.init(START)
    one, other = tree(1), {**tree(1), "normalizer": {"a": jnp.asarray([1e3, -1e3])}}
    sent = [personal.client(server.message, state, Quadratic(place), KEY)[0] for place in (one, other)]
    same(*sent)


def test_names_reach_whole_keys_only():
    params = {"ab": jnp.zeros(1), "a": {"b": jnp.zeros(1), "c": jnp.zeros(1)}}
    kept = lambda *names: set(Personal(ALGORITHMS["fedavg"], names).init(params)[1].kept)  # noqa: E731
    assert kept("a") == {"a.b", "a.c"}
    assert kept("a.b") == kept("b") == {"a.b"}
    assert kept("b", "ab") == {"a.b", "ab"}
    for names in (("x",), ("a", "ab")):
        with pytest.raises(UserError, match="parameter is called"):
            kept(*names)


def test_privacy_clips_and_noises_only_shared_parameters():
    personal = Personal(ALGORITHMS["fedavg"], ("normalizer",))
    private = Private(personal, 0.2, 0.5)
    server, state = private.init(START)
    far = {**tree(1), "normalizer": {"a": jnp.asarray([1e3, -1e3])}}
    upload, after = private.client(server.message, state, Quadratic(far), KEY)
    plain, expected = personal.client(server.message, state, Quadratic(far), KEY)
    same(after, expected)
    same(upload, privatize(personal.unchanged_upload(START), plain, 0.2, 0.5, jax.random.fold_in(KEY, UPLOAD_NOISE)))
    quiet, _ = Private(personal, 0.2, 0.0).client(server.message, state, Quadratic(far), KEY)
    assert np.linalg.norm(quiet["policy"] - START["policy"]) == pytest.approx(0.2, rel=1e-5), "of what is sent"


def test_aggregations_and_attacks_see_only_shared_parameters():
    algorithm = ALGORITHMS["fedavg"]
    alone = {"policy": START["policy"]}
    sent = jnp.asarray(np.random.default_rng(5).normal(size=(6, 3)))
    for aggregation, attack in ((Median(), SignFlip()), (Krum(), Random())):
        around = lambda inner, a=aggregation, b=attack: Attacked(Robust(inner, a), b, 1)  # noqa: E731
        whole, part = around(Personal(algorithm, ("normalizer",))), around(algorithm)
        uploads = {"policy": sent, "normalizer": {"a": jnp.zeros((6, 0))}}
        after = whole.server(whole.init(START)[0], uploads, jnp.ones(6))
        same(after.message["normalizer"], START["normalizer"])
        if not isinstance(attack, Random):  # which draws leaf by leaf
            expected = part.server(part.init(alone)[0], {"policy": sent}, jnp.ones(6))
            same(after.message["policy"], expected.message["policy"])


@pytest.mark.parametrize(
    "make", [lambda: StormPG(0.1, 0.2, local_steps=2), lambda: SGMRL(0.1, 0.2, local_steps=2)], ids=["storm", "sg-mrl"]
)
def test_algorithms_that_use_trajectories_do_not_send_personal_parameters(make):
    fleet, personal = pf.arc(goals=2, held_out=0, horizon=2), Personal(make(), ("normalizer.observations",))
    policy = Normalized(MLPSoftmax((2, fleet.train.actions)), 2, rewards=True)
    server, state = personal.init(policy.init(KEY))
    agent = Sampled(policy)(fleet.task(0))
    upload, after = jax.eval_shape(lambda: personal.client(server.message, state, agent, KEY))
    shape = lambda x: jax.tree.map(lambda y: (jnp.shape(y), jnp.result_type(y)), x)  # noqa: E731
    assert shape(upload) == shape(personal.unchanged_upload(server.message))
    assert shape(after) == shape(state)
    assert upload["normalizer"]["rewards"]["square"].shape == (1,)
    assert set(personal.diagnostics(state)) == set(personal.inner.diagnostics(state.inner))


def test_invalid_personal_parameters_are_rejected():
    with pytest.raises(UserError, match="sends nothing"):
        Personal(pf.LocalPG(0.1), ("normalizer",))
    with pytest.raises(UserError, match="inside Private"):
        Personal(Private(ALGORITHMS["fedavg"], 1.0, 0.0), ("normalizer",))
    with pytest.raises(UserError, match="go by names"):
        Personal(ALGORITHMS["fedavg"], ())
