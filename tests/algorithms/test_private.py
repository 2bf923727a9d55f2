"""Privacy: uploads clipped as whole vectors, noise that can be reconstructed, and epsilon against closed forms."""

import sys

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm
from simulations import simulation_of
from small_gridworld import FLEET, POLICY, Keeping, agent
from tiny_config import BASE, changed

import perfedrl as pf
from perfedrl import privacy
from perfedrl.algorithms import Attacked, Private, Robust, privatize
from perfedrl.algorithms.aggregation import Median
from perfedrl.algorithms.attacks import SignFlip
from perfedrl.experiments.config import make_config
from perfedrl.experiments.training import train
from perfedrl.key_domains import UPLOAD_NOISE

OWN = pf.FedAvgPG(1.0, 0.3, local_steps=2, m=3)
SHORT = {**BASE, "rounds": 1, "algorithm": {"name": "fedavg-pg", "alpha": 1.0, "beta": 0.1, "m": 2}}
MESSAGE = {"a": jnp.asarray([1.0, 2.0]), "b": jnp.asarray([[3.0]])}
KEY = jax.random.key(7)


def moved(by):
    return {"a": MESSAGE["a"] + jnp.asarray(by[:2]), "b": MESSAGE["b"] + by[2]}


def displacement(upload):
    return np.concatenate([np.ravel(upload[k] - MESSAGE[k]) for k in "ab"])


def test_a_long_displacement_is_cut_to_length_as_one_vector():
    sent = privatize(MESSAGE, moved([2.0, -3.0, 6.0]), 3.5, 0.0, KEY)
    np.testing.assert_allclose(displacement(sent), np.asarray([2.0, -3.0, 6.0]) / 2, rtol=1e-6)
    np.testing.assert_array_equal(displacement(privatize(MESSAGE, moved([2.0, -3.0, 6.0]), 7.5, 0.0, KEY)), [2, -3, 6])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_upload_that_is_not_finite_is_replaced_by_the_message(bad):
    sent = privatize(MESSAGE, moved([2.0, bad, 6.0]), 1.0, 0.0, KEY)
    np.testing.assert_array_equal(displacement(sent), 0)


def test_the_noise_is_gaussian_with_noise_times_clip_on_every_coordinate():
    sent = privatize(MESSAGE, moved([0.3, 0.0, 0.4]), 2.0, 1.5, KEY)
    keys = jax.random.split(KEY, 2)
    drawn = np.concatenate(
        [np.ravel(jax.random.normal(k, MESSAGE[leaf].shape)) for k, leaf in zip(keys, "ab", strict=True)]
    )
    np.testing.assert_allclose(displacement(sent), np.asarray([0.3, 0.0, 0.4]) + 1.5 * 2.0 * drawn, rtol=1e-5)
    zero = jnp.zeros((100, 100))
    many = np.asarray(privatize(zero, zero, 0.5, 2.0, KEY))
    assert many.std() == pytest.approx(1.0, rel=0.02)
    assert len(np.unique(many)) > 9_900, "each coordinate has its own"


def test_without_noise_and_clipping_it_is_bitwise_the_inner_algorithm():
    server, state = OWN.init(jnp.zeros((9, 4)))
    one, two = (a.client(server.message, state, agent(1), KEY) for a in (OWN, Private(OWN, 1e30, 0.0)))
    np.testing.assert_array_equal(np.asarray(one[0]).view(np.int32), np.asarray(two[0]).view(np.int32))
    jax.tree.map(np.testing.assert_array_equal, one[1], two[1])
    sent = []
    for algorithm in (OWN, Private(OWN, 1e30, 0.0)):
        simulation = simulation_of(FLEET, POLICY, [Keeping(algorithm)] * 2, [0, 1])
        sent.append(simulation.advance(simulation.start(), 0, 1).server.private)
    np.testing.assert_array_equal(sent[0].view(np.int32), sent[1].view(np.int32), "in the simulator too")


