"""The server's optimizer: the inner algorithm at rate 1, textbook steps elsewhere, and nothing of it on the wire."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulations import simulation_of
from tiers import some_slow
from tiny_config import FEDAVG

import perfedrl as pf
from perfedrl.algorithms import FedOpt, FedPPO, Personal, ProMP, Robust
from perfedrl.algorithms.aggregation import Median
from perfedrl.algorithms.base import ServerState
from perfedrl.errors import UserError
from perfedrl.experiments.config import make_config
from perfedrl.simulation import compiled

FLEET = pf.gridworld(width=3, horizon=5)
POLICY = pf.TableSoftmax(9, 4)
INNER = pf.FedAvgPG(1.0, 0.2, 2, 4)
TABLE = {**FEDAVG, "name": "server", "server": {"optimizer": "adam", "rate": 0.1}}
MOVES = np.asarray([[1.0, -0.5, 0.0], [0.5, 0.5, 0.0], [-0.25, 1.0, 0.0]])


def after(algorithm, rounds=4):
    simulation = simulation_of(FLEET, POLICY, [algorithm] * 2, [0, 1])
    return simulation.advance(simulation.start(), 0, rounds)


@pytest.mark.parametrize("inner", some_slow([INNER, Robust(INNER, Median())], [INNER]), ids=["mean", "median"])
def test_a_plain_step_of_rate_1_is_the_inner_algorithm_bit_for_bit(inner):
    plain, stepped = after(inner), after(FedOpt(inner, "sgd", 1.0))
    assert np.abs(plain.server.message).max() > 0.01
    np.testing.assert_array_equal(stepped.server.message, plain.server.message)


@pytest.mark.parametrize("inner", [ProMP, FedPPO])
def test_it_moves_what_is_learned_where_nothing_else_is_sent(inner):
    """Agents that keep or forget their optimizer's state, or have none, send parameters alone."""
    for settings in ({"optimizer": "sgd"}, {"optimizer_state": "personal"}, {"optimizer_state": "reset"}):
        FedOpt(inner(1.0, 0.1, **settings), "adam", 0.1).check_supports(FLEET, POLICY)
    for settings in ({}, {"optimizer": "sgd", "anneal": 3}):
        with pytest.raises(UserError, match="holds more than these"):
            FedOpt(inner(1.0, 0.1, **settings), "adam", 0.1).check_supports(FLEET, POLICY)


def walk(optimizer, rate, **settings):
    """Where the server goes when the agents' mean displacements are MOVES, one after the other."""
    algorithm = FedOpt(INNER, optimizer, rate, **settings)
    state, way = algorithm.init(jnp.zeros(3))[0], []
    for move in MOVES:
        uploads = state.message + jnp.asarray(move, jnp.float32) * jnp.asarray([[0.5], [1.5]])
        state = algorithm.server(state, uploads, jnp.ones(2))
        way.append(np.asarray(state.message))
    return np.asarray(way)


def test_the_rate_falls_over_rounds_to_a_twentieth():
    """Plain steps at rate 2, annealed over two rounds: rates 2, 2 - 0.95, and a tenth from then on."""
    steps = np.diff(walk("sgd", 2.0, anneal=2), axis=0, prepend=np.zeros((1, 3)))
    np.testing.assert_allclose(steps, MOVES * [[2.0], [1.05], [0.1]], atol=1e-6)
    with pytest.raises(UserError, match="schedule = 'cosine' needs anneal"):
        FedOpt(INNER, "adam", 0.1, schedule="cosine")


def by_hand(optimizer, rate, momentum=0.9, b1=0.9, b2=0.99, eps=1e-3):
    """The optimizers as their papers have them, in NumPy."""
    x, m, v, way = np.zeros(3), np.zeros(3), np.zeros(3), []
    for t, g in enumerate(MOVES, start=1):
        if optimizer == "sgd":
            step = g
        elif optimizer == "momentum":
            step = m = momentum * m + g
        elif optimizer == "adagrad":
            v = v + g**2
            step = g / np.sqrt(v + eps**2)
        else:
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g**2 if optimizer == "adam" else v - (1 - b2) * np.sign(v - g**2) * g**2
            step = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
        x = x + rate * step
        way.append(x)
    return np.asarray(way)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "yogi", "adagrad"])
