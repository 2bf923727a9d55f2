"""Attacks: what each sends, who sends it, and that averaging falls to what a median withstands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interruption import StopAt
from simulations import simulation_of
from small_gridworld import FLEET, POLICY
from tiny_config import BASE, changed

import perfedrl as pf
from perfedrl.algorithms import ATTACKS, Attack, Attacked, Robust, ServerState
from perfedrl.algorithms.aggregation import Krum, Median
from perfedrl.algorithms.attacks import ALittle, Collusion, Opposite, Random, Scaled, SignFlip
from perfedrl.experiments.config import make_config
from perfedrl.experiments.training import Interrupted, train

OWN = pf.FedAvgPG(1.0, 0.3, local_steps=2, m=3)
MESSAGE, UPLOAD, KEY = jnp.asarray([1.0, 2.0]), jnp.asarray([2.0, 0.0]), jax.random.key(3)
TREE = {"a": jnp.ones((3, 2)), "b": jnp.zeros(4)}
MOVED = jax.tree.map(lambda x: x + 0.5, TREE)


def length(upload):
    return np.sqrt(sum(((upload[k] - TREE[k]) ** 2).sum() for k in "ab"))


def test_every_attack_sends_its_documented_upload():
    np.testing.assert_allclose(SignFlip()(MESSAGE, UPLOAD, KEY), [1 - 2.5, 2 + 2.5 * 2])
    np.testing.assert_allclose(SignFlip(1.0)(MESSAGE, UPLOAD, KEY), 2 * MESSAGE - UPLOAD)
    np.testing.assert_allclose(Scaled(10.0)(MESSAGE, UPLOAD, KEY), [11, -18])
    one, two = (Random(4.0)(TREE, MOVED, jax.random.key(k)) for k in (0, 1))
    assert length(one) == pytest.approx(4 * length(MOVED), rel=1e-5)
    assert length(two) == pytest.approx(4 * length(MOVED), rel=1e-5)
    assert np.abs(one["a"] - two["a"]).min() > 0, "another key, another direction"
    jax.tree.map(np.testing.assert_array_equal, Random()(TREE, TREE, KEY), TREE)


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_hashable_parts_that_keep_the_shape_of_uploads(name):
    attack = ATTACKS[name]()
    assert isinstance(attack, Attack)
    assert hash(attack) == hash(ATTACKS[name]())
    seen = jax.tree.map(lambda x, y: jnp.stack([x, y, y]), TREE, MOVED) if isinstance(attack, Collusion) else MOVED
    assert jax.tree.map(jnp.shape, attack(TREE, seen, KEY)) == jax.tree.map(jnp.shape, TREE)


def test_colluding_agents_send_what_is_documented():
    honest = jnp.asarray([[2.0, 2.0], [4.0, 2.0], [1.0, 5.0]])  # displacements (1, 0), (3, 0), (0, 3)
    sent = Opposite(2.0)(MESSAGE, honest, KEY)
    np.testing.assert_allclose(sent, MESSAGE - 2 * 3 * np.asarray([4, 3]) / 5, rtol=1e-6)
    np.testing.assert_array_equal(Opposite()(MESSAGE, jnp.stack([MESSAGE] * 3), KEY), MESSAGE)
    sent = ALittle(0.5)(MESSAGE, honest, KEY)
    np.testing.assert_allclose(sent, honest.mean(axis=0) - 0.5 * np.std(honest, axis=0), rtol=1e-6)


def test_colluding_agents_know_the_honest_uploads_and_all_send_the_same():
    uploads = np.random.default_rng(0).normal(size=(6, 9, 4)).astype(np.float32)
    attacked = Attacked(OWN, Opposite(), 2)
    found = attacked.server(attacked.init(jnp.zeros((9, 4)))[0], uploads, jnp.ones(6))
    lie = Opposite()(jnp.zeros((9, 4)), uploads[:4], KEY)
    by_hand = np.concatenate([uploads[:4], [lie, lie]]).mean(axis=0)
    np.testing.assert_allclose(found.message, by_hand, rtol=1e-4, atol=1e-6)


def test_only_the_last_agents_attack():
    attacked = Attacked(Robust(OWN, Krum(1)), Scaled(5.0), 2)
    uploads = np.random.default_rng(0).normal(size=(6, 9, 4)).astype(np.float32)
    server, _ = attacked.init(jnp.zeros((9, 4)))
    found = attacked.server(server, uploads, jnp.ones(6))
    by_hand = np.concatenate([uploads[:4], 5 * uploads[4:]])
    np.testing.assert_allclose(found.message, Krum(1)(by_hand, jnp.ones(6)), rtol=1e-6)
    mean = Attacked(OWN, Scaled(5.0), 2)
    weights = np.arange(1.0, 7)
    found = mean.server(mean.init(jnp.zeros((9, 4)))[0], uploads, weights)
    np.testing.assert_allclose(found.message, np.average(by_hand, axis=0, weights=weights), rtol=1e-4, atol=1e-6)


class Anchored(pf.FedAvgPG):
    """An algorithm with a private part of its own."""

    def init(self, params):
        return ServerState(params, (jnp.ones(()),)), ()

    def server(self, state, uploads, weights):
        (seen,) = state.private
        return ServerState(super().server(state, uploads, weights).message, (2 * seen,))


def test_the_inner_algorithms_private_part_goes_on_beside_the_rounds():
    attacked = Attacked(Anchored(1.0, 0.3), Random(1.0), 1)
    state, _ = attacked.init(jnp.zeros((9, 4)))
    uploads, sent = jnp.ones((3, 9, 4)), []
    for k in range(1, 4):
        state = attacked.server(ServerState(jnp.zeros((9, 4)), state.private), uploads, jnp.ones(3))
        assert (state.private.rounds, state.private.inner) == (k, (2.0**k,))
        sent.append(np.asarray(3 * state.message - 2))
    assert np.abs(sent[0] - sent[1]).min() > 0, "every round draws anew"
    assert np.linalg.norm(sent[2]) == pytest.approx(6, rel=1e-4)


@pytest.mark.slow
def test_an_attack_breaks_the_mean_and_not_the_median():
    fleet, honest = pf.gridworld(3, goals=[(2, 2)] * 3, horizon=6), pf.FedAvgPG(1.0, 0.5)
    under = lambda algorithm: Attacked(algorithm, Random(100.0), 1)  # noqa: E731
    final = lambda a: pf.simulate(fleet, POLICY, a, rounds=5, seeds=1, every=5, noiseless=True).params[0]  # noqa: E731
    clean, mean, robust = (final(a) for a in (honest, under(honest), under(Robust(honest, Median()))))
    length = np.linalg.norm(clean)
    assert np.linalg.norm(mean - clean) > 10 * length
    np.testing.assert_allclose(robust, clean, atol=1e-9, err_msg="the others all send the same")


@pytest.mark.slow
def test_an_attacked_run_goes_on_where_it_stopped_to_the_same_bits(tmp_path):
    config = make_config(changed(attack={"name": "random", "agents": 1}, aggregation="median"))
    whole = train(config, tmp_path / "whole")

    with pytest.raises(Interrupted):
        train(config, tmp_path / "parts", observers=[StopAt(config.stops[0])])
    np.testing.assert_array_equal(train(config, tmp_path / "parts").params, whole.params)
    pf.evaluate(whole)
    assert pf.load_run(whole.folder).config == config
    assert config.digest != make_config(changed(aggregation="median")).digest
    assert make_config(BASE).to_toml() == make_config(changed(attack=None)).to_toml()


def test_invalid_attacks_are_rejected():
    with pytest.raises(pf.UserError, match="sends nothing"):
        Attacked(pf.LocalPG(0.1), SignFlip(), 1)
    with pytest.raises(pf.UserError, match="none of them is honest"):
        Attacked(OWN, SignFlip(), 2).server(
            ServerState(MESSAGE, ((), jnp.zeros((), jnp.int32))), jnp.ones((2, 2)), jnp.ones(2)
        )
    with pytest.raises(pf.UserError, match=f"at least {FLEET.agents + 1} training agents"):
        simulation_of(FLEET, POLICY, [Attacked(OWN, SignFlip(), FLEET.agents)], [0])
    for name, params in (("sign-flip", {"scale": 0.0}), ("scaled", {"factor": -1.0}), ("random", {"factor": np.inf})):
        with pytest.raises(pf.UserError, match=next(iter(params))):
            ATTACKS[name](**params)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("sign-flip", "needs agents"),
        ({"name": "sign-flip", "agents": 0}, "needs agents"),
        ({"name": "sign-flip", "agents": True}, "needs agents"),
        ({"name": "sign-flip", "agents": 4}, "at least 5 training agents; there are 4"),
        ({"name": "signflip", "agents": 1}, "unknown attack 'signflip'.*'sign-flip'"),
        ({"name": "scaled", "agents": 1, "scale": 2.0}, "no parameter 'scale'"),
        ({"agents": 1}, "needs name"),
    ],
)
def test_bad_tables_are_refused(table, message):
    with pytest.raises(pf.UserError, match=message):
        make_config(changed(attack=table))