def test_privacy_changes_none_of_the_draws_of_training():
    server, state = OWN.init(jnp.zeros((9, 4)))
    plain, _ = OWN.client(server.message, state, agent(1), KEY)
    noised, _ = Private(OWN, 1e3, 0.1).client(server.message, state, agent(1), KEY)
    again = privatize(server.message, plain, 1e3, 0.1, jax.random.fold_in(KEY, UPLOAD_NOISE))
    np.testing.assert_allclose(noised, again, rtol=1e-6)
    assert np.abs(noised - plain).mean() > 10
    key = jax.random.key_data(jax.random.fold_in(KEY, UPLOAD_NOISE))
    assert not (jax.random.key_data(jax.random.split(KEY, 10_000)) == key).all(axis=1).any()


def test_algorithms_without_displacements_are_rejected():
    with pytest.raises(pf.UserError, match="sends nothing"):
        Private(pf.LocalPG(0.1), 1.0, 1.0)
    with pytest.raises(pf.UserError, match="a changed message"):
        privatize(MESSAGE, MESSAGE["a"], 1.0, 1.0, KEY)
    for clip, noise, message in ((0.0, 1.0, "clip"), (1.0, -1.0, "noise"), (float("nan"), 1.0, "clip")):
        with pytest.raises(pf.UserError, match=message):
            Private(OWN, clip, noise)


def closed_form(sigma, delta):
    """Balle and Wang (2018), eq. (6): where the Gaussian mechanism of sensitivity 1 spends exactly delta."""
    spent = lambda e: norm.cdf(0.5 / sigma - e * sigma) - np.exp(e) * norm.cdf(-0.5 / sigma - e * sigma)  # noqa: E731
    return brentq(lambda e: spent(e) - delta, 0, 300)


@pytest.mark.parametrize(("noise", "releases"), [(2.0, 1), (10.0, 20), (30.0, 150)])
def test_epsilon_is_that_of_the_closed_form(noise, releases):
    sigma = noise / 2 / np.sqrt(releases)
    assert privacy.loss(noise, releases, 1e-5) == pytest.approx(closed_form(sigma, 1e-5), rel=1e-6)


def test_epsilon_agrees_with_an_accountant_that_composes_numerically():
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(10.0 / 2), 20))
    exact = privacy.loss(10.0, 20, 1e-5)
    assert exact <= accountant.get_epsilon(1e-5) <= exact + 0.01


def test_more_releases_and_less_noise_cost_privacy():
    assert privacy.loss(1.0, 0, 1e-5) == 0
    assert privacy.loss(0.0, 1, 1e-5) == np.inf
    by_noise = [privacy.loss(noise, 150, 1e-5) for noise in (0.01, 0.1, 1.0, 10.0, 100.0)]
    assert by_noise == sorted(by_noise, reverse=True)
    by_round = [privacy.loss(10.0, k, 1e-5) for k in (1, 10, 100, 1000)]
    assert by_round == sorted(by_round)


@pytest.mark.parametrize("noises", [(2.0,), (10.0,) * 20, (30.0,) * 150, (1e4,), (0.3,) * 150])
def test_the_loss_of_a_cost_is_a_bound_near_the_exact_loss_of_equal_releases(noises):
    exact = privacy.loss(noises[0], len(noises), 1e-5)
    bound = privacy.loss_of_cost(len(noises) * privacy.concentrated_cost(noises[0]), 1e-5)
    assert exact <= bound <= 1.12 * exact + 0.01


def test_the_loss_of_a_cost_is_the_best_order_of_the_published_conversion():
    """Canonne, Kamath and Steinke (2020), Proposition 12, minimized over all orders."""
    for cost in (1e-4, 0.01, 1.0, 30.0, 3000.0):
        of_order = lambda a, c=cost: c * a + np.log1p(-1 / a) - np.log(1e-5 * a) / (a - 1)  # noqa: E731
        best = min(of_order(1 + np.exp(x)) for x in np.linspace(-4.5, 16, 20_001))
        assert best - 1e-9 <= privacy.loss_of_cost(cost, 1e-5) <= 1.001 * best + 1e-6