def test_the_server_steps_as_by_hand(optimizer):
    np.testing.assert_allclose(walk(optimizer, 0.3), by_hand(optimizer, 0.3), atol=2e-6)


def test_moments_stay_with_the_server_and_personal_parameters_where_they_are():
    algorithm = FedOpt(INNER, "adam", 0.1)
    size = lambda algorithm: simulation_of(FLEET, POLICY, [algorithm], [0]).experiment.bytes_per_round  # noqa: E731
    assert size(algorithm) == size(INNER)
    own = FedOpt(Personal(INNER, ("own",)), "adam", 0.1)
    server, _ = own.init({"own": jnp.ones(2), "ours": jnp.ones(3)})
    uploads = {"own": jnp.zeros((2, 0)), "ours": jnp.full((2, 3), 2.0)}
    moved = own.server(server, uploads, jnp.ones(2)).message
    np.testing.assert_array_equal(moved["own"], 1)
    np.testing.assert_allclose(moved["ours"], 1.1, atol=1e-3)


def test_rates_share_a_program_and_a_group():
    jax.clear_caches()
    simulation = simulation_of(FLEET, POLICY, [FedOpt(INNER, "adam", rate) for rate in (0.01, 0.1)], [0, 0])
    before = compiled.advance_replicas.compilations()
    message = simulation.advance(simulation.start(), 0, 1).server.message
    assert compiled.advance_replicas.compilations() == before + 1
    np.testing.assert_allclose(10 * message[0], message[1], atol=1e-5)
    slow, fast = (make_config({**TABLE, "server": {"optimizer": "adam", "rate": rate}}) for rate in (0.01, 0.1))
    assert slow.trains_with == fast.trains_with
    assert slow.digest != fast.digest
    assert fast.digest == make_config({**TABLE, "server": {"optimizer": "adam", "rate": 0.1, "b1": 0.9}}).digest
    assert fast.trains_with != make_config({**TABLE, "server": {"optimizer": "yogi", "rate": 0.1}}).trains_with


def test_the_inner_algorithm_keeps_its_private_part():
    class Counting(type(INNER)):
        def init(self, params):
            return ServerState(params, jnp.zeros(())), ()

        def server(self, state, uploads, weights):
            return ServerState(super().server(state, uploads, weights).message, state.private + 1)

    algorithm = FedOpt(Counting(1.0, 0.2), "momentum", 0.5)
    state = algorithm.init(jnp.zeros(3))[0]
    for _ in range(3):
        state = algorithm.server(state, jnp.ones((2, 3)), jnp.ones(2))
    assert state.private.inner == 3


def test_invalid_settings_and_algorithms_without_displacements_are_rejected():
    with pytest.raises(UserError, match="no displacement to step along"):
        FedOpt(pf.LocalPG(0.1))
    with pytest.raises(UserError, match="rate must be a finite number > 0"):
        FedOpt(INNER, "adam", 0.0)
    with pytest.raises(UserError, match=r"b2 must lie in \[0, 1\)"):
        FedOpt(INNER, "adam", 0.1, b2=1.0)
    with pytest.raises(UserError, match="holds more than these"):
        make_config({**TABLE, "algorithm": {"name": "fast-fedpg", "alpha": 1.0, "beta": 0.1}})
    for table in ({"optimizer": "lion", "rate": 0.1}, {"optimizer": "adam"}, {"optimizer": "adam", "rate": -1}):
        with pytest.raises(UserError, match="server"):
            make_config({**TABLE, "server": table})


def test_a_config_trains_with_it_under_an_attack_too(tmp_path):
    config = make_config({**TABLE, "aggregation": "median", "attack": {"name": "sign-flip", "agents": 1}})
    run = pf.train(config, tmp_path, compile_cache=False)
    assert np.isfinite(run.history.after).all()
    assert jax.tree.leaves(run.message)