def test_costs_of_different_noises_add():
    assert privacy.concentrated_cost(4.0) == 1 / 8  # sensitivity 2, standard deviation 4
    three = 3 * privacy.concentrated_cost(4.0)
    assert three == pytest.approx(privacy.concentrated_cost(4.0 / np.sqrt(3)))
    mixed = 51 * privacy.concentrated_cost(0.01) + privacy.concentrated_cost(10.0)
    assert privacy.loss_of_cost(mixed, 1e-5) > privacy.loss(0.01, 51, 1e-5) > 1e6 > privacy.loss(10.0, 52, 1e-5)
    assert (privacy.concentrated_cost(0.0), privacy.loss_of_cost(np.inf, 1e-5)) == (np.inf, np.inf)
    assert (privacy.concentrated_cost(1e-200), privacy.loss_of_cost(0.0, 1e-5)) == (np.inf, 0)
    for bad in ((-1.0, 1e-5), (np.nan, 1e-5), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(pf.UserError):
            privacy.loss_of_cost(*bad)


@pytest.mark.parametrize("bad", [(-1.0, 1, 1e-5), (1.0, -1, 1e-5), (1.0, 1, 0.0), (1.0, 1, 1.0), (np.nan, 1, 1e-5)])
def test_invalid_privacy_accounting_is_rejected(bad):
    with pytest.raises(pf.UserError):
        privacy.loss(*bad)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(pf.UserError, match=r'pip install "perfedrl\[federation\]"'):
        privacy.loss(1.0, 1, 1e-5)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"clip": 1.0}, "privacy.noise"),
        ({"clip": 0.0, "noise": 1.0}, "privacy.clip"),
        ({"clip": 1.0, "noise": -1.0}, "privacy.noise"),
        ({"clip": 1.0, "noise": 1.0, "delta": 1.0}, "privacy.delta"),
        ({"clip": 1.0, "noise": 1.0, "epsilon": 1.0}, "privacy.epsilon"),
        (3, "privacy"),
    ],
)
def test_bad_tables_are_refused(table, message):
    with pytest.raises(pf.UserError, match=message):
        make_config(changed(privacy=table))


@pytest.mark.slow
def test_configs_that_differ_in_clip_and_noise_train_side_by_side(tmp_path):
    private = lambda **table: make_config({**SHORT, "privacy": table})  # noqa: E731
    loud, quiet = (private(clip=0.5, noise=noise) for noise in (1.0, 0.0))
    assert loud.digest != quiet.digest != make_config(SHORT).digest
    assert loud.digest == private(clip=0.5, noise=1.0, delta=1e-5).digest
    assert loud.trains_with == quiet.trains_with != make_config(SHORT).trains_with
    runs = train([loud, quiet], tmp_path)
    alone = train(quiet, tmp_path / "alone")
    np.testing.assert_array_equal(runs[1].params, alone.params)
    assert np.abs(runs[0].params).mean() > 5 * np.abs(runs[1].params).mean()
    assert pf.load_run(runs[0].folder).config == loud


def test_the_wrappers_stand_in_their_order():
    table = {"privacy": {"clip": 0.5, "noise": 1.0}, "aggregation": "median"}
    made = make_config(changed(**table, attack={"name": "sign-flip", "agents": 1})).experiment.algorithm
    expected = Attacked(Robust(Private(OWN, 0.5, 1.0), Median()), SignFlip(), 1)
    assert [type(x) for x in (made, made.inner, made.inner.inner)] == [Attacked, Robust, Private]
    assert jax.tree.structure(made.inner.inner.inner) == jax.tree.structure(make_config(BASE).experiment.algorithm)
    private, robust = made.inner.inner, made.inner
    assert (private.clip, private.noise, robust.aggregation, made.attack) == (0.5, 1.0, Median(), expected.attack)
